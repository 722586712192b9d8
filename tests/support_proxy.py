"""A server between a client and an S3 server that disturbs what passes: errors, hangs, cuts, slow and stale answers."""

import http.client
import re
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Literal
from urllib.parse import urlsplit

Kind = Literal["500", "503", "hang", "reset", "half upload", "slow", "stale"]
PIECES = 10


@dataclass
class Fault:
    """What happens to the next `times` requests whose method and path match the patterns."""

    kind: Kind
    times: int
    method: str
    path: str
    seconds: float
    seen: int = 0

    def takes(self, method: str, path: str) -> bool:
        """Whether the request is one of them, which counts it."""
        if self.seen >= self.times or not re.fullmatch(self.method, method) or not re.search(self.path, path):
            return False
        self.seen += 1
        return True


@dataclass
class Proxy:
    """The faults that are on, and the address to give to clients."""

    endpoint: str
    faults: list[Fault] = field(default_factory=list)
    listings: dict[str, bytes] = field(default_factory=dict)
    over: threading.Event = field(default_factory=threading.Event)

    def disturb(
        self, kind: Kind, times: int = 1_000_000, method: str = ".*", path: str = "", seconds: float = 0.0
    ) -> Fault:
        """From now on; `slow` takes `seconds` for a body, `stale` answers listings as they were when last asked for."""
        self.faults.append(Fault(kind, times, method, "list-type=2" if kind == "stale" else path, seconds))
        return self.faults[-1]

    def calm(self) -> None:
        """No fault any more; what hangs gets no answer."""
        self.faults.clear()
        self.over.set()
        self.over = threading.Event()


@contextmanager
def proxy_to(endpoint: str) -> Iterator[Proxy]:
    """A proxy on a free port in front of the server at `endpoint`."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.daemon_threads = True
    _Handler.proxy = Proxy(f"http://127.0.0.1:{server.server_address[1]}")
    _Handler.upstream = urlsplit(endpoint).netloc
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield _Handler.proxy
    finally:
        _Handler.proxy.calm()
        server.shutdown()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    proxy: Proxy
    upstream: str
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        """Says nothing."""

    def _answer(self) -> None:
        over = self.proxy.over
        fault = next((f for f in self.proxy.faults if f.takes(self.command, self.path)), None)
        kind = fault.kind if fault else ""
        length = int(self.headers.get("Content-Length") or 0)
        if kind == "half upload":
            self._forward_half(self.rfile.read(length // 2), length)
            return self._reset()
        body = self.rfile.read(length)
        if kind == "hang":
            over.wait(60)
            return self._reset()
        if kind in ("500", "503"):
            code = {"500": "InternalError", "503": "ServiceUnavailable"}[kind]
            text = f"<Error><Code>{code}</Code><Message>disturbed</Message></Error>".encode()
            return self._send(int(kind), {"Content-Type": "application/xml"}, text)
        status, headers, data = self._forward(body)
        if "list-type=2" in self.path:
            if kind == "stale":
                data = self.proxy.listings.get(self.path, data)
            else:
                self.proxy.listings[self.path] = data
        self._send(status, headers, data, kind, fault.seconds if fault else 0.0)

    def _forward(self, body: bytes) -> tuple[int, dict[str, str], bytes]:
        connection = http.client.HTTPConnection(self.upstream, timeout=60)
        try:
            connection.request(self.command, self.path, body, dict(self.headers))
            answer = connection.getresponse()
            return answer.status, dict(answer.getheaders()), answer.read()
        finally:
            connection.close()

    def _forward_half(self, half: bytes, length: int) -> None:
        host, _, port = self.upstream.partition(":")
        lines = [f"{self.command} {self.path} HTTP/1.1", *(f"{name}: {value}" for name, value in self.headers.items())]
        with socket.create_connection((host, int(port))) as upstream:
            upstream.sendall("\r\n".join([*lines, "", ""]).encode() + half)

    def _send(self, status: int, headers: dict[str, str], data: bytes, kind: str = "", seconds: float = 0.0) -> None:
        self.send_response_only(status)
        dropped = ("content-length", "transfer-encoding", "connection")
        length = headers.get("Content-Length", "0") if self.command == "HEAD" else str(len(data))
        for name, value in headers.items():
            if name.lower() not in dropped:
                self.send_header(name, value)
        self.send_header("Content-Length", length)
        self.end_headers()
        if kind == "reset":
            self.wfile.write(data[: len(data) // 2])
            return self._reset()
        size = -(-len(data) // PIECES) if seconds else len(data)
        try:
            for start in range(0, len(data), max(size, 1)):
                time.sleep(seconds / PIECES)
                self.wfile.write(data[start : start + size])
        except OSError:  # the client had enough
            self.close_connection = True

    def _reset(self) -> None:
        """Closes the connection with a reset instead of an end."""
        self.wfile.flush()
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.connection.close()
        self.close_connection = True

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _answer
