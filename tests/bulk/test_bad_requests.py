"""Malformed, oversized, foreign and misdirected requests: each its status, in OpenAI's shape."""

import json
import time
import urllib.error
import urllib.request

import pytest

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
USER = [{"role": "user", "content": "Hello"}]
CHAT_OK = {"model": "tiny", "messages": USER, "max_tokens": 2}
TEXT_OK = {"model": "tiny", "prompt": "Hello", "max_tokens": 2}
JSON = "application/json"
OTHERS_FILE = object()


def chat(**changes):
    return ("POST", CHAT, {**CHAT_OK, **changes})


def text(**changes):
    return ("POST", COMPLETIONS, {**TEXT_OK, **changes})


def without(body, name):
    return {k: v for k, v in body.items() if k != name}


def batch(**changes):
    body = {"input_file_id": "file-00000000", "endpoint": CHAT, "completion_window": "24h"}
    return ("POST", "/v1/batches", {**body, **changes})


# (method, path, body), status, code, param
CASES = {
    "chat-not-json": (("POST", CHAT, b"{not json"), 400, "invalid_json", None),
    "chat-empty": (("POST", CHAT, b""), 400, None, None),
    "chat-array": (("POST", CHAT, b"[]"), 400, None, None),
    "chat-null": (("POST", CHAT, b"null"), 400, None, None),
    "chat-string": (("POST", CHAT, b'"hello"'), 400, None, None),
    "chat-latin1": (("POST", CHAT, '{"model": "é"}'.encode("latin-1")), 400, None, None),
    "chat-utf16": (("POST", CHAT, '{"model": "é"}'.encode("utf-16-be")), 400, None, None),
    "chat-nan": (("POST", CHAT, b'{"model": "tiny", "temperature": NaN}'), 400, None, None),
    "chat-deep": (("POST", CHAT, b"[" * 100_000), 400, None, None),
    "chat-no-model": (("POST", CHAT, without(CHAT_OK, "model")), 400, "missing_parameter", "model"),
    "chat-no-messages": (
        ("POST", CHAT, without(CHAT_OK, "messages")),
        400,
        "missing_parameter",
        "messages",
    ),
    "chat-other-model": (chat(model="gpt-4"), 404, "model_not_found", "model"),
    "chat-model-number": (chat(model=4), 400, "invalid_value", "model"),
    "chat-model-empty": (chat(model=""), 400, "invalid_value", "model"),
    "chat-messages-string": (chat(messages="Hello"), 400, "invalid_value", "messages"),
    "chat-messages-empty": (chat(messages=[]), 400, "invalid_value", "messages"),
    "chat-role-tool": (
        chat(messages=[{"role": "tool", "content": "x"}]),
        400,
        "invalid_value",
        "messages.0.role",
    ),
    "chat-no-content": (
        chat(messages=[{"role": "user"}]),
        400,
        "missing_parameter",
        "messages.0.content",
    ),
    "chat-image": (
        chat(messages=[{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]),
        400,
        None,
        None,
    ),
    "chat-surrogate": (
        (
            "POST",
            CHAT,
            json.dumps({**CHAT_OK, "messages": [{"role": "user", "content": "\ud800"}]}),
        ),
        400,
        None,
        None,
    ),
    "chat-unknown": (chat(temprature=1), 400, "unknown_parameter", "temprature"),
    "chat-n": (chat(n=2), 400, "unsupported_value", "n"),
    "chat-tools": (
        chat(tools=[{"type": "function"}]),
        400,
        "unsupported_value",
        "tools",
    ),
    "chat-logprobs": (chat(logprobs=True), 400, "unsupported_value", "logprobs"),
    "chat-json-mode": (
        chat(response_format={"type": "json_object"}),
        400,
        "unsupported_value",
        "response_format",
    ),
    "chat-logit-bias": (chat(logit_bias={"5": 1}), 400, "unsupported_value", "logit_bias"),
    "chat-penalty": (
        chat(presence_penalty=0.5),
        400,
        "unsupported_value",
        "presence_penalty",
    ),
    "chat-temperature-low": (chat(temperature=-1), 400, "invalid_value", "temperature"),
    "chat-temperature-high": (chat(temperature=2.5), 400, "invalid_value", "temperature"),
    "chat-temperature-text": (chat(temperature="hot"), 400, "invalid_value", "temperature"),
    "chat-top-p": (chat(top_p=0), 400, "invalid_value", "top_p"),
    "chat-max-tokens-zero": (chat(max_tokens=0), 400, "invalid_value", "max_tokens"),
    "chat-max-tokens-half": (chat(max_tokens=1.5), 400, "invalid_value", "max_tokens"),
    "chat-max-tokens-huge": (chat(max_tokens=100_000), 400, "context_length_exceeded", "messages"),
    "chat-seed-huge": (chat(seed=2**70), 400, "invalid_value", "seed"),
    "chat-stop-empty": (chat(stop=""), 400, None, None),
    "chat-stop-many": (chat(stop=["x"] * 17), 400, None, None),
    "chat-too-long": (
        chat(messages=[{"role": "user", "content": "mill " * 3000}]),
        400,
        "context_length_exceeded",
        "messages",
    ),
    "chat-stream-options": (
        chat(stream_options={"include_usage": True}),
        400,
        "unsupported_value",
        "stream_options",
    ),
    "chat-task": (chat(task="rewrite"), 400, "invalid_value", "task"),
    "chat-translate-whither": (chat(task="translate"), 400, "unsupported_value", "target_lang"),
    "chat-lang-alone": (chat(target_lang="de"), 400, "unsupported_value", "target_lang"),
    "chat-no-language": (
        chat(task="translate", source_lang="en", target_lang="Klingonish"),
        400,
        "unsupported_value",
        "task",
    ),
    "chat-method": (chat(method="mtp"), 400, "unsupported_value", "method"),
    "chat-blank-document": (
        chat(task="summarize", messages=[{"role": "user", "content": " \n"}]),
        400,
        "blank",
        None,
    ),
    "chat-get": (("GET", CHAT, None), 405, "method_not_allowed", None),
    "text-no-prompt": (
        ("POST", COMPLETIONS, without(TEXT_OK, "prompt")),
        400,
        "missing_parameter",
        "prompt",
    ),
    "text-prompt-object": (text(prompt={"a": 1}), 400, None, None),
    "text-prompt-none": (text(prompt=[]), 400, None, None),
    "text-prompt-empty": (text(prompt=""), 400, "empty_prompt", None),
    "text-prompt-many": (text(prompt=["x"] * 65), 400, None, None),
    "text-bad-token": (text(prompt=[5, 99_999]), 400, "bad_token", None),
    "text-minus-token": (text(prompt=[-1]), 400, "bad_token", None),
    "text-echo": (text(echo=True), 400, "unsupported_value", "echo"),
    "text-best-of": (text(best_of=3), 400, "unsupported_value", "best_of"),
    "text-stream-many": (text(prompt=["a", "b"], stream=True), 400, "unsupported_value", "stream"),
    "text-form": (
        ("POST", COMPLETIONS, b"model=tiny&prompt=x", "application/x-www-form-urlencoded"),
        400,
        None,
        None,
    ),
    "unknown-path": (("GET", "/v1/embeddings", None), 404, "unknown_url", None),
    "unknown-model": (("GET", "/v1/models/other", None), 404, "not_found", None),
    "file-unknown": (("GET", "/v1/files/file-00000000", None), 404, "not_found", None),
    "file-traversal": (
        ("GET", "/v1/files/..%2F..%2Fkeys%2Fbob/content", None),
        404,
        None,
        None,
    ),
    "file-dots": (("GET", "/v1/files/../../../etc/passwd", None), 404, None, None),
    "file-limit": (("GET", "/v1/files?limit=0", None), 400, "invalid_value", "limit"),
    "file-after": (("GET", "/v1/files?after=file-none", None), 400, "invalid_value", "after"),
    "file-json": (("POST", "/v1/files", {"file": "x"}), 400, None, None),
    "batch-unknown": (("GET", "/v1/batches/batch_0000000000000000", None), 404, "not_found", None),
    "batch-no-file": (batch(), 404, "not_found", None),
    "batch-endpoint": (batch(endpoint="/v1/embeddings"), 400, "invalid_value", "endpoint"),
    "batch-window": (
        batch(completion_window="soon"),
        400,
        "invalid_value",
        "completion_window",
    ),
    "batch-window-long": (
        batch(completion_window="9d"),
        400,
        "invalid_value",
        "completion_window",
    ),
    "batch-metadata": (
        batch(metadata={str(n): "x" for n in range(17)}),
        400,
        "invalid_value",
        "metadata",
    ),
    "batch-both-inputs": (batch(input_uri="/etc/x.jsonl"), 403, "uri_not_allowed", "input_uri"),
    "batch-foreign-uri": (
        batch(input_file_id=None, input_uri="/etc/passwd.jsonl"),
        403,
        "uri_not_allowed",
        "input_uri",
    ),
    "batch-url": (
        batch(input_file_id=None, input_uri="http://169.254.169.254/latest.jsonl"),
        403,
        "uri_not_allowed",
        "input_uri",
    ),
    "batch-limit": (("GET", "/v1/batches?limit=101", None), 400, "invalid_value", "limit"),
    "too-large": (("POST", COMPLETIONS, b" " * 2_000_001), 413, "request_too_large", None),
}


def ask(endpoint, method, path, body=None, content_type=JSON, key="alice"):
    """(status, headers, parsed body)."""
    if body is not None and not isinstance(body, bytes):
        body = (body if isinstance(body, str) else json.dumps(body)).encode()
    headers = {"Content-Type": content_type}
    if key is not None:
        headers["Authorization"] = f"Bearer {endpoint.keys.get(key, key)}"
    request = urllib.request.Request(endpoint.url + path, body, headers, method=method)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, answer.headers, json.load(answer)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.headers, json.loads(error.read())


def test_there_are_sixty_and_more():
    assert len(CASES) >= 60


@pytest.mark.parametrize("name", CASES)
def test_bad_request(endpoint, name):
    request, status, code, param = CASES[name]
    got, _, body = ask(endpoint, *request)
    assert got == status, body
    assert list(body) == ["error"]
    error = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"] and error["type"]
    if code is not None:
        assert error["code"] == code, error
    if param is not None:
        assert error["param"] == param, error


@pytest.mark.parametrize("key", [None, "", "wrong", "Basic"])
def test_wrong_key(endpoint, key):
    for method, path, body in (("GET", "/v1/models", None), ("POST", CHAT, CHAT_OK)):
        status, headers, answer = ask(endpoint, method, path, body, key=key)
        assert (status, answer["error"]["code"]) == (401, "invalid_api_key")
        assert headers["WWW-Authenticate"] == "Bearer"


def test_health_needs_no_key(endpoint):
    assert ask(endpoint, "GET", "/healthz", key=None)[2] == {"status": "ok"}
    status, _, ready = ask(endpoint, "GET", "/readyz", key=None)
    assert (status, ready["status"], ready["slots"]) == (200, "ready", 8)


def test_another_keys_file_and_batch_do_not_exist(endpoint):
    bob, alice = endpoint.client("bob"), endpoint.client("alice")
    file = bob.files.create(file=("in.jsonl", b"{}\n"), purpose="batch")
    options = {"endpoint": CHAT, "completion_window": "24h"}
    made = bob.batches.create(input_file_id=file.id, **options)
    for method, path, body in (
        ("GET", f"/v1/files/{file.id}", None),
        ("GET", f"/v1/files/{file.id}/content", None),
        ("DELETE", f"/v1/files/{file.id}", None),
        ("GET", f"/v1/batches/{made.id}", None),
        ("POST", f"/v1/batches/{made.id}/cancel", None),
        ("GET", f"/v1/batches/{made.id}/report", None),
        ("POST", "/v1/batches", {"input_file_id": file.id, **options}),
    ):
        status, _, answer = ask(endpoint, method, path, body)
        assert (status, answer["error"]["code"]) == (404, "not_found"), path
    assert alice.files.list().data == [] or file.id not in {f.id for f in alice.files.list()}


def test_creation_sent_twice_makes_one_batch(endpoint):
    client = endpoint.client("bob")
    file = client.files.create(file=("in.jsonl", b"{}\n"), purpose="batch")
    ids = {
        client.batches.create(
            input_file_id=file.id,
            endpoint=CHAT,
            completion_window="24h",
            extra_headers={"Idempotency-Key": "once"},
        ).id
        for _ in range(2)
    }
    assert len(ids) == 1


def test_oversized_body_is_refused_before_it_is_sent(endpoint):
    import socket
    from urllib.parse import urlsplit

    where = urlsplit(endpoint.url)
    with socket.create_connection((where.hostname, where.port), timeout=30) as wire:
        head = (
            f"POST /v1/files HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {endpoint.keys['alice']}"
            "\r\nContent-Type: multipart/form-data; boundary=x\r\nContent-Length: 500000000\r\n\r\n"
        )
        wire.sendall(head.encode() + b"--x\r\n")
        started = time.monotonic()
        answer = wire.recv(1000).decode()
    assert answer.startswith("HTTP/1.1 413") and time.monotonic() - started < 5


def test_no_prompt_in_any_log(endpoint):
    from pathlib import Path

    import ray

    secret = "xyzzy-never-to-be-logged"
    for body in (
        {**CHAT_OK, "messages": [{"role": "user", "content": secret}]},
        {**CHAT_OK, "messages": [{"role": secret, "content": secret}]},
        {**CHAT_OK, secret: secret},
    ):
        ask(endpoint, "POST", CHAT, body)
    time.sleep(1)
    session = Path(ray._private.worker._global_node.get_session_dir_path())
    for file in (session / "logs").rglob("*"):
        if file.is_file() and file.suffix in (".log", ".err", ".out"):
            assert secret not in file.read_text(errors="replace"), file
