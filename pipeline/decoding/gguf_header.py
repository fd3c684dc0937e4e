"""The header of a GGUF file, without its weights.

The gguf package makes objects of every entry of the vocabulary: seconds for 49,152 tokens, and half
a minute for 262,144. A run must know its model's shape before it waits for that.
"""

import mmap
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

_FORMATS = dict(zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd", strict=True))
_STRING, _ARRAY = 8, 9
_VERSIONS = (2, 3)


@dataclass(frozen=True)
class Header:
    """`fields` by their names in the file; `parameters`: elements of all tensors."""

    fields: dict[str, Any]
    parameters: int


def read_header(file: Path) -> Header:
    """Read the header of a GGUF file.

    Raises:
        OSError: if the file cannot be read.
        ValueError: if it is no GGUF file of a known version, or damaged.
    """
    with file.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
        cursor = _Cursor(data)
        if cursor.take(4) != b"GGUF" or cursor.number("I") not in _VERSIONS:
            raise ValueError("no GGUF file of version 2 or 3")
        num_tensors, num_fields = cursor.number("Q"), cursor.number("Q")
        fields = {}
        for _ in range(num_fields):
            name = cursor.string()
            fields[name] = cursor.value(cursor.number("I"))
        return Header(fields, sum(cursor.tensor() for _ in range(num_tensors)))


class _Cursor:
    """Takes one thing after the other from little-endian data."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self._at = 0

    def take(self, size: int) -> bytes:
        start, self._at = self._at, self._at + size
        if self._at > len(self._data):
            raise ValueError("the file ends within its header")
        return self._data[start : self._at]

    def number(self, code: str) -> Any:
        return struct.unpack(f"<{code}", self.take(struct.calcsize(f"<{code}")))[0]

    def string(self) -> str:
        return self.take(self.number("Q")).decode("utf-8", "replace")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self._array(self.number("I"), self.number("Q"))
        if kind not in _FORMATS:
            raise ValueError(f"a field of unknown type {kind}")
        return self.number(_FORMATS[kind])

    def _array(self, kind: int, length: int) -> list[Any]:
        if kind in _FORMATS:
            code = f"<{length}{_FORMATS[kind]}"
            size = length * struct.calcsize(f"<{_FORMATS[kind]}")
            return list(struct.unpack(code, self.take(size)))
        return [self.value(kind) for _ in range(length)]

    def tensor(self) -> int:
        """Elements of the next tensor."""
        self.string()  # its name
        shape = [self.number("Q") for _ in range(self.number("I"))]
        self.take(4 + 8)  # its type and where it lies
        return prod(shape)
