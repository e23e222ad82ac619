"""Listening sockets, whose connections each have a thread, and who is at their other end."""

from __future__ import annotations

import ipaddress
import os
import socket
import struct
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

from torchrelay.errors import ResourceError
from torchrelay.memory import threads

PAUSE = 0.1  # seconds before another try, where the process has no descriptors or threads left
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid


class Acceptor:
    """Calls `serve` with each connection, on a thread of its own, until `close`. A process that is
    out of descriptors accepts again when it has some."""

    def __init__(self, listener: socket.socket, serve: Callable[[socket.socket], None]) -> None:
        self._listener, self._serve = listener, serve
        self._closed = False
        threads.start(self._run, "accept")

    def _run(self) -> None:
        while not self._closed:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                time.sleep(PAUSE)
                continue
            try:
                threads.run(lambda sock=sock: self._serve_one(sock), "serve")  # type: ignore[misc]
            except ResourceError:
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


def is_own_user(sock: socket.socket) -> bool:
    """Whether the other end of a loopback connection belongs to this user or to root, by the
    kernel's table of sockets. A socket that is closed already belongs to no one."""
    with suppress(OSError, ValueError, IndexError):
        here, there = sock.getsockname(), sock.getpeername()
        table = "/proc/net/tcp6" if sock.family == socket.AF_INET6 else "/proc/net/tcp"
        with open(table) as lines:  # searched as a whole: there may be thousands of lines
            _, found, rest = lines.read().partition(f" {_hexed(there)} {_hexed(here)} ")
        fields = rest.split(maxsplit=7)  # state, queues, timer, retransmits, uid, timeout, inode
        return bool(found) and int(fields[4]) in (os.getuid(), 0) and int(fields[6]) != 0
    return False


def user_of(sock: socket.socket) -> int:
    """The user at the other end of a Unix socket, as the kernel says."""
    found = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(found)[1])


def _hexed(address: Any) -> str:
    """An address as the kernel's table has it: words of the host's byte order, then the port."""
    packed = ipaddress.ip_address(address[0]).packed
    words = [packed[at : at + 4][::-1].hex().upper() for at in range(0, len(packed), 4)]
    return f"{''.join(words)}:{address[1]:04X}"


def is_plain_host(host: str) -> bool:
    """Whether a `Host` header is an address or `localhost`. Another name may be a stranger's that
    points to this machine (DNS rebinding)."""
    try:
        name = urlsplit(f"//{host}").hostname or ""
        return name == "localhost" or bool(ipaddress.ip_address(name))
    except ValueError:
        return False
