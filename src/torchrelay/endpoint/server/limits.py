"""Who may connect and ask: the token, the user, how many at once, and how slowly."""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import os
import socket
import struct
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit
from weakref import WeakSet

from aiohttp import web

KEPT_SECONDS = 75.0  # that one may stay open between requests
LINE_BYTES = 8190  # of a request line or a header, and
HEADERS = 64  # so many of them
BODY_BYTES = 64 << 10
_SWEEP_SECONDS = 0.5

_own_connections: WeakSet[asyncio.BaseTransport] = WeakSet()  # the table is long, and asked once

Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


class LimitedServer(web.Server):
    """An HTTP server with so many connections at most, none of which may dawdle with a request."""

    def __init__(self, handler: Handler, *, most: int, patience: float) -> None:
        super().__init__(
            self._watched(handler),
            keepalive_timeout=KEPT_SECONDS,
            max_line_size=LINE_BYTES,
            max_field_size=LINE_BYTES,
            max_headers=HEADERS,
            access_log=None,
            lingering_time=0.0,
        )
        self._most = most
        self._patience = patience  # seconds in which a connection has to come up with a request
        self._since: dict[Any, tuple[asyncio.Transport, float | None]] = {}
        self.turned_away = 0
        self.dawdlers = 0

    def _watched(self, handler: Handler) -> Handler:
        async def handle(request: web.BaseRequest) -> web.StreamResponse:
            protocol = request.protocol
            if protocol in self._since:
                self._since[protocol] = self._since[protocol][0], None
            try:
                return await handler(request)
            finally:
                if protocol in self._since:
                    kept = time.monotonic() + KEPT_SECONDS - self._patience
                    self._since[protocol] = self._since[protocol][0], kept

        return handle

    def connection_made(self, handler: Any, transport: asyncio.Transport) -> None:
        super().connection_made(handler, transport)
        if len(self._since) >= self._most:
            self.turned_away += 1
            cut(transport)
            return
        self._since[handler] = transport, time.monotonic()

    def connection_lost(self, handler: Any, exc: BaseException | None = None) -> None:
        self._since.pop(handler, None)
        super().connection_lost(handler, exc)

    @property
    def count(self) -> int:
        return len(self._since)

    async def sweep(self) -> None:
        """Cut connections on which a request takes too long to come; runs until cancelled."""
        while True:
            await asyncio.sleep(_SWEEP_SECONDS)
            now = time.monotonic()
            for transport, since in list(self._since.values()):
                if since is not None and now - since > self._patience:
                    self.dawdlers += 1
                    cut(transport)


def cut(transport: asyncio.BaseTransport) -> None:
    """End a connection at once: what the kernel has not delivered yet is thrown away, and does not
    wait for a reader that takes nothing."""
    sock = transport.get_extra_info("socket")
    if sock is not None:
        with suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    if isinstance(transport, asyncio.WriteTransport):
        transport.abort()


def refusal(request: web.BaseRequest, token: str | None) -> str:
    """Why somebody may not read here; nothing where they may."""
    if token is not None:
        if has_token(request, token):
            return ""
        return "this endpoint needs its token: Authorization: Bearer TOKEN"
    if not is_plain_host(request.headers.get("Host", "")):
        return "without a token, ask by an address or localhost, not by a name"
    if not is_own_user(request):
        return "without a token, only the user who serves may read: give a token"
    return ""


def has_token(request: web.BaseRequest, token: str) -> bool:
    kind, _, given = request.headers.get("Authorization", "").partition(" ")
    same = hmac.compare_digest(given.strip().encode("utf-8", "surrogateescape"), token.encode())
    return same and kind.lower() == "bearer"


def is_own_user(request: web.BaseRequest) -> bool:
    """Whether the other end of a loopback connection is this user's, or root's: the kernel's table
    of sockets says so. What cannot be found out is nobody's."""
    transport = request.transport
    if transport in _own_connections:
        return True
    sock = None if transport is None else transport.get_extra_info("socket")
    if transport is None or sock is None:
        return False
    with suppress(OSError, ValueError, IndexError):
        here, there = sock.getsockname(), sock.getpeername()
        table = "/proc/net/tcp6" if sock.family == socket.AF_INET6 else "/proc/net/tcp"
        wanted = f"{_hexed(there)} {_hexed(here)}"
        with open(table) as lines:
            for line in lines:
                fields = line.split()
                if f"{fields[1]} {fields[2]}" == wanted:
                    if int(fields[7]) in (os.getuid(), 0):
                        _own_connections.add(transport)
                        return True
                    return False
    return False


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
