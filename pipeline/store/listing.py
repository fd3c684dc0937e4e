"""Find the input files and read their footers: what there is to do, before any model is loaded."""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
from fsspec.core import has_magic
from fsspec.implementations.local import LocalFileSystem

from pipeline.errors import InputError

PARQUET_SUFFIXES = (".parquet", ".parq", ".pq")
_FOOTER_THREADS = 16
_KEY = "input.path"


@dataclass(frozen=True)
class InputFile:
    """One input file; `name` is its path relative to the input root and part of row identity."""

    name: str
    path: str
    size: int
    digest: str  # changes when the content does: the store's etag, else a hash of the footer
    row_groups: tuple[int, ...]  # rows of each
    schema: pa.Schema

    @property
    def num_rows(self) -> int:
        return sum(self.row_groups)

    @property
    def file_id(self) -> str:
        return file_id(self.name)


@dataclass(frozen=True)
class Listing:
    """The input files in order of their names, and what was passed over and why."""

    root: str
    is_folder: bool
    files: list[InputFile]
    skipped: list[tuple[str, str]]


def file_id(name: str) -> str:
    """Short name for a file in marker and part names: 12 hex digits of its relative path."""
    return hashlib.blake2b(name.encode(), digest_size=6).hexdigest()


@dataclass(frozen=True)
class Found:
    """The input's files, not yet opened: (name below the root, fsspec entry)."""

    fs: fsspec.AbstractFileSystem
    root: str
    is_folder: bool
    chosen: list[tuple[str, dict[str, Any]]]
    skipped: list[tuple[str, str]]


def list_input(url: str, options: dict[str, Any] | None = None) -> Listing:
    """List a Parquet file, a folder (recursively) or a glob and read all footers.

    Raises:
        InputError: nothing there, no permission, or a file that is not complete Parquet.
    """
    found = find_input(url, options)
    if not found.chosen:
        skipped = found.skipped
        hint = f"; passed over: {skipped[0][0]} ({skipped[0][1]})" if skipped else ""
        raise InputError(_KEY, f"no Parquet file under {url}{hint}; check the path")
    with ThreadPoolExecutor(_FOOTER_THREADS) as pool:
        files = list(pool.map(lambda item: read_footer(found.fs, *item), found.chosen))
    return Listing(found.root, found.is_folder, files, found.skipped)


def find_input(url: str, options: dict[str, Any] | None = None) -> Found:
    """Find a Parquet file, those of a folder (recursively) or of a glob; there may be none.

    Raises:
        InputError: nothing there, or no permission.
    """
    try:
        fs, path = fsspec.core.url_to_fs(url, **(options or {}))
    except (ValueError, ImportError) as error:
        raise InputError(_KEY, f"cannot open {url}: {error}") from None
    try:
        root, is_folder, found = _find(fs, path)
    except FileNotFoundError:
        raise InputError(_KEY, f"nothing at {url}; check the path") from None
    except PermissionError as error:
        raise InputError(
            _KEY, f"no permission to list {error.filename or url}; grant read access"
        ) from None
    return Found(fs, root, is_folder, *_choose(root, found, named=path))


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


def _find(fs: fsspec.AbstractFileSystem, path: str) -> tuple[str, bool, list[dict[str, Any]]]:
    """Input root, whether it is a folder, and the entries of all files below or matching."""
    if has_magic(path):
        entries = [e for e in fs.glob(path, detail=True).values() if e["type"] == "file"]
        fixed = path[: min(path.index(c) for c in "*?[" if c in path)]
        return fixed.rpartition("/")[0] or "/", False, entries
    info = fs.info(path)
    if info["type"] != "directory":
        return path.rpartition("/")[0] or "/", False, [info]
    return path.rstrip("/"), True, list(_files_below(fs, path))


def _files_below(fs: fsspec.AbstractFileSystem, folder: str) -> Iterator[dict[str, Any]]:
    if not isinstance(fs, LocalFileSystem):
        yield from fs.find(folder, detail=True).values()
        return
    # On disks find() passes over folders that it may not read; rows must not vanish with them.
    for entry in fs.ls(folder, detail=True):
        if entry["type"] == "directory":
            yield from _files_below(fs, entry["name"])
        else:
            yield entry


def _choose(
    root: str, entries: list[dict[str, Any]], named: str
) -> tuple[list[tuple[str, dict[str, Any]]], list[tuple[str, str]]]:
    """(name below the root, entry) of the files to read, and (name, reason) of the others."""
    chosen, skipped = [], []
    for entry in sorted(entries, key=lambda e: str(e["name"])):
        name = entry["name"].removeprefix(root).lstrip("/")
        if entry["name"] == named:  # a file asked for by name is taken as it is
            chosen.append((name, entry))
        elif any(part.startswith(("_", ".")) for part in name.split("/")):
            skipped.append((name, "hidden: its name or folder starts with _ or ."))
        elif not name.endswith(PARQUET_SUFFIXES):
            skipped.append((name, "not a .parquet file"))
        else:
            chosen.append((name, entry))
    return chosen, skipped


def read_footer(fs: fsspec.AbstractFileSystem, name: str, entry: dict[str, Any]) -> InputFile:
    """Open a file that `find_input` found.

    Raises:
        InputError: no permission, or it is not complete Parquet.
    """
    path = entry["name"]
    try:
        with fs.open(path, "rb") as handle:
            parquet = pq.ParquetFile(handle)
            metadata, schema = parquet.metadata, parquet.schema_arrow
            digest = entry.get("ETag") or _footer_digest(handle, entry["size"])
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
