"""Before anything is read: who asks, and is the body small enough. And API keys, kept as hashes."""

import hashlib
import hmac
import json
import os
import secrets
from collections.abc import Awaitable, Callable, MutableMapping
from pathlib import Path
from typing import Any

from actors.bulk.errors import ApiError, invalid
from actors.bulk.state import OWNER
from pipeline.errors import ConfigError

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Asgi = Callable[[Scope, Receive, Send], Awaitable[None]]

NOBODY = "default"  # owner of everything where there are no keys
_OPEN = ("/healthz", "/readyz")
_KEY = "serve.keys_file"


class Keys:
    """The keys file: `name sha256` lines. Read anew when it changes, so keys come and go live."""

    def __init__(self, path: str | None) -> None:
        """Raises ConfigError: the file cannot be read, or a line makes no sense."""
        self._path = None if path is None else Path(path)
        self._stamp: int | None = None
        self._owners: dict[str, str] = {}
        if self._path is not None:
            self._load()

    def owner(self, authorization: str) -> str | None:
        """Whose key an `Authorization` header holds; None for nobody's."""
        if self._path is None:
            return NOBODY
        if os.stat(self._path).st_mtime_ns != self._stamp:
            self._load()
        scheme, _, key = authorization.partition(" ")
        digest = hash_key(key.strip())
        found = None
        for known, name in self._owners.items():  # all of them: time tells nothing
            if hmac.compare_digest(known, digest) and scheme.lower() == "bearer":
                found = name
        return found

    def _load(self) -> None:
        assert self._path is not None
        try:
            self._stamp = os.stat(self._path).st_mtime_ns
            lines = self._path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            problem = f"cannot read {self._path}: {error}; `--new-key NAME` makes one"
            raise ConfigError(_KEY, problem) from None
        owners = {}
        for number, line in enumerate(lines, 1):
            if not line.strip() or line.startswith("#"):
                continue
            name, _, digest = line.strip().partition(" ")
            if not OWNER.fullmatch(name) or len(digest) != 64:
                raise ConfigError(_KEY, f"{self._path}, line {number} is not `name sha256`; fix it")
            owners[digest] = name
        self._owners = owners


def hash_key(key: str) -> str:
    """Keys are 256 random bits, so that a plain hash is enough."""
    return hashlib.sha256(key.encode("utf-8", "replace")).hexdigest()


def new_key(path: str, name: str) -> str:
    """Make a key for `name` and add its hash to the file.

    Raises:
        ConfigError: the name is no name.
    """
    if not OWNER.fullmatch(name):
        problem = f"{name!r} is no name; use up to 40 of a-z, 0-9, _ and -"
        raise ConfigError("--new-key", problem)
    key = f"dm-{secrets.token_urlsafe(32)}"
    with open(path, "a", encoding="utf-8") as file:
        os.chmod(path, 0o600)
        file.write(f"{name} {hash_key(key)}\n")
    return key


class Guard:
    """ASGI middleware: authorisation and body size, checked from headers alone."""

    def __init__(self, app: Asgi, keys: Keys, max_body: int) -> None:
        """`max_body`: in bytes."""
        self._app, self._keys, self._max_body = app, keys, max_body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = {k.decode("latin-1"): v.decode("latin-1") for k, v in scope["headers"]}
        try:
            owner = None if scope["path"] in _OPEN else self._check(headers)
        except ApiError as error:
            await _answer(send, error)
            return
        scope.setdefault("state", {})["owner"] = owner
        await self._app(scope, self._counted(receive), send)

    def _check(self, headers: dict[str, str]) -> str:
        owner = self._keys.owner(headers.get("authorization", ""))
        if owner is None:
            raise ApiError(401, "Incorrect API key provided.", "invalid_api_key")
        length = headers.get("content-length", "0")
        if not length.isdigit():
            raise invalid("Content-Length is no number", code="invalid_header")
        if int(length) > self._max_body:
            raise self._too_large()
        return owner

    def _counted(self, receive: Receive) -> Receive:
        """Bodies without a length are counted as they come."""
        seen = 0

        async def counted() -> MutableMapping[str, Any]:
            nonlocal seen
            message = await receive()
            seen += len(message.get("body", b""))
            if seen > self._max_body:
                raise self._too_large()
            return message

        return counted

    def _too_large(self) -> ApiError:
        megabytes = self._max_body // 1_000_000
        return ApiError(413, f"The body is larger than {megabytes} MB.", "request_too_large")


async def _answer(send: Send, error: ApiError) -> None:
    headers = {"content-type": "application/json", **error.headers()}
    pairs = [(k.lower().encode(), v.encode()) for k, v in headers.items()]
    await send({"type": "http.response.start", "status": error.status, "headers": pairs})
    await send({"type": "http.response.body", "body": json.dumps(error.body()).encode()})
