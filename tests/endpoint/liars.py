"""Servers that do not do what they should, and clients that do not take what they get.

They speak bytes on sockets, because no HTTP library would send what they send.
"""

from __future__ import annotations

import contextlib
import re
import socket
import threading
from collections.abc import Callable, Iterator
from urllib.parse import urlsplit

from torchrelay.sources.http_head import DIGEST, digest_header

Alter = Callable[[str, bytes], bytes | None]


class Between:
    """Stands between a reader and an endpoint, and passes on what `alter` makes of each answer's
    body; None breaks the connection off in the middle of it. `renamed`: what the endpoint knows by
    the first name is known to the reader by the second, which is as long."""

    def __init__(self, url: str, alter: Alter, renamed: tuple[bytes, bytes] = (b"", b"")) -> None:
        self._true, self._false = renamed
        self._target = (urlsplit(url).hostname or "", urlsplit(url).port or 0)
        self._alter = alter
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.requests: list[str] = []
        self._open: set[socket.socket] = set()
        self._closed = False
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                reader, _ = self._listener.accept()
                self._open.add(reader)
                threading.Thread(target=self._pass, args=(reader,), daemon=True).start()

    def _pass(self, reader: socket.socket) -> None:
        with contextlib.suppress(OSError, EOFError), reader:
            server = socket.create_connection(self._target, timeout=30)
            self._open.add(server)
            with server, reader.makefile("rb") as asks, server.makefile("rb") as answers:
                while True:
                    head, body = _message(asks)
                    line = head.split(b"\r\n")[0].decode()
                    self.requests.append(line)
                    server.sendall(head.replace(self._false, self._true) + body)
                    head, body = _message(answers)
                    head = head.replace(self._true, self._false)
                    body = body.replace(self._true, self._false)
                    altered = self._alter(line, body)
                    if altered is None:
                        reader.sendall(head + body[: len(body) // 2])
                        return
                    if len(altered) != len(body):
                        before, after = (b"Content-Length: %d" % len(x) for x in (body, altered))
                        head = head.replace(before, after)
                    # A liar digests what it sends.
                    own = f"{DIGEST}: {digest_header(altered)}".encode()
                    head = re.sub(DIGEST.encode() + rb": \w+", own, head)
                    reader.sendall(head + altered)

    def close(self) -> None:
        """Break everything off, as a process that is killed does."""
        self._listener.close()
        for one in list(self._open):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def __enter__(self) -> Between:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _message(stream: object) -> tuple[bytes, bytes]:
    head = b""
    length = 0
    while not head.endswith(b"\r\n\r\n"):
        line = stream.readline()  # type: ignore[attr-defined]
        if not line:
            raise EOFError
        head += line
        if line.lower().startswith(b"content-length:"):
            length = int(line.split(b":")[1])
    return head, stream.read(length)  # type: ignore[attr-defined]


@contextlib.contextmanager
def answering(act: Callable[[socket.socket], None]) -> Iterator[str]:
    """A server that does `act` with every connection; its URL."""
    listener = socket.create_server(("127.0.0.1", 0))
    held: list[socket.socket] = []

    def one(line: socket.socket) -> None:
        with contextlib.suppress(OSError), line:
            act(line)

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                line, _ = listener.accept()
                held.append(line)
                threading.Thread(target=one, args=(line,), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        listener.close()
        for line in held:
            with contextlib.suppress(OSError):
                line.shutdown(socket.SHUT_RDWR)
            line.close()


def asked(line: socket.socket) -> str:
    """Read a request; its first line."""
    data = b""
    while b"\r\n\r\n" not in data:
        part = line.recv(4096)
        if not part:
            raise OSError("gone")
        data += part
    return data.split(b"\r\n")[0].decode()
