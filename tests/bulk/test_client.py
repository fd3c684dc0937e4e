"""The unmodified `openai` client against the tiny model on a real Serve instance."""

import json
import time

import openai
import pyarrow as pa
import pyarrow.dataset
import pyarrow.parquet as pq
import pytest

from tests.test_metrics import scrape

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]
TEXTS = [f"The mill number {n} stands by the river. The wheel turns slowly." for n in range(12)]
LONG = "The mill is by the river. " * 4
CHAT = "/v1/chat/completions"


def chat_line(n: int, **body) -> dict:
    body = {"model": "tiny", "messages": [{"role": "user", "content": TEXTS[n]}], **body}
    return {"custom_id": f"row-{n}", "method": "POST", "url": CHAT, "body": body}


def jsonl(lines) -> bytes:
    return "".join(json.dumps(line) + "\n" for line in lines).encode()


def upload(client, data: bytes, name: str = "in.jsonl"):
    return client.files.create(file=(name, data), purpose="batch")


def batch_of(client, lines, **options):
    file = upload(client, jsonl(lines))
    return client.batches.create(
        input_file_id=file.id, endpoint=CHAT, completion_window="24h", **options
    )


def wait(client, batch, *states: str, seconds: float = 120):
    deadline = time.monotonic() + seconds
    states = states or ("completed", "failed", "expired", "cancelled")
    while True:
        batch = client.batches.retrieve(batch.id)
        if batch.status in states:
            return batch
        assert time.monotonic() < deadline, batch
        time.sleep(0.3)


def results(client, file_id: str) -> dict[str, dict]:
    lines = client.files.content(file_id).text.splitlines()
    found = {line["custom_id"]: line for line in map(json.loads, lines)}
    assert len(found) == len(lines)
    return found


def ask(client, n: int, **options):
    messages = [{"role": "user", "content": TEXTS[n]}]
    return client.chat.completions.create(model="tiny", messages=messages, **options)


def test_models(endpoint):
    client = endpoint.client()
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").object == "model"


def test_chat_has_usage_and_statistics(endpoint):
    answer = ask(endpoint.client(), 0, max_completion_tokens=16)
    assert answer.object == "chat.completion"
    choice = answer.choices[0]
    assert choice.message.role == "assistant" and choice.finish_reason == "length"
    assert answer.usage.completion_tokens == 16
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 16
    speculative = answer.model_extra["speculative"]
    assert speculative["draft_tokens"] > 0
    assert 0 <= speculative["acceptance_rate"] <= 1
    details = answer.usage.completion_tokens_details
    assert details.accepted_prediction_tokens == speculative["accepted_tokens"]


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.9, "seed": 11}], ids=["greedy", "seed"])
def test_stream_is_the_same_text(endpoint, sampling):
    client = endpoint.client()
    whole = ask(client, 1, **sampling)
    options = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = list(ask(client, 1, **options, **sampling))
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    reasons = [c.choices[0].finish_reason for c in chunks if c.choices]
    assert reasons[-1] == whole.choices[0].finish_reason
    assert set(reasons[:-1]) == {None}
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].usage == whole.usage or chunks[-1].usage.completion_tokens == 24
    assert len([c for c in chunks if c.choices and c.choices[0].delta.content]) > 1


def test_seed_fixes_sampled_text_and_method_does_not_change_it(endpoint):
    client = endpoint.client()

    def text(seed, **extra):
        answer = ask(client, 2, temperature=1.0, seed=seed, extra_body=extra)
        return answer.choices[0].message.content, answer.model_extra["speculative"]

    first, drafted = text(1)
    again, plain = text(1, method="plain")
    assert first == again != text(2)[0]
    assert drafted["draft_tokens"] > 0 and plain["draft_tokens"] == 0
    assert ask(client, 2, temperature=1.0).choices[0].message.content != first


def test_completions_take_one_or_several_prompts_or_tokens(endpoint):
    client = endpoint.client()
    several = client.completions.create(model="tiny", prompt=TEXTS[:3], max_tokens=8)
    assert [choice.index for choice in several.choices] == [0, 1, 2]
    one = client.completions.create(model="tiny", prompt=TEXTS[1], max_tokens=8)
    assert one.choices[0].text == several.choices[1].text
    assert several.usage.completion_tokens == 24
    tokens = client.completions.create(model="tiny", prompt=[5, 6, 7], max_tokens=8)
    assert tokens.usage.prompt_tokens == 3
    stream = client.completions.create(model="tiny", prompt=TEXTS[1], max_tokens=8, stream=True)
    assert (
        "".join(chunk.choices[0].text for chunk in stream if chunk.choices) == one.choices[0].text
    )


