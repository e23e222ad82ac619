"""A server that changes bytes of part streams, and digests what it sends."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

from torchrelay.memory.digest import digest
from torchrelay.parts.stream import HEAD_BYTES, MAGIC, WHOLE, ChunkHead

TIMEOUT = 30
# The number of a chunk in its stream, and its bytes; what the server says in their place.
Lie = Callable[[int, bytes], bytes]


@contextmanager
def lying(url: str, lie: Lie) -> Iterator[str]:
    """An endpoint by another URL; its part streams have other bytes, with digests that fit."""
    place = urlsplit(url)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._pass(b"")

        def do_POST(self) -> None:
            self._pass(self.rfile.read(int(self.headers["Content-Length"])))

        def _pass(self, body: bytes) -> None:
            honest = HTTPConnection(place.hostname or "", place.port, timeout=TIMEOUT)
            headers = {k: v for k, v in self.headers.items() if k not in ("Host", "Connection")}
            honest.request(self.command, self.path, body or None, headers)
            answer = honest.getresponse()
            data = answer.read()
            honest.close()
            if self.path == "/parts" and answer.status == 200:
                data = _altered(data, lie)
            self.send_response(answer.status)
            for name, value in answer.getheaders():
                if name.lower() not in ("content-length", "transfer-encoding", "connection"):
                    self.send_header(name, value)
            if self.path != "/parts" and answer.status != 204:
                self.send_header("Content-Length", str(len(data)))
            self.send_header("Connection", "close")
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()


def _altered(stream: bytes, lie: Lie) -> bytes:
    found, at, number = [stream[: len(MAGIC)]], len(MAGIC), 0
    while at < len(stream):
        head = ChunkHead.decoded(stream[at : at + HEAD_BYTES])
        at += HEAD_BYTES
        payload = stream[at : at + head.nbytes]
        at += head.nbytes
        if head.kind == WHOLE:
            payload = lie(number, payload)
            head = ChunkHead(WHOLE, len(payload), digest(payload))
        found += [head.encoded(), payload]
        number += 1
    return b"".join(found)
