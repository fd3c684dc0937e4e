"""Files and batches in the store, below a folder per key. Nothing lives in a process's memory.

    keys/<owner>/files/<file id>.json, .data    an uploaded or a result file
    keys/<owner>/batches/<batch id>/request.json   as created; never changes
                                    state.json     written by the controller alone
                                    cancel.json    there once cancelling was asked for
                                    in/, run/      input and output of the pipeline
    open/<owner>.<batch id>                     unfinished batches of all keys

Every object is written by one party, atomically, so that no two writers ever meet.
"""

import json
import re
import secrets
import time
from typing import Any

from actors.bulk.errors import ApiError, not_found
from pipeline.store.files import Store

OWNER = re.compile(r"[a-z0-9][a-z0-9_-]{0,39}")
_FILE_ID = re.compile(r"file-[0-9a-z]{8,64}")
_BATCH_ID = re.compile(r"batch_[0-9a-f]{16,64}")
ENDED = ("completed", "failed", "expired", "cancelled")
_DAY_S = 86_400
INPUT_LIFE_S = 30 * _DAY_S  # as OpenAI's: files for batches expire after 30 days by default


def new_id(prefix: str) -> str:
    """An id that sorts by time: `prefix` and hex digits."""
    return f"{prefix}{int(time.time() * 1000):012x}{secrets.token_hex(6)}"


class Files:
    """Uploaded files and results."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def put(
        self,
        owner: str,
        data: bytes,
        filename: str,
        purpose: str,
        *,
        file_id: str | None = None,
        life_s: int | None = INPUT_LIFE_S,
    ) -> dict[str, Any]:
        """Store a file: its object in OpenAI's shape. The object comes last, so it is whole."""
        file_id = file_id or new_id("file-")
        now = int(time.time())
        meta = {
            "id": file_id,
            "object": "file",
            "bytes": len(data),
            "created_at": now,
            "expires_at": None if life_s is None else now + life_s,
            "filename": filename,
            "purpose": purpose,
            "status": "processed",
            "status_details": None,
        }
        self._store.put(f"{self._folder(owner)}/{file_id}.data", data)
        self._store.put(f"{self._folder(owner)}/{file_id}.json", json.dumps(meta).encode())
        return meta

    def get(self, owner: str, file_id: str) -> dict[str, Any]:
        """Raises ApiError 404."""
        if not _FILE_ID.fullmatch(file_id):
            raise not_found("File object", file_id)
        meta = _read(self._store, f"{self._folder(owner)}/{file_id}.json")
        if meta is None or (meta["expires_at"] or time.time() + 1) < time.time():
            raise not_found("File object", file_id)
        return meta

    def content(self, owner: str, file_id: str) -> bytes:
        """Raises ApiError 404."""
        self.get(owner, file_id)
        return self._store.read(f"{self._folder(owner)}/{file_id}.data")

    def delete(self, owner: str, file_id: str) -> None:
        """Raises ApiError 404."""
        self.get(owner, file_id)
        folder = self._folder(owner)
        self._store.delete([f"{folder}/{file_id}.json", f"{folder}/{file_id}.data"])

    def all(self, owner: str) -> list[dict[str, Any]]:
        """All of a key, oldest first."""
        names = self._store.names(self._folder(owner))
        ids = [n.rsplit("/", 1)[-1].removesuffix(".json") for n in names if n.endswith(".json")]
        found = []
        for file_id in ids:
            try:
                found.append(self.get(owner, file_id))
            except ApiError:
                continue  # expired, or deleted meanwhile
        return sorted(found, key=lambda meta: (meta["created_at"], meta["id"]))

    @staticmethod
    def _folder(owner: str) -> str:
        return f"keys/{owner}/files"


class Batches:
    """Batches as created, as they stand, and which are open."""

    def __init__(self, store: Store) -> None:
        self.store = store

    def create(self, owner: str, request: dict[str, Any]) -> bool:
        """Store a new batch; False if its id exists (the same creation, sent again)."""
        name = f"{self.folder(owner, request['id'])}/request.json"
        self.store.put(f"open/{owner}.{request['id']}", b"")  # first: none may be forgotten
        return self.store.create(name, json.dumps(request).encode())

    def request(self, owner: str, batch_id: str) -> dict[str, Any]:
        """Raises ApiError 404."""
        found = None
        if _BATCH_ID.fullmatch(batch_id):
            found = _read(self.store, f"{self.folder(owner, batch_id)}/request.json")
        if found is None:
            raise not_found("batch", batch_id)
        return found

    def state(self, owner: str, batch_id: str) -> dict[str, Any]:
        """What the controller last wrote; empty before it took notice."""
        return _read(self.store, f"{self.folder(owner, batch_id)}/state.json") or {}

    def update(self, owner: str, batch_id: str, **changes: Any) -> dict[str, Any]:
        """For the controller: merge into the state."""
        state = self.state(owner, batch_id) | changes
        name = f"{self.folder(owner, batch_id)}/state.json"
        self.store.put(name, json.dumps(state).encode())
        return state

    def cancel(self, owner: str, batch_id: str) -> None:
        """Ask for it; asking twice changes nothing."""
        asked = json.dumps({"at": int(time.time())}).encode()
        self.store.create(f"{self.folder(owner, batch_id)}/cancel.json", asked)

    def cancelled_at(self, owner: str, batch_id: str) -> int | None:
        """When cancelling was asked for."""
        asked = _read(self.store, f"{self.folder(owner, batch_id)}/cancel.json")
        return None if asked is None else int(asked["at"])

    def ids(self, owner: str) -> list[str]:
        """All of a key, newest first."""
        folder = f"keys/{owner}/batches"
        entries = self.store.list(self.store.path(folder))
        names = (entry["name"].rstrip("/").rsplit("/", 1)[-1] for entry in entries)
        return sorted((n for n in names if _BATCH_ID.fullmatch(n)), reverse=True)

    def open(self) -> list[tuple[str, str]]:
        """(owner, batch id) of all that are not finished, oldest first."""
        pairs = (name.rsplit("/", 1)[-1].partition(".") for name in self.store.names("open"))
        return sorted(((owner, batch_id) for owner, _, batch_id in pairs), key=lambda p: p[1])

    def close(self, owner: str, batch_id: str) -> None:
        self.store.delete([f"open/{owner}.{batch_id}"])

    @staticmethod
    def folder(owner: str, batch_id: str) -> str:
        return f"keys/{owner}/batches/{batch_id}"


def run_store(store: Store, options: dict[str, Any], owner: str, batch_id: str) -> Store:
    """The output folder of a batch's pipeline."""
    return Store(f"{store.url}/{Batches.folder(owner, batch_id)}/run", options)


def _read(store: Store, name: str) -> dict[str, Any] | None:
    try:
        found: dict[str, Any] = json.loads(store.read(name))
        return found
    except FileNotFoundError:
        return None


def page(items: list[dict[str, Any]], after: str | None, limit: int) -> dict[str, Any]:
    """A list in OpenAI's shape: the items behind `after`, `limit` of them at most.

    Raises:
        ApiError: 400, `after` is not among them.
    """
    ids = [item["id"] for item in items]
    if after is not None:
        if after not in ids:
            raise ApiError(400, f"after: no such id: {after[:80]}", "invalid_value", "after")
        items = items[ids.index(after) + 1 :]
    data = items[:limit]
    return {
        "object": "list",
        "data": data,
        "first_id": data[0]["id"] if data else None,
        "last_id": data[-1]["id"] if data else None,
        "has_more": len(items) > limit,
    }