def test_stop_string_ends_text_and_stream_alike(endpoint):
    client = endpoint.client()
    whole = ask(client, 3).choices[0].message.content
    stop = whole[10:13]
    answer = ask(client, 3, stop=[stop]).choices[0]
    assert answer.finish_reason == "stop"
    assert answer.message.content == whole[: whole.index(stop)]
    chunks = ask(client, 3, stop=[stop], stream=True)
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == answer.message.content


def test_files(endpoint):
    client = endpoint.client("carol")
    ids = [upload(client, b'{"n": %d}\n' % n, f"f{n}.jsonl").id for n in range(5)]
    assert [file.id for file in client.files.list(limit=2)] == ids[
        ::-1
    ]  # pages follow by themselves
    first = client.files.retrieve(ids[0])
    assert (first.filename, first.bytes, first.purpose) == ("f0.jsonl", 9, "batch")
    assert client.files.content(ids[0]).read() == b'{"n": 0}\n'
    with client.files.with_streaming_response.content(ids[1]) as response:
        assert b"".join(response.iter_bytes()) == b'{"n": 1}\n'
    assert client.files.delete(ids[0]).deleted
    with pytest.raises(openai.NotFoundError):
        client.files.retrieve(ids[0])
    with pytest.raises(openai.NotFoundError):  # alice must not learn that it exists
        endpoint.client("alice").files.retrieve(ids[1])


def test_errors_are_the_clients_own(endpoint):
    """404 is above, 409, 429 and 503 are in `test_endurance`."""
    client = endpoint.client()
    with pytest.raises(openai.BadRequestError) as refused:
        ask(client, 0, temperature=9)
    assert (refused.value.code, refused.value.param) == ("invalid_value", "temperature")
    with pytest.raises(openai.AuthenticationError) as refused:
        endpoint.client("nobody").models.list()
    assert refused.value.code == "invalid_api_key"
    with pytest.raises(openai.APIStatusError) as refused:
        upload(client, bytes(2_500_000))
    assert (refused.value.status_code, refused.value.code) == (413, "request_too_large")


@pytest.fixture(scope="module")
def corpus_batch(endpoint):
    """A Parquet corpus that is read and written where it lies; started before its test."""
    corpus = endpoint.folder / "corpus"
    pq.write_table(pa.table({"text": TEXTS}), corpus / "docs.parquet")
    return endpoint.client().batches.create(
        input_file_id="",
        endpoint=CHAT,
        completion_window="24h",
        extra_body={
            "input_uri": str(corpus / "docs.parquet"),
            "output_uri": str(corpus / "summaries"),
            "task": "summarize",
        },
    )


def test_batch_equals_interactive_answers_and_the_job(endpoint, corpus_batch, tmp_path):
    """Rows 0 to 7 are chats, of which one is at fault and one sampled; then documents."""
    client = endpoint.client()
    lines = [chat_line(n, max_tokens=12) for n in range(8)]
    lines[3]["body"]["logprobs"] = True
    lines[5]["body"] |= {"temperature": 0.8, "seed": 5}
    lines += [chat_line(n, task="summarize") | {"custom_id": f"doc-{n}"} for n in range(12)]
    german = {"task": "translate", "source_lang": "en", "target_lang": "de"}
    lines.append(chat_line(0, max_tokens=16, **german) | {"custom_id": "long"})
    lines[-1]["body"]["messages"] = [{"role": "user", "content": LONG}]
    created = batch_of(client, lines, metadata={"purpose": "test"})
    assert created.status in ("validating", "in_progress")
    batch = wait(client, created)
    assert batch.status == "completed", batch
    counts = batch.request_counts
    assert (counts.total, counts.completed, counts.failed) == (21, 20, 1)
    assert batch.metadata == {"purpose": "test"}
    assert batch.in_progress_at <= batch.finalizing_at <= batch.completed_at
    found = results(client, batch.output_file_id)
    assert set(found) == {line["custom_id"] for line in lines} - {"row-3"}
    for n in (0, 5, 7):
        body = found[f"row-{n}"]["response"]["body"]
        options = {k: lines[n]["body"][k] for k in ("temperature", "seed") if k in lines[n]["body"]}
        answer = ask(client, n, max_tokens=12, **options)
        assert body["choices"][0]["message"]["content"] == answer.choices[0].message.content
        assert body["usage"]["completion_tokens"] == answer.usage.completion_tokens
        assert "acceptance_rate" in body["speculative"]
    bodies = [line["response"]["body"] for line in found.values()]
    assert batch.usage.output_tokens == sum(b["usage"]["completion_tokens"] for b in bodies)
    assert batch.model_extra["speculative"]["draft_tokens"] > 0
    (failed,) = results(client, batch.error_file_id).values()
    assert failed["response"]["status_code"] == 400
    assert failed["response"]["body"]["error"]["param"] == "logprobs"
    report = client.get(f"/batches/{batch.id}/report", cast_to=str)
    assert "Acceptance by draft position" in report

    documents = [found[f"doc-{n}"]["response"]["body"]["choices"][0] for n in range(12)]
    summaries = [choice["message"]["content"] for choice in documents]
    assert summaries == of_the_job(endpoint, tmp_path, "summarize", TEXTS)
    long = found["long"]["response"]["body"]["choices"][0]["message"]["content"]
    assert [long] == of_the_job(endpoint, tmp_path, "translate", [LONG])
    one = ask(client, 4, extra_body={"task": "summarize"})
    assert one.choices[0].message.content == summaries[4]


