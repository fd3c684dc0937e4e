"""JSON lines as input: each line is a row, and a line at fault is that row's own error.

A file is cut into blocks of whole lines, once, so that any row is found without reading what is
before its block. Columns and types come from the head of the file.
"""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from pipeline.errors import InputError
from pipeline.store.filesystem import FileSystem

SUFFIXES = (".jsonl", ".ndjson")
_BLOCK_BYTES = 8 << 20
_HEAD_LINES = 1000


@dataclass(frozen=True)
class Lines:
    """The lines of a file: rows in each block, where each begins (bytes), columns, a digest."""

    rows: tuple[int, ...]
    offsets: tuple[int, ...]
    schema: pa.Schema
    digest: str


def scan(source: FileSystem, path: str, size: int) -> Lines:
    """Find the blocks of a file.

    Raises:
        InputError: no line at its head is a JSON object.
    """
    rows, offsets, digest = [], [], hashlib.blake2b(digest_size=16)
    schema = None
    at = 0
    while at < size:
        block = _block_at(source, path, size, at)
        if schema is None:
            schema = _head_schema(block, path)
        rows.append(block.count(b"\n") + (not block.endswith(b"\n")))
        offsets.append(at)
        digest.update(block)
        at += len(block)
    return Lines(tuple(rows), tuple(offsets), schema or pa.schema([]), digest.hexdigest())


def _block_at(source: FileSystem, path: str, size: int, at: int) -> bytes:
    """Whole lines from a byte on: as many as a block holds, but one at least."""
    wanted = _BLOCK_BYTES
    while True:
        stop = min(at + wanted, size)
        data = source.read_file(path, at, stop)
        if stop == size:
            return data
        end = data.rfind(b"\n")
        if end >= 0:
            return data[: end + 1]
        wanted *= 4


def _head_schema(block: bytes, path: str) -> pa.Schema:
    """Columns and types of the first lines; a column of several kinds counts as text."""
    found = [parsed for line in block.split(b"\n", _HEAD_LINES)[:_HEAD_LINES]
             if isinstance(parsed := _parse(line), dict)]  # fmt: skip
    columns = dict.fromkeys(name for row in found for name in row)
    if not columns:
        problem = f"{path} is not JSON lines: no line at its head is a JSON object"
        raise InputError("input.path", f"{problem}; repair or remove it")
    return pa.schema([pa.field(c, _type_of([row.get(c) for row in found])) for c in columns])


def _type_of(values: list[Any]) -> pa.DataType:
    try:
        return pa.array(values).type
    except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError):
        return pa.string()


def read_block(source: FileSystem, path: str, start: int, stop: int) -> list[bytes]:
    """The lines between two bytes, without their ends."""
    data = source.read_file(path, start, stop)
    return data.removesuffix(b"\n").split(b"\n")


def to_table(lines: list[bytes], schema: pa.Schema) -> tuple[pa.Table, list[str | None]]:
    """Columns of the schema, and what is wrong with each line (None: nothing).

    Blank lines are rows without values.
    """
    parsed = [_parse(line) for line in lines]
    errors = [value if isinstance(value, str) else None for value in parsed]
    rows = [value if isinstance(value, dict) else {} for value in parsed]
    columns = []
    for field in schema:
        values = [row.get(field.name) for row in rows]
        try:
            columns.append(pa.array(values, field.type))
        except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError):
            kept = list(_fitting(values, field, errors))
            columns.append(pa.array(kept, field.type))
    return pa.table(columns, schema=schema), errors


def _fitting(values: list[Any], field: pa.Field, errors: list[str | None]) -> Iterator[Any]:
    for i, value in enumerate(values):
        try:
            pa.array([value], field.type)
        except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError):
            errors[i] = f"column {field.name!r} holds {type(value).__name__}, not {field.type}"
            value = None
        yield value


def _parse(line: bytes) -> dict[str, Any] | str:
    """The line's object, or what is wrong with it."""
    if not line.strip():
        return {}
    try:
        value = json.loads(line.decode())
    except UnicodeDecodeError as error:
        return f"the line is not valid UTF-8 at byte {error.start}"
    except ValueError as error:
        return f"the line is not JSON: {error}"
    return value if isinstance(value, dict) else "the line is JSON, but no object"
