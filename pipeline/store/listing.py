"""Find the input files and read their footers: what there is to do, before any model is loaded."""

import hashlib
import re
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, Literal
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.parquet as pq
from fsspec.core import has_magic
from fsspec.utils import glob_translate

from pipeline.errors import InputError, StoreError
from pipeline.store import jsonl
from pipeline.store.filesystem import FileSystem

Format = Literal["auto", "parquet", "jsonl"]
PARQUET_SUFFIXES = (".parquet", ".parq", ".pq")
_SUFFIXES: dict[Format, tuple[str, ...]] = {
    "auto": PARQUET_SUFFIXES + jsonl.SUFFIXES,
    "parquet": PARQUET_SUFFIXES,
    "jsonl": jsonl.SUFFIXES,
}
_KIND = {"auto": "Parquet or JSONL", "parquet": "Parquet", "jsonl": "JSONL"}
_HIVE_NULL = "__HIVE_DEFAULT_PARTITION__"
_FOOTER_THREADS = 16
_KEPT_SKIPPED = 100
_KEY = "input.path"


@dataclass(frozen=True)
class InputFile:
    """One input file; `name` is its path relative to the input root and part of row identity."""

    name: str
    path: str
    size: int
    digest: str  # changes when the content does: the store's etag, else a hash of the footer
    row_groups: tuple[int, ...]  # rows of each
    schema: pa.Schema  # partition folders included
    offsets: tuple[int, ...] = ()  # of JSON lines: the first byte of each group

    @property
    def num_rows(self) -> int:
        return sum(self.row_groups)

    @property
    def file_id(self) -> str:
        return file_id(self.name)


@dataclass(frozen=True)
class Listing:
    """The input files in order of their names, and what was passed over and why."""

    source: FileSystem
    root: str
    is_folder: bool
    files: list[InputFile]
    skipped: list[tuple[str, str]]  # the first of them
    num_skipped: int


def file_id(name: str) -> str:
    """Short name for a file in marker and part names: 12 hex digits of its relative path."""
    return hashlib.blake2b(name.encode(), digest_size=6).hexdigest()


@dataclass(frozen=True)
class Found:
    """The input's files, not yet opened: (name below the root, fsspec entry)."""

    source: FileSystem
    root: str
    is_folder: bool
    chosen: list[tuple[str, dict[str, Any]]]
    skipped: list[tuple[str, str]]  # the first of them
    num_skipped: int


def list_input(url: str, options: dict[str, Any] | None = None, wanted: Format = "auto") -> Listing:
    """List a file, a folder (recursively) or a glob and read what the files say of themselves.

    That is the footer of a Parquet file, and all of a file of JSON lines.

    Raises:
        InputError: nothing there, no permission, or a file that is not complete.
    """
    found = find_input(url, options, wanted)
    source, skipped = found.source, found.skipped
    if not found.chosen:
        hint = f"; passed over: {skipped[0][0]} ({skipped[0][1]})" if skipped else ""
        raise InputError(_KEY, f"no {_KIND[wanted]} file under {url}{hint}; check the path")
    schemas: dict[bytes, pa.Schema] = {}
    with ThreadPoolExecutor(_FOOTER_THREADS) as pool:
        read = pool.map(lambda item: read_file(source, item[0], item[1], wanted), found.chosen)
        files = [_share_schema(file, schemas) for file in read]
    return Listing(source, found.root, found.is_folder, files, skipped, found.num_skipped)


def find_input(url: str, options: dict[str, Any] | None = None, wanted: Format = "auto") -> Found:
    """Find a file, those of a folder (recursively) or of a glob; there may be none.

    Raises:
        InputError: nothing there, or no permission.
    """
    try:
        source = FileSystem(url, options)
    except (ValueError, ImportError) as error:
        raise InputError(_KEY, f"cannot open {url}: {error}") from None
    try:
        root, is_folder, found = _find(source)
        chosen, skipped, more = _choose(root, found, source.path_of_url, wanted)
    except FileNotFoundError:
        raise InputError(_KEY, f"nothing at {url}; check the path") from None
    except StoreError as error:
        raise InputError(_KEY, str(error)) from None
    except PermissionError as error:
        raise InputError(
            _KEY, f"no permission to list {error.filename or url}; grant read access"
        ) from None
    return Found(source, root, is_folder, chosen, skipped, len(skipped) + more)


def _share_schema(file: InputFile, schemas: dict[bytes, pa.Schema]) -> InputFile:
    """The file with the one object for its schema, which thousands of files have in common."""
    schema = schemas.setdefault(file.schema.serialize().to_pybytes(), file.schema)
    return replace(file, schema=schema)


def partitions(name: str) -> dict[str, str | None]:
    """Values that a file's folders give, as `ds=2026-11-29/`: those of Hive, undone."""
    pairs = (folder.partition("=") for folder in name.split("/")[:-1])
    return {
        key: None if value == _HIVE_NULL else unquote(value)
        for key, equals, value in pairs
        if key and equals
    }


def check_columns(files: Sequence[InputFile], columns: Iterable[tuple[str, str]]) -> pa.Schema:
    """Check that every file has the columns, of one type; return their fields in order.

    Args:
        columns: (column, config key that asks for it).

    Raises:
        InputError: a missing column, or files that disagree on a type.
    """
    fields: dict[str, pa.Field] = {}
    for column, key in columns:
        for file in files:
            if column not in file.schema.names:
                known = ", ".join(file.schema.names)
                raise InputError(key, f"{file.name} has no column {column!r}; it has: {known}")
            if file.schema.names.count(column) > 1:
                raise InputError(key, f"{file.name} has two columns {column!r}; rename one")
        fields[column] = pa.field(column, _common_type(files, column, key))
    return pa.schema(fields.values())


