"""Who may connect and ask: the token, the user, how many at once, and how slowly."""

from __future__ import annotations

import asyncio
import socket
import struct
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any
from weakref import WeakSet

from aiohttp import web

from torchrelay.endpoint import admission

KEPT_SECONDS = 75.0  # that one may stay open between requests
LINE_BYTES = 8190  # of a request line or a header, and
HEADERS = 64  # so many of them
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
    transport = request.transport

    def is_own() -> bool:
        if transport in _own_connections:
            return True
        sock = None if transport is None else transport.get_extra_info("socket")
        if transport is None or sock is None or not admission.is_own_user(sock):
            return False
        _own_connections.add(transport)
        return True

    return admission.refusal(request.headers, token, is_own)
