"""The creation of a batch: its body, and what becomes of it in the store."""

import hashlib
import json
import re
import time
from typing import Annotated, Any

from pydantic import Field, StringConstraints

from actors.bulk.bodies import BODIES, Body, Task, Text
from actors.bulk.errors import ApiError, invalid
from actors.bulk.state import INPUT_LIFE_S, Batches, Files, new_id
from actors.bulk.uris import check_uri
from pipeline.config import RunConfig

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_MAX_WINDOW_S = 7 * 86_400
_PARQUET = (".parquet", ".parq", ".pq")
Key = Annotated[str, StringConstraints(max_length=64)]
Value = Annotated[str, StringConstraints(max_length=512)]


class ExpiresAfter(Body):
    anchor: str = Field("created_at", pattern="^created_at$")
    seconds: int = Field(ge=3600, le=30 * 86_400)


class BatchBody(Body):
    """`input_uri`, `output_uri`, `task` and languages are extensions: a corpus of documents in
    Parquet, or a file of requests, that is read where it lies."""

    endpoint: str
    completion_window: str
    input_file_id: str | None = None
    metadata: Annotated[dict[Key, Value], Field(max_length=16)] | None = None
    output_expires_after: ExpiresAfter | None = None
    input_uri: Text | None = None
    output_uri: Text | None = None
    task: Task | None = None
    source_lang: Text | None = None
    target_lang: Text | None = None


def create(
    batches: Batches,
    files: Files,
    config: RunConfig,
    owner: str,
    body: BatchBody,
    idempotency_key: str | None,
) -> str:
    """Store a new batch; its id.

    Raises:
        ApiError: it makes no sense, or the key has too many open ones.
    """
    request = _request(files, config, owner, body)
    limit = config.serve.max_open_batches
    if sum(name == owner for name, _ in batches.open()) >= limit:
        problem = f"{limit} batches of this key are unfinished; wait for one of them"
        raise ApiError(429, problem, "rate_limit_exceeded", retry_after=60)
    request["id"] = new_id("batch_")
    if idempotency_key:
        request["id"] = _same_id(batches, owner, idempotency_key, request["id"])
    batches.create(owner, request)
    return str(request["id"])


def _request(files: Files, config: RunConfig, owner: str, body: BatchBody) -> dict[str, Any]:
    if body.endpoint not in BODIES:
        known = ", ".join(BODIES)
        raise invalid(f"endpoint: one of {known}", "endpoint", "invalid_value")
    seconds = window_seconds(body.completion_window)
    now = int(time.time())
    life = body.output_expires_after
    return {
        "owner": owner,
        "endpoint": body.endpoint,
        "model": config.serve.model_name or config.model.target,
        "completion_window": body.completion_window,
        "created_at": now,
        "expires_at": now + seconds,
        "metadata": body.metadata,
        "output_life_s": life.seconds if life else INPUT_LIFE_S,
        **_places(files, config, owner, body),
    }


def _places(files: Files, config: RunConfig, owner: str, body: BatchBody) -> dict[str, Any]:
    """Where the input comes from, and where results go to."""
    allowed = config.serve.allowed_uris
    places: dict[str, Any] = {"input_file_id": body.input_file_id or None}
    for name in ("input_uri", "output_uri"):
        uri = getattr(body, name)
        places[name] = None if uri is None else check_uri(uri, allowed, name)
    places |= {n: getattr(body, n) for n in ("task", "source_lang", "target_lang")}
    if (places["input_file_id"] is None) == (body.input_uri is None):
        raise invalid("give either input_file_id or input_uri", "input_file_id", "invalid_value")
    if body.input_file_id:
        if files.get(owner, body.input_file_id)["purpose"] != "batch":
            problem = "input_file_id: its purpose is not `batch`"
            raise invalid(problem, "input_file_id", "invalid_purpose")
    is_corpus = body.input_uri is not None and not body.input_uri.endswith(".jsonl")
    if is_corpus != (body.task is not None):
        problem = "task: goes with a Parquet file or folder as input_uri, and only with that"
        raise invalid(problem, "task", "invalid_value")
    if is_corpus and body.output_uri is None:
        raise invalid("output_uri: a Parquet input needs it", "output_uri", "missing_parameter")
    if body.task == "translate" and body.target_lang is None:
        raise invalid("target_lang: translate needs it", "target_lang", "missing_parameter")
    return places


def window_seconds(text: str) -> int:
    """`24h`, as OpenAI has it, or another number of s, m, h or d up to seven days.

    Raises:
        ApiError: 400.
    """
    match = re.fullmatch(r"([1-9]\d{0,6})([smhd])", text)
    seconds = int(match[1]) * _UNITS[match[2]] if match else 0
    if not 0 < seconds <= _MAX_WINDOW_S:
        problem = "completion_window: such as 24h, at most 7d"
        raise invalid(problem, "completion_window", "invalid_value")
    return seconds


def _same_id(batches: Batches, owner: str, key: str, fresh: str) -> str:
    """The id under which a creation with this `Idempotency-Key` was, or now is, known."""
    digest = hashlib.sha256(key.encode("utf-8", "replace")).hexdigest()[:32]
    name = f"keys/{owner}/idempotency/{digest}.json"
    if batches.store.create(name, json.dumps({"id": fresh}).encode()):
        return fresh
    return str(json.loads(batches.store.read(name))["id"])