def _common_type(files: Sequence[InputFile], column: str, key: str) -> pa.DataType:
    common, first = pa.null(), files[0]
    for file in files:
        found = plain_type(file.schema.field(column).type)
        if found == common or pa.types.is_null(found):
            continue
        if not pa.types.is_null(common):
            raise InputError(
                key,
                f"column {column!r} is {common} in {first.name} but {found} in {file.name}; "
                "make the files agree or run them apart",
            )
        common, first = found, file
    return common


def plain_type(found: pa.DataType) -> pa.DataType:
    """The type without its storage variant: all ways to store a string are `string`."""
    if pa.types.is_dictionary(found):
        return plain_type(found.value_type)
    if pa.types.is_large_string(found) or pa.types.is_string_view(found):
        return pa.string()
    if pa.types.is_large_binary(found) or pa.types.is_binary_view(found):
        return pa.binary()
    return found


def _find(source: FileSystem) -> tuple[str, bool, Iterator[dict[str, Any]]]:
    """Input root, whether it is a folder, and the entries of all files below or matching."""
    path = source.path_of_url
    if has_magic(path):
        fixed = path[: min(path.index(c) for c in "*?[" if c in path)].rpartition("/")[0] or "/"
        return fixed, False, _matching(source, fixed, path)
    info = source.info(path)
    if info["type"] != "directory":
        return path.rpartition("/")[0] or "/", False, iter([info])
    return path.rstrip("/"), True, source.files_below(path)


def _matching(source: FileSystem, fixed: str, pattern: str) -> Iterator[dict[str, Any]]:
    """Entries of the files that a glob means, as fsspec understands it."""
    if not source.is_s3:
        found = source.call(lambda: source.fs.glob(pattern, detail=True), pattern)
        yield from (entry for entry in found.values() if entry["type"] == "file")
        return
    wanted = re.compile(glob_translate(pattern))
    yield from (entry for entry in source.files_below(fixed) if wanted.match(entry["name"]))


def _choose(
    root: str, entries: Iterable[dict[str, Any]], named: str, wanted: Format
) -> tuple[list[tuple[str, dict[str, Any]]], list[tuple[str, str]], int]:
    """(name below the root, entry) of the files to read, (name, reason) of some others, and how
    many others there are besides. Of millions of keys only those to read are kept."""
    chosen: list[tuple[str, dict[str, Any]]] = []
    skipped: list[tuple[str, str]] = []
    more = 0
    for entry in entries:
        name = entry["name"].removeprefix(root).lstrip("/")
        reason = (
            None if entry["name"] == named else _why_skipped(name, wanted)
        )  # named: taken as it is
        if reason is None:
            chosen.append((name, entry))
        elif len(skipped) < _KEPT_SKIPPED:
            skipped.append((name, reason))
        else:
            more += 1
    return sorted(chosen, key=lambda item: str(item[1]["name"])), sorted(skipped), more


def _why_skipped(name: str, wanted: Format) -> str | None:
    if any(part.startswith(("_", ".")) for part in name.split("/")):
        return "hidden: its name or folder starts with _ or ."
    suffixes = _SUFFIXES[wanted]
    return None if name.endswith(suffixes) else f"not a {' or '.join(suffixes[::3])} file"


def read_file(
    source: FileSystem, name: str, entry: dict[str, Any], wanted: Format = "auto"
) -> InputFile:
    """Open a file that `find_input` found.

    Raises:
        InputError: it is not complete, or may not be read.
    """
    is_lines = wanted == "jsonl" or (wanted == "auto" and name.endswith(jsonl.SUFFIXES))
    file = (_scan_lines if is_lines else _read_footer)(source, name, entry)
    folders = [key for key in partitions(name) if key not in file.schema.names]
    fields = [*file.schema, *(pa.field(key, pa.string()) for key in folders)]
    return replace(file, schema=pa.schema(fields)) if folders else file


def _scan_lines(source: FileSystem, name: str, entry: dict[str, Any]) -> InputFile:
    path, size = entry["name"], int(entry["size"])
    try:
        lines = jsonl.scan(source, path, size)
    except StoreError as error:
        raise InputError(_KEY, str(error)) from None
    except PermissionError:
        raise InputError(_KEY, f"no permission to read {path}; grant read access") from None
    digest = str(entry.get("ETag") or lines.digest).strip('"')
    return InputFile(name, path, size, digest, lines.rows, lines.schema, lines.offsets)


def _read_footer(source: FileSystem, name: str, entry: dict[str, Any]) -> InputFile:
    path = entry["name"]
    try:
        with source.open_file(path, int(entry["size"])) as handle:
            parquet = pq.ParquetFile(handle)
            metadata, schema = parquet.metadata, parquet.schema_arrow
            digest = entry.get("ETag") or _footer_digest(handle, entry["size"])
    except StoreError as error:
        raise InputError(_KEY, str(error)) from None
    except PermissionError:
        raise InputError(_KEY, f"no permission to read {path}; grant read access") from None
    except (pa.ArrowInvalid, OSError) as error:
        reason = " ".join(str(error).split())[:200]
        raise InputError(
            _KEY, f"{path} is not a complete Parquet file ({reason}); repair or remove it"
        ) from None
    groups = tuple(metadata.row_group(i).num_rows for i in range(metadata.num_row_groups))
    return InputFile(name, path, int(entry["size"]), str(digest).strip('"'), groups, schema)


def _footer_digest(handle: Any, size: int) -> str:
    """The footer holds each chunk's place, size and statistics; `touch` and copies keep it."""
    handle.seek(size - 8)
    length = int.from_bytes(handle.read(4), "little")
    handle.seek(size - 8 - length)
    return hashlib.blake2b(handle.read(length), digest_size=16).hexdigest()
