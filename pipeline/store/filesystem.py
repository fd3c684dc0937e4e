"""An fsspec file system whose operations are tried again where that may help.

Disks answer once and for all; stores at the other end of a network do not. Requests are for whole
objects or ranges of bytes, so that each can be repeated by itself.
"""

import io
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import fsspec
from fsspec.implementations.local import LocalFileSystem

from pipeline.store.retry import call

PART_BYTES = 32 << 20
MULTIPART_ABOVE = 64 << 20  # bytes
T = TypeVar("T")


class FileSystem:
    """The file system of a URL; paths are as fsspec names them. Picklable: tasks carry it."""

    def __init__(self, url: str, options: dict[str, Any] | None = None) -> None:
        """Open it; `options` go to fsspec.

        Raises:
            ValueError or ImportError: unknown protocol, or its package is missing.
        """
        self.url, self._options = url, dict(options or {})
        protocol = fsspec.core.split_protocol(url)[0]
        self.is_s3 = protocol in ("s3", "s3a")
        ours = _once(self._options) if self.is_s3 else {}
        self.fs, path = fsspec.core.url_to_fs(url, **{**self._options, **ours})
        if self.is_s3:
            self.fs.retries = 1
        self.path_of_url: str = path

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.url, self._options)

    @property
    def is_local(self) -> bool:
        return isinstance(self.fs, LocalFileSystem)

    def call(self, operation: Callable[[], T], path: str) -> T:
        """Do an operation on a path, again where that may help.

        Raises:
            StoreError: the store denies it, or fails at each try.
            OSError: as the file system gives it; a disk's are all of this kind.
        """
        return operation() if self.is_local else call(operation, self.fs.unstrip_protocol(path))

    def request(self, method: str, path: str, **ask: Any) -> Any:
        """A request to S3 on behalf of a path, as `call`; `ask`: as boto's client has it."""
        return self.call(lambda: self.fs.call_s3(method, **ask), path)

    def info(self, path: str) -> dict[str, Any]:
        """The entry of a file or folder.

        Raises:
            FileNotFoundError: there is none.
        """
        found: dict[str, Any] = self.call(lambda: self.fs.info(path), path)
        return found

    def list(self, folder: str) -> list[dict[str, Any]]:
        """Entries directly in a folder, as they are now; empty where there is none."""

        def list_now() -> list[dict[str, Any]]:
            self.fs.invalidate_cache(folder)
            return list(self.fs.ls(folder, detail=True))

        try:
            if self.is_s3:  # not ls(): it looks at the parent too, and passes over what fails there
                return list(self.pages(folder.rstrip("/") + "/", Delimiter="/"))
            return self.call(list_now, folder)
        except FileNotFoundError:
            return []

    def files_below(self, folder: str) -> Iterator[dict[str, Any]]:
        """Entries of all files below a folder, a page or a folder at a time."""
        if self.is_s3:
            yield from self.pages(folder.rstrip("/") + "/")
            return
        # Not find(): on disks it passes over folders that it may not read, with their rows.
        for entry in self.call(lambda: list(self.fs.ls(folder, detail=True)), folder):
            if entry["type"] == "directory":
                yield from self.files_below(entry["name"])
            else:
                yield entry

    def pages(self, prefix: str, **options: str) -> Iterator[dict[str, Any]]:
        """Entries of the keys of S3 with a prefix, a thousand at a time.

        Args:
            options: `Delimiter="/"` gives folders in place of what is in them.
        """
        bucket, key, _ = self.fs.split_path(prefix)
        request: dict[str, Any] = {"Bucket": bucket, "Prefix": key, **options}
        while True:
            page = self.request("list_objects_v2", prefix, **request)
            for folder in page.get("CommonPrefixes", []):
                name = f"{bucket}/{folder['Prefix'].rstrip('/')}"
                yield {"name": name, "size": 0, "type": "directory"}
            for found in page.get("Contents", []):
                if not found["Key"].endswith("/"):  # marks a folder
                    name, size = f"{bucket}/{found['Key']}", found["Size"]
                    about = {key: found[key] for key in ("ETag", "LastModified")}
                    yield {"name": name, "size": size, "type": "file", **about}
            if not page.get("IsTruncated"):
                return
            request["ContinuationToken"] = page["NextContinuationToken"]

    def read_file(self, path: str, start: int | None = None, stop: int | None = None) -> bytes:
        """Bytes [start, stop) of a file, or all."""

        alone = {"max_concurrency": 1} if self.is_s3 else {}  # one request, not two

        def read_whole() -> bytes:
            data = bytes(self.fs.cat_file(path, start=start, end=stop, **alone))
            if start is not None and stop is not None and len(data) != stop - start:
                raise ConnectionError(f"{len(data)} bytes came instead of {stop - start}")
            return data

        return self.call(read_whole, path)

    def open_file(self, path: str, size: int | None = None) -> Any:
        """A file to read from, of `size` bytes if known; on stores each read is a request."""
        if self.is_local:
            return self.fs.open(path, "rb")
        size = int(self.info(path)["size"]) if size is None else size
        return io.BufferedReader(_Ranges(self, path, size), 64 << 10)

    def put_file(self, path: str, data: bytes) -> None:
        """Write an object in one put, or in parts that become visible together."""
        if self.is_s3 and len(data) > MULTIPART_ABOVE:
            self._put_parts(path, data)
        else:
            self.call(lambda: self.fs.pipe_file(path, data), path)

    def _put_parts(self, path: str, data: bytes) -> None:
        bucket, key, _ = self.fs.split_path(path)

        def request(method: str, **more: Any) -> Any:
            return self.request(method, path, Bucket=bucket, Key=key, **more)

        upload = request("create_multipart_upload")["UploadId"]
        try:
            parts = []
            for number, at in enumerate(range(0, len(data), PART_BYTES), start=1):
                body = data[at : at + PART_BYTES]
                done = request("upload_part", UploadId=upload, PartNumber=number, Body=body)
                parts.append({"PartNumber": number, "ETag": done["ETag"]})
            whole = {"Parts": parts}
            request("complete_multipart_upload", UploadId=upload, MultipartUpload=whole)
        except BaseException:
            request("abort_multipart_upload", UploadId=upload)
            raise


class _Ranges(io.RawIOBase):
    """A remote file read by ranges."""

    def __init__(self, files: FileSystem, path: str, size: int) -> None:
        super().__init__()
        self._files, self._path, self._size, self._at = files, path, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        self._at = base + offset
        return self._at

    def readall(self) -> bytes:
        data = self._files.read_file(self._path, self._at, self._size) if self._left else b""
        self._at += len(data)
        return data

    @property
    def _left(self) -> int:
        return max(self._size - self._at, 0)

    def readinto(self, buffer: Any) -> int:
        wanted = min(len(buffer), self._left)
        if not wanted:
            return 0
        data = self._files.read_file(self._path, self._at, self._at + wanted)
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)


def _once(options: dict[str, Any]) -> dict[str, Any]:
    """Options of s3fs that leave listings fresh and trying again to `retry`, which counts."""
    config = {"retries": {"max_attempts": 0}, **options.get("config_kwargs", {})}
    return {"use_listings_cache": False, "config_kwargs": config}
