"""A folder on any fsspec file system, with the two writes that commits are made of.

`put` and `create` are atomic: a reader sees the whole object or none. On local disks that is a
temporary file, fsync and a rename or link; on object stores one put of bytes built beforehand. An
open file handle is never used to write, since stores publish what a failing `with` block leaves.
"""

import os
import uuid
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem


class Store:
    """Objects by name below a root folder. Names use `/`. Picklable: tasks carry it."""

    def __init__(self, url: str, options: dict[str, Any] | None = None) -> None:
        """Open `url`; `options` go to fsspec.

        Raises:
            ValueError or ImportError: unknown protocol, or its package is missing.
        """
        self.url = url
        self.fs, self.root = fsspec.core.url_to_fs(url, **(options or {}))
        self.root = self.root.rstrip("/") or "/"

    @property
    def is_local(self) -> bool:
        return isinstance(self.fs, LocalFileSystem)

    def path(self, name: str) -> str:
        """Path of an object as the file system knows it."""
        return f"{self.root}/{name}" if name else self.root

    def exists(self, name: str) -> bool:
        return bool(self.fs.exists(self.path(name)))

    def names(self, folder: str = "") -> list[str]:
        """Names of the objects directly in a folder, sorted; empty where there is no folder."""
        self.fs.invalidate_cache(self.path(folder))
        try:
            entries = self.fs.ls(self.path(folder), detail=True)
        except FileNotFoundError:
            return []
        prefix = f"{folder}/" if folder else ""
        names = (e["name"].rstrip("/").rsplit("/", 1)[-1] for e in entries if e["type"] == "file")
        return sorted(prefix + name for name in names if not name.startswith(".tmp-"))

    def modified(self, folder: str) -> list[tuple[str, float]]:
        """(name without its folder, Unix seconds by the store's clock) of a folder's objects."""
        found = []
        for entry in self.fs.ls(self.path(folder), detail=True):
            when = entry.get("mtime", entry.get("LastModified"))
            seconds = when.timestamp() if hasattr(when, "timestamp") else float(when or 0.0)
            found.append((entry["name"].rstrip("/").rsplit("/", 1)[-1], seconds))
        return found

    def read(self, name: str) -> bytes:
        return bytes(self.fs.cat_file(self.path(name)))

    def put(self, name: str, data: bytes) -> None:
        """Write or replace an object, atomically and durably."""
        if self.is_local:
            temporary = self._write_temporary(name, data)
            os.replace(temporary, self.path(name))
            _sync_folder(temporary.parent)
        else:
            self.fs.pipe_file(self.path(name), data)

    def create(self, name: str, data: bytes) -> bool:
        """Write an object unless it exists; whether it was written."""
        if not self.is_local:
            try:
                self.fs.pipe_file(self.path(name), data, mode="create")
            except FileExistsError:
                return False
            return True
        temporary = self._write_temporary(name, data)
        try:
            os.link(temporary, self.path(name))
        except FileExistsError:
            return False
        finally:
            temporary.unlink()
        _sync_folder(temporary.parent)
        return True

    def delete(self, names: Iterable[str]) -> None:
        """Delete objects; those already gone are no error."""
        for name in names:
            try:
                self.fs.rm_file(self.path(name))
            except FileNotFoundError:
                continue

    def delete_folder(self, folder: str) -> None:
        """Delete a folder with all in it; one already gone is no error."""
        try:
            self.fs.rm(self.path(folder), recursive=True)
        except FileNotFoundError:
            return

    def _write_temporary(self, name: str, data: bytes) -> Path:
        target = Path(self.path(name))
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = target.parent / f".tmp-{uuid.uuid4().hex}"
        try:
            with open(temporary, "xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        return temporary


def _sync_folder(folder: Path) -> None:
    """Make a rename durable: the entry lives in the folder, not in the file."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
