"""Connections to a listener that are not what they should be, and what they cost it."""

from __future__ import annotations

import gc
import os
import resource
import socket
import threading
from pathlib import Path
from typing import Any

from torchrelay.transports.meeting.directory import Identity
from torchrelay.transports.wire import handshake
from torchrelay.transports.wire.handshake import CHALLENGE_BYTES, Hello


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def resident() -> int:
    """Bytes of memory that this process has."""
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def exactly(sock: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        more = sock.recv(count - len(data))
        if not more:
            raise ConnectionResetError("closed")
        data += more
    return data


def connected(identity: Identity, seconds: float = 10.0) -> socket.socket:
    return socket.create_connection((identity.host, identity.port), seconds)


def challenged(identity: Identity) -> tuple[socket.socket, bytes]:
    """A connection, and what the listener said first."""
    sock = connected(identity)
    return sock, exactly(sock, CHALLENGE_BYTES)


def is_closed(sock: socket.socket, seconds: float = 10.0) -> bool:
    """Whether the other end closes a connection, in time and without another byte."""
    sock.settimeout(seconds)
    try:
        return sock.recv(1) == b""
    except ConnectionError:
        return True
    except TimeoutError:
        return False


def admitted(identity: Identity, hello: Hello, key: bytes) -> socket.socket:
    """A connection of somebody who knows the key."""
    sock, challenge = challenged(identity)
    said = handshake.hello(hello, challenge, key)
    sock.sendall(said)
    answer = exactly(sock, handshake.WELCOME_BYTES)
    handshake.check_welcome(answer, said, challenge, key)
    return sock


class Flood:
    """Strangers without end: within, `size` connections are open at a time, and say nothing or
    garbage."""

    def __init__(self, identity: Identity, size: int = 500) -> None:
        self._identity, self._size = identity, size
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="flood", daemon=True)
        self.made = 0

    def __enter__(self) -> Flood:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(30)

    def wait_until_made(self, count: int) -> None:
        while self.made < count and self._thread.is_alive():
            self._over.wait(0.01)

    def _run(self) -> None:
        held: list[Any] = []
        while not self._over.is_set():
            try:
                sock = connected(self._identity, 2.0)
                if self.made % 2:
                    sock.sendall(os.urandom(50))
                held.append(sock)
                self.made += 1
            except OSError:
                self._over.wait(0.01)
            while len(held) > self._size:
                held.pop(0).close()
        for sock in held:
            sock.close()
