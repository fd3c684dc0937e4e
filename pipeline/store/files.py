"""A folder on any fsspec file system, with the writes that commits and the lease are made of.

`put`, `create` and `replace` are atomic: a reader sees the whole object or none. On local disks
that is a temporary file, fsync and a rename or link; on S3 one put of bytes built beforehand, with
`If-None-Match` or `If-Match` as the condition; on other stores `create` is the file system's own
exclusive mode. An open file handle is never used to write, since stores publish what a failing
`with` block leaves.
"""

import hashlib
import os
import uuid
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pipeline.store.filesystem import FileSystem
from pipeline.store.retry import code_of

_TEMPORARY = ".tmp-"


class Store(FileSystem):
    """Objects by name below a root folder. Names use `/`. Picklable: tasks carry it."""

    def __init__(self, url: str, options: dict[str, Any] | None = None) -> None:
        """Open `url`; `options` go to fsspec.

        Raises:
            ValueError or ImportError: unknown protocol, or its package is missing.
        """
        super().__init__(url, options)
        self.root = self.path_of_url.rstrip("/") or "/"
        self.has_conditional_put = self.is_s3  # until it says otherwise

    def path(self, name: str) -> str:
        """Path of an object as the file system knows it."""
        return f"{self.root}/{name}" if name else self.root

    def exists(self, name: str) -> bool:
        try:
            self.info(self.path(name))
        except FileNotFoundError:
            return False
        return True

    def names(self, folder: str = "") -> list[str]:
        """Names of the objects directly in a folder, sorted; empty where there is no folder."""
        prefix = f"{folder}/" if folder else ""
        return sorted(prefix + name for name, _ in self._files(folder))

    def names_with(self, prefix: str) -> list[str]:
        """Names of objects that begin with `folder/begin`, sorted; S3 lists no others."""
        if self.is_s3:
            root = len(self.path("")) + 1
            return sorted(entry["name"][root:] for entry in self.pages(self.path(prefix)))
        return [name for name in self.names(prefix.rpartition("/")[0]) if name.startswith(prefix)]

    def sizes(self, folder: str = "") -> dict[str, int]:
        """Bytes of the objects directly in a folder, by name."""
        prefix = f"{folder}/" if folder else ""
        return {prefix + name: int(entry["size"]) for name, entry in self._files(folder)}

    def modified(self, folder: str) -> list[tuple[str, float]]:
        """(name without its folder, Unix seconds by the store's clock) of a folder's objects."""
        found = []
        for name, entry in self._files(folder):
            when: Any = entry.get("mtime", entry.get("LastModified"))
            seconds = when.timestamp() if hasattr(when, "timestamp") else float(when or 0.0)
            found.append((name, seconds))
        return found

    def _files(self, folder: str) -> list[tuple[str, dict[str, Any]]]:
        entries = [e for e in self.list(self.path(folder)) if e["type"] == "file"]
        named = [(e["name"].rstrip("/").rsplit("/", 1)[-1], e) for e in entries]
        return [(name, e) for name, e in named if name and not name.startswith(_TEMPORARY)]

    def read(self, name: str) -> bytes:
        """The whole object.

        Raises:
            FileNotFoundError: there is none.
        """
        return self.read_file(self.path(name))

    def open(self, name: str) -> Any:
        """The object as a file to read from."""
        return self.open_file(self.path(name))

    def put(self, name: str, data: bytes) -> None:
        """Write or replace an object, atomically and durably."""
        if self.is_local:
            temporary = self._write_temporary(name, data)
            os.replace(temporary, self.path(name))
            _sync_folder(temporary.parent)
        else:
            self.put_file(self.path(name), data)

    def create(self, name: str, data: bytes) -> bool:
        """Write an object unless it exists; whether it was written."""
        if self.is_local:
            return self._link(name, data)
        if self.is_s3:
            return self._put_if(name, data, IfNoneMatch="*")
        path = self.path(name)
        try:
            self.call(lambda: self.fs.pipe_file(path, data, mode="create"), path)
        except FileExistsError:
            return self._holds(name, data)
        return True

    def replace(self, name: str, data: bytes, version: str) -> bool:
        """Write an object if it still is the `version` that `tagged` gave; whether it was written.

        Elsewhere than on S3 it is read, compared and put: on disks callers hold a lock meanwhile.
        """
        if self.is_s3:
            return self._put_if(name, data, IfMatch=version)
        now = self.tagged(name)
        if now is None or now[1] != version:
            return False
        self.put(name, data)
        return True

    def tagged(self, name: str) -> tuple[bytes, str] | None:
        """An object and its version; None where there is none.

        The version is read first: should the object change in between, `replace` refuses.
        """
        try:
            tag = self.info(self.path(name))["ETag"] if self.is_s3 else ""
            data = self.read(name)
        except FileNotFoundError:
            return None
        return data, tag or hashlib.blake2b(data, digest_size=16).hexdigest()

    def delete(self, names: Iterable[str]) -> None:
        """Delete objects; those already gone are no error."""
        for name in names:
            path = self.path(name)
            try:
                self.call(lambda path=path: self.fs.rm_file(path), path)  # type: ignore[misc]
            except FileNotFoundError:
                continue

    def delete_folder(self, folder: str) -> None:
        """Delete a folder with all in it; one already gone is no error."""
        path = self.path(folder)
        try:
            self.call(lambda: self.fs.rm(path, recursive=True), path)
        except FileNotFoundError:
            return

    def temporaries(self, folder: str) -> list[str]:
        """Names of half-written files that a killed writer left in a folder of a disk."""
        prefix = f"{folder}/" if folder else ""
        entries = (e["name"].rsplit("/", 1)[-1] for e in self.list(self.path(folder)))
        return [prefix + name for name in entries if name.startswith(_TEMPORARY)]

    def abort_uploads(self, page_size: int = 1000) -> int:
        """Drop the uploads in parts that were begun below the root and not ended; how many."""
        if not self.is_s3:
            return 0
        bucket, key, _ = self.fs.split_path(self.path(""))
        where = {"Bucket": bucket, "Prefix": f"{key}/" if key else "", "MaxUploads": page_size}
        aborted: set[str] = set()
        while True:  # always the first page: what is aborted leaves it, and not all stores go on
            page = self.request("list_multipart_uploads", self.root, **where)
            left = [u for u in page.get("Uploads", []) if u["UploadId"] not in aborted]
            for upload in left:
                which = {"Bucket": bucket, "Key": upload["Key"], "UploadId": upload["UploadId"]}
                self.request("abort_multipart_upload", self.root, **which)
                aborted.add(upload["UploadId"])
            if not left or not page.get("IsTruncated"):
                return len(aborted)

    def _put_if(self, name: str, data: bytes, **condition: str) -> bool:
        """A put that S3 does only under the condition.

        A try whose answer was lost may have succeeded: then the object holds what we wanted. Stores
        that know no conditions get a plain put after a look, see `lease`.
        """
        bucket, key, _ = self.fs.split_path(self.path(name))
        ask = {"Bucket": bucket, "Key": key, "Body": data, **condition}
        try:
            self.request("put_object", self.path(name), **ask)
        except OSError as error:
            code = code_of(error)
            if code == "NotImplemented":
                self.has_conditional_put = False
                return self._put_after_a_look(name, data, condition)
            if code in ("PreconditionFailed", "412", "NoSuchKey"):
                return self._holds(name, data)
            raise
        return True

    def _put_after_a_look(self, name: str, data: bytes, condition: dict[str, str]) -> bool:
        now = self.tagged(name)
        if (now[1] if now else None) != condition.get("IfMatch"):
            return False
        self.put(name, data)
        return True

    def _holds(self, name: str, data: bytes) -> bool:
        try:
            return self.read(name) == data
        except FileNotFoundError:
            return False

    def _link(self, name: str, data: bytes) -> bool:
        temporary = self._write_temporary(name, data)
        try:
            os.link(temporary, self.path(name))
        except FileExistsError:
            return False
        finally:
            temporary.unlink()
        _sync_folder(temporary.parent)
        return True

    def _write_temporary(self, name: str, data: bytes) -> Path:
        target = Path(self.path(name))
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = target.parent / f"{_TEMPORARY}{uuid.uuid4().hex}"
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