def of_the_job(endpoint, folder, task: str, texts: list[str]) -> list[str]:
    """What `jobs/summarize.py`, or `jobs/translate.py` with 16 tokens, makes of the texts."""
    from pipeline.run import run

    pq.write_table(pa.table({"text": texts}), folder / f"{task}.parquet")
    values = endpoint.config.model_dump() | {"task": task}
    values["input"]["path"] = str(folder / f"{task}.parquet")
    values["output"]["path"] = str(folder / task)
    if task == "translate":
        values["prompt"] |= {"source_lang": "en", "target_lang": "de"}
        values["decoding"] |= {"max_new_tokens": 16}
    config = type(endpoint.config).model_validate(values)
    assert run(config) == 0
    table = pyarrow.dataset.dataset(folder / task).to_table()
    assert task == "summarize" or table["chunks"][0].as_py() > 4
    return table[config.text_columns[0]].to_pylist()


def test_translation_is_into_the_language_that_was_asked_for(endpoint):
    def text(language):
        extra = {"task": "translate", "source_lang": "en", "target_lang": language}
        return ask(endpoint.client(), 0, extra_body=extra).choices[0].message.content

    assert text("de") == text("de") != text("fr")


def test_corpus_in_parquet_is_summarised_where_it_lies(endpoint, corpus_batch):
    client = endpoint.client()
    batch = wait(client, corpus_batch)
    assert batch.status == "completed", batch
    assert batch.request_counts.completed == 12
    table = pyarrow.dataset.dataset(endpoint.folder / "corpus" / "summaries").to_table()
    assert table["status"].to_pylist() == ["ok"] * 12
    one = ask(client, 4, extra_body={"task": "summarize"})
    assert table["summary"][4].as_py() == one.choices[0].message.content


def test_list_of_batches_in_pages_newest_first(endpoint):
    client = endpoint.client("dave")
    made = [batch_of(client, [{"not": "a request"}]).id for _ in range(5)]
    assert [batch.id for batch in client.batches.list(limit=2)] == made[::-1]
    page = client.batches.list(limit=2, after=made[3])
    assert [batch.id for batch in page.data] == [made[2], made[1]] and page.has_more
    assert not {b.id for b in endpoint.client("alice").batches.list()} & set(made)


def test_bad_lines_fail_the_batch_with_their_numbers(endpoint):
    client = endpoint.client()
    lines = [chat_line(n) for n in range(6)]
    lines[2]["custom_id"] = "row-0"
    lines[3]["body"]["model"] = "another"
    lines[4]["url"] = "/v1/embeddings"
    data = jsonl(lines[:5]) + b"{broken\n\n" + jsonl(lines[5:])
    file = upload(client, data)
    batch = client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
    batch = wait(client, batch)
    assert batch.status == "failed" and batch.output_file_id is None
    assert [(e.code, e.line) for e in batch.errors.data] == [
        ("duplicate_custom_id", 3),
        ("model_not_found", 4),
        ("mismatched_url", 5),
        ("invalid_json_line", 6),
        ("blank_line", 7),
    ]


def test_metrics_of_the_endpoint(endpoint):
    ask(endpoint.client(), 0, max_tokens=2)
    wanted = {
        *("ray_rows_total mode=serve status=ok", "ray_tokens_generated_total mode=serve"),
        *("ray_draft_tokens_total mode=serve", "ray_row_latency_seconds_count mode=serve"),
        *("ray_queue_depth mode=serve", "ray_batch_jobs status=running"),
    }
    deadline = time.monotonic() + 40
    while missing := wanted - scrape().keys():
        assert time.monotonic() < deadline, missing
        time.sleep(1)
