"""The input of a batch: JSONL lines are checked, all at once, before anything runs."""

import io
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from actors.bulk.bodies import BODIES

_MAX_ERRORS = 100  # OpenAI reports but a few; a hundred lines show any pattern
_MAX_ID = 512
_FIELDS = {"custom_id", "method", "url", "body"}
_ROW_GROUP = 1000
SCHEMA = pa.schema([(name, pa.string()) for name in ("custom_id", "url", "body")])


@dataclass
class Checked:
    """Rows of a correct input, or what is wrong with it."""

    rows: list[dict[str, str]] = field(default_factory=list)
    errors: list[dict[str, Any]] = field(default_factory=list)

    def to_parquet(self) -> bytes:
        """The rows as a Parquet file of `SCHEMA`, in order."""
        buffer = io.BytesIO()
        table = pa.Table.from_pylist(self.rows, schema=SCHEMA)
        pq.write_table(table, buffer, row_group_size=_ROW_GROUP, compression="zstd")
        return buffer.getvalue()


class _Bad(Exception):
    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code, self.param = code, param


def check_lines(data: bytes, url: str, model: str, max_rows: int) -> Checked:
    """Check a batch's input: every line a request to `url` of `model`, every `custom_id` once.

    Bodies are only looked at for what concerns the batch as a whole; what else is wrong with one
    becomes that request's error.
    """
    checked = Checked()
    seen: dict[str, int] = {}
    number = 0
    for number, line in _numbered(data):
        if number > max_rows:
            problem = f"more than the {max_rows:,} requests that a batch may have"
            checked.errors.append(_error("too_many_requests", problem, None))
            break
        try:
            row = _check(line, url, model)
            first = seen.setdefault(row["custom_id"], number)
            if first != number:
                problem = f"custom_id {row['custom_id'][:80]!r} is also on line {first}"
                raise _Bad("duplicate_custom_id", problem, "custom_id")
            checked.rows.append(row)
        except _Bad as bad:
            checked.errors.append(_error(bad.code, str(bad), number, bad.param))
            if len(checked.errors) >= _MAX_ERRORS:
                break
    if not number:
        checked.errors.append(_error("empty_file", "the input has no requests", None))
    return checked


def _numbered(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Lines from 1 on; the empty end after the last newline is none."""
    lines = data.removeprefix(b"\xef\xbb\xbf").split(b"\n")
    if lines and not lines[-1].strip():
        lines.pop()
    return enumerate(lines, 1)


def _check(line: bytes, url: str, model: str) -> dict[str, str]:
    if not line.strip():
        raise _Bad("blank_line", "the line is blank")
    try:
        request = json.loads(line.decode("utf-8"), parse_constant=_no_constant)
    except UnicodeDecodeError as error:
        raise _Bad("invalid_utf8", f"not valid UTF-8 at byte {error.start}") from None
    except (ValueError, RecursionError) as error:
        raise _Bad("invalid_json_line", f"not valid JSON: {str(error)[:120]}") from None
    if not isinstance(request, dict):
        raise _Bad("invalid_json_line", "not a JSON object")
    unknown = sorted(set(request) - _FIELDS)
    if unknown:
        raise _Bad("unknown_parameter", f"unknown field {unknown[0][:80]!r}", unknown[0][:80])
    custom_id = request.get("custom_id")
    if not isinstance(custom_id, str) or not 0 < len(custom_id) <= _MAX_ID:
        raise _Bad("invalid_custom_id", f"a string of 1 to {_MAX_ID} characters", "custom_id")
    if request.get("method", "POST") != "POST":
        raise _Bad("invalid_method", "method must be POST", "method")
    if request.get("url") != url or url not in BODIES:
        raise _Bad("mismatched_url", f"url must be the batch's endpoint, {url}", "url")
    body = request.get("body")
    if not isinstance(body, dict):
        raise _Bad("invalid_body", "body must be an object", "body")
    if body.get("model") != model:
        raise _Bad("model_not_found", f"all requests must name the model {model!r}", "body.model")
    return {
        "custom_id": custom_id.encode("utf-8", "replace").decode(),
        "url": url,
        "body": json.dumps(body),
    }


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _error(code: str, message: str, line: int | None, param: str | None = None) -> dict[str, Any]:
    return {"code": code, "message": message, "line": line, "param": param}
