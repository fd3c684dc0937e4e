"""Cells of the input as text, or as the reason why they are none."""

import re
import unicodedata
from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pyarrow.types as pat

from pipeline.errors import RowError

BLANK = "blank"  # error type of a row without text: it is skipped, which is no error
CellText = str | RowError
# White space and what shows nothing: control and format characters such as ZWSP, BOM, NUL.
_INVISIBLE = "".join(
    c
    for c in map(chr, [*range(0x3001), 0xFEFF])
    if c.isspace() or unicodedata.category(c) in "CcCf"
)


def column_texts(column: pa.ChunkedArray, name: str, is_document: bool) -> list[CellText]:
    """One text per row of a column of any type.

    Parquet strings can hold invalid UTF-8, which Arrow does not check on reading: each value is
    decoded by itself, so that a bad one does not spoil its neighbours.
    """
    if isinstance(column.type, pa.BaseExtensionType) and _is_text(column.type.storage_type):
        storage = [chunk.storage for chunk in column.chunks]
        column = pa.chunked_array(storage, column.type.storage_type)
    if pat.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    if _is_text(column.type):
        values = column.cast(pa.large_binary()).to_pylist()
    elif is_document or pat.is_nested(column.type):
        values = [
            _not_text(name, column.type) if v else None for v in column.is_valid().to_pylist()
        ]
    else:
        values = _plain_values(column)
    return [text_of(value, name, is_document) for value in values]


def text_of(value: Any, name: str, is_document: bool) -> CellText:
    """A cell as text. Null is "" in a column, and like empty or blank text no document at all."""
    if isinstance(value, RowError):
        return value
    if isinstance(value, bytes):
        try:
            value = value.decode("utf-8")
        except UnicodeDecodeError as error:
            problem = f"column {name!r} is not valid UTF-8 at byte {error.start}"
            return RowError("invalid_utf8", problem)
    elif isinstance(value, str):
        try:
            value.encode("utf-8")
        except UnicodeEncodeError as error:
            problem = f"column {name!r} has a lone surrogate at character {error.start}"
            return RowError("invalid_utf8", problem)
    elif value is not None and (is_document or isinstance(value, list | tuple | dict)):
        return _not_text(name, type(value).__name__)
    text = "" if value is None else str(value)
    if is_document and not text.strip(_INVISIBLE):
        return RowError(BLANK, f"column {name!r} has no text")
    return text


def break_up(text: str, tokens: Sequence[str]) -> str:
    """The text with a space inside each of the tokens, so that it reads as ordinary text.

    A space, not an invisible character: normalizers of some tokenizers drop those.
    """
    pattern = "|".join(re.escape(token) for token in sorted(tokens, key=len, reverse=True))
    return re.sub(pattern, lambda m: f"{m[0][:1]} {m[0][1:]}" if len(m[0]) > 1 else " ", text)


def _is_text(kind: pa.DataType) -> bool:
    checks = [
        *(pat.is_string, pat.is_large_string, pat.is_string_view),
        *(pat.is_binary, pat.is_large_binary, pat.is_binary_view, pat.is_fixed_size_binary),
    ]
    return any(check(kind) for check in checks)


def _plain_values(column: pa.ChunkedArray) -> list[Any]:
    try:
        values: list[Any] = column.to_pylist()
    except (ValueError, OverflowError):  # a date or time beyond what Python has
        values = column.cast(pa.string()).to_pylist()
    return values


def _not_text(name: str, kind: Any) -> RowError:
    return RowError("not_text", f"column {name!r} is of type {kind}, not text")
