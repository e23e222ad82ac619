"""Who may read: those who know the token; without one, this user on this machine. No aiohttp."""

from __future__ import annotations

import hmac
import ipaddress
import os
import socket
import struct
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol
from urllib.parse import urlsplit

_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid


class Refusal(Exception):
    """A request that is answered with a status and a line of text."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


class Headers(Protocol):
    """Of a request, by names in any case."""

    def get(self, name: str, default: str, /) -> str: ...


def refusal(headers: Headers, token: str | None, is_own: Callable[[], bool]) -> str:
    """Why somebody may not read here; nothing where they may. `is_own`: whether the other end of
    the connection is this user's."""
    if token is not None:
        if has_token(headers, token):
            return ""
        return "this endpoint needs its token: Authorization: Bearer TOKEN"
    if not is_plain_host(headers.get("Host", "")):
        return "without a token, ask by an address or localhost, not by a name"
    if not is_own():
        return "without a token, only the user who serves may read: give a token"
    return ""


def has_token(headers: Headers, token: str) -> bool:
    kind, _, given = headers.get("Authorization", "").partition(" ")
    same = hmac.compare_digest(given.strip().encode("utf-8", "surrogateescape"), token.encode())
    return same and kind.lower() == "bearer"


def is_own_user(sock: socket.socket) -> bool:
    """Whether the other end of a loopback connection is this user's, or root's: the kernel's table
    of sockets says so. What cannot be found out is nobody's."""
    with suppress(OSError, ValueError, IndexError):
        here, there = sock.getsockname(), sock.getpeername()
        table = "/proc/net/tcp6" if sock.family == socket.AF_INET6 else "/proc/net/tcp"
        with open(table) as lines:  # looked through as a whole: there may be thousands
            _, found, rest = lines.read().partition(f" {_hexed(there)} {_hexed(here)} ")
        return bool(found) and int(rest.split(maxsplit=5)[4]) in (os.getuid(), 0)
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
    """Whether a `Host` header is an address or `localhost`: a name that a stranger's page was
    loaded from may stand for this machine too."""
    try:
        name = urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return False
    if name == "localhost":
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
