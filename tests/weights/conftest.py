"""A trainer that publishes, and what stands between it and a worker."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from urllib.parse import urlsplit

import pytest


class Wire:
    """Passes connections on to an endpoint, and counts what comes back. `meddle` gets the bytes of
    each answer so far and the next ones, and returns what is passed on; None breaks it off."""

    def __init__(self, url: str) -> None:
        self.lead(url)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.meddle: Callable[[bytes, int, bytes], bytes | None] = lambda asked, at, data: data
        self.received = 0
        self.asked: list[bytes] = []  # first lines of requests
        self._open: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def lead(self, url: str) -> None:
        """Pass connections on to another endpoint from now on."""
        place = urlsplit(url)
        self._target = place.hostname or "", place.port or 0

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                reader, _ = self._listener.accept()
                self._open.append(reader)
                try:
                    self._join(reader)
                except OSError:  # nobody listens there any more
                    _end(reader)

    def _join(self, reader: socket.socket) -> None:
        server = socket.create_connection(self._target, timeout=30)
        self._open.append(server)
        for line in (reader, server):
            line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        latest = [b""]
        for act in (self._up, self._down):
            threading.Thread(target=act, args=(reader, server, latest), daemon=True).start()

    def _up(self, reader: socket.socket, server: socket.socket, latest: list[bytes]) -> None:
        with suppress(OSError):
            while data := reader.recv(1 << 16):
                line = data.split(b"\r\n", 1)[0]
                if line.endswith(b"HTTP/1.1"):
                    latest[0] = line
                    self.asked.append(line)
                server.sendall(data)
        _end(server)

    def _down(self, reader: socket.socket, server: socket.socket, latest: list[bytes]) -> None:
        at, asked = 0, b""
        with suppress(OSError):
            while data := server.recv(1 << 16):
                if latest[0] is not asked:
                    at, asked = 0, latest[0]
                passed = self.meddle(asked, at, data)
                if passed is None:
                    break
                at += len(data)
                self.received += len(passed)
                reader.sendall(passed)
        _end(reader)
        _end(server)

    def forget(self) -> None:
        """Break off all connections."""
        some, self._open = self._open, []
        for one in some:
            _end(one)
            one.close()

    def close(self) -> None:
        """Break everything off, as a host that is lost does."""
        self._listener.close()
        for one in self._open:
            _end(one)


def _end(line: socket.socket) -> None:
    with suppress(OSError):
        line.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def wires() -> Iterator[Callable[[str], Wire]]:
    with ExitStack() as ends:

        def make(url: str) -> Wire:
            wire = Wire(url)
            ends.callback(wire.close)
            return wire

        yield make
