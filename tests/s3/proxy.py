"""A proxy in front of an S3 server that misbehaves by request count, never by the clock.

Requests go through byte for byte, signatures stay valid. A `Fault` picks requests by method and
path, counts those and strikes some of them.
"""

import contextlib
import http.client
import re
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

_SLOW_DOWN = (
    b'<?xml version="1.0" encoding="UTF-8"?>\n<Error><Code>SlowDown</Code>'
    b"<Message>Please reduce your request rate.</Message></Error>"
)
_DENIED = _SLOW_DOWN.replace(b"SlowDown", b"AccessDenied")
_HOP = {"connection", "transfer-encoding", "keep-alive"}


@dataclass
class Fault:
    """Strikes the requests that match, from the `first` on (counted from 1), so many `times`.

    kind: `503`; `denied`, a 403; `reset` before the request arrives; `lost`: its answer is;
    `truncate`: half of the answer's body; `delay`: 0.2 s; `before` and `after`: nothing happens to
    the request, but `action` is called before or after it arrives.
    """

    kind: str
    path: str = ""
    method: str = ""
    first: int = 1
    times: int = 1
    every: int = 0  # strike each n-th instead
    action: Callable[[], None] | None = None
    seen: int = field(default=0, init=False)
    struck: int = field(default=0, init=False)

    def strikes(self, method: str, path: str) -> bool:
        if not re.search(self.path, path) or not re.fullmatch(self.method or ".*", method):
            return False
        self.seen += 1
        if self.every:
            hit = self.seen % self.every == 0
        else:
            hit = self.first <= self.seen < self.first + self.times
        self.struck += hit
        return hit


class FaultProxy:
    """The proxy's address and its faults, which may be changed at any time."""

    def __init__(self, upstream_port: int) -> None:
        self.faults: list[Fault] = []
        self.log: list[tuple[str, str]] = []
        self._upstream, self._lock = upstream_port, threading.Lock()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def fault_for(self, method: str, path: str) -> Fault | None:
        """Count the request; the fault that strikes it."""
        with self._lock:
            self.log.append((method, path))
            hits = [fault for fault in self.faults if fault.strikes(method, path)]
            return hits[0] if hits else None

    def forward(self, method: str, path: str, headers: dict[str, str], body: bytes):
        upstream = http.client.HTTPConnection("127.0.0.1", self._upstream, timeout=60)
        with contextlib.closing(upstream):
            upstream.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
            for name, value in headers.items():
                upstream.putheader(name, value)
            upstream.endheaders(body)
            answer = upstream.getresponse()
            return answer.status, answer.getheaders(), answer.read()


def _handler(proxy: FaultProxy) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        timeout = 120

        def log_message(self, *_: object) -> None:
            """Quiet."""

        def handle_one_request(self) -> None:
            with contextlib.suppress(ConnectionError, TimeoutError):
                super().handle_one_request()
                return
            self.close_connection = True

        def _serve(self) -> None:
            if self.headers.get("Expect", "").lower() == "100-continue":
                self.wfile.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            body = self._read_body()
            fault = proxy.fault_for(self.command, self.path)
            kind = fault.kind if fault else "none"
            if kind == "before" and fault.action:
                fault.action()
            if kind == "reset":
                return self._reset()
            if kind == "503":
                return self._answer(503, [("Content-Type", "application/xml")], _SLOW_DOWN)
            if kind == "denied":
                return self._answer(403, [("Content-Type", "application/xml")], _DENIED)
            if kind == "delay":
                time.sleep(0.2)
            headers = {k: v for k, v in self.headers.items() if k.lower() != "expect"}
            status, answer_headers, data = proxy.forward(self.command, self.path, headers, body)
            if kind == "after" and fault.action:
                fault.action()
            if kind == "lost":
                return self._reset()
            self._answer(status, answer_headers, data, cut=kind == "truncate")

        do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _serve

        def _read_body(self) -> bytes:
            if "chunked" not in self.headers.get("Transfer-Encoding", "").lower():
                return self.rfile.read(int(self.headers.get("Content-Length") or 0))
            # Forwarded as it came: the header stays, so does the framing.
            raw = b""
            while True:
                line = self.rfile.readline()
                size = int(line.split(b";")[0], 16)
                raw += line + self.rfile.read(size + 2)
                if not size:
                    return raw

        def _answer(self, status, headers, data: bytes, cut: bool = False) -> None:
            self.send_response_only(status)
            named = {name.lower() for name, _ in headers}
            for name, value in headers:
                if name.lower() not in _HOP:
                    self.send_header(name, value)
            if "content-length" not in named:
                self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(data[: len(data) // 2] if cut else data)
            if cut:
                self.close_connection = True

        def _reset(self) -> None:
            """RST, as a dead peer's kernel sends it."""
            linger = struct.pack("ii", 1, 0)
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            self.connection.close()
            self.close_connection = True

    return Handler


@contextlib.contextmanager
def fault_proxy(upstream_port: int, *faults: Fault) -> Iterator[FaultProxy]:
    """A proxy with some faults, closed at the end."""
    proxy = FaultProxy(upstream_port)
    proxy.faults = list(faults)
    try:
        yield proxy
    finally:
        proxy.close()
