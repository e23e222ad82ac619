"""Admission: clients need the token; without a token, they must be this user's, on this machine."""

from __future__ import annotations

import hmac
import ipaddress
import os
import socket
import struct
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid


def refusal(headers: Mapping[str, str], token: str | None, is_own: Callable[[], bool]) -> str:
    """Why a client may not read here, or nothing. `is_own`: whether the other end of the connection
    belongs to this user."""
    if token is not None:
        kind, _, given = headers.get("authorization", "").partition(" ")
        known, said = token.encode(), given.strip().encode("utf-8", "surrogateescape")
        if hmac.compare_digest(said, known) and kind.lower() == "bearer":
            return ""
        return "this endpoint needs its token: Authorization: Bearer TOKEN"
    if not is_plain_host(headers.get("host", "")):
        return "without a token, ask by an address or localhost, not by a name"
    if not is_own():
        return "without a token, only the user who serves may read: give a token"
    return ""


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
