"""Listening sockets, whose connections each have a thread."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from torchrelay.memory import threads

PAUSE = 0.1  # seconds before another try, where the process has no descriptors or threads left


class Acceptor:
    """Calls `serve` with each connection, on a thread of its own, until `close`. A process that is
    out of descriptors accepts again when it has some."""

    def __init__(self, listener: socket.socket, serve: Callable[[socket.socket], None]) -> None:
        self._listener, self._serve = listener, serve
        self._closed = False
        threading.Thread(target=self._run, name="torchrelay-accept", daemon=True).start()

    def _run(self) -> None:
        while not self._closed:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                time.sleep(PAUSE)
                continue
            try:
                threads.run(lambda sock=sock: self._serve_one(sock), "serve")  # type: ignore[misc]
            except RuntimeError:
                sock.close()
                time.sleep(PAUSE)

    def _serve_one(self, sock: socket.socket) -> None:
        with sock, suppress(OSError, EOFError):  # the other end broke off
            self._serve(sock)

    def close(self) -> None:
        self._closed = True
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # for children of a fork, who have it too
        self._listener.close()


def listen_at(host: str, port: int, backlog: int = 128) -> socket.socket:
    """A TCP socket at an address of either family."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=backlog)


def listen_by_name(name: str, backlog: int) -> socket.socket:
    """A Unix socket that is in no file system and gone with the process; `OSError` with EADDRINUSE
    where another process has the name."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(f"\0{name}")
        listener.listen(backlog)
    except BaseException:
        listener.close()
        raise
    return listener
