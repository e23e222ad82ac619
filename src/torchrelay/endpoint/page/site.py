"""The page served on its own, for places that have no endpoint."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Any

import msgspec
from aiohttp import web

from torchrelay.endpoint.page import PAGE, PATHS
from torchrelay.endpoint.page.answers import PageAnswers
from torchrelay.endpoint.page.data import WatchedSteps
from torchrelay.endpoint.security import Address
from torchrelay.endpoint.server.limits import LimitedServer, refusal

CONNECTIONS = 64
PATIENCE = 10.0  # seconds in which a connection has to come up with a request


class PageSite:
    """Lets in as an endpoint does, and answers what the page asks for. `status` tells what
    `/status.json` does; it may take its time, on a thread."""

    def __init__(
        self, watched: WatchedSteps, status: Callable[[], dict[str, Any]], token: str | None
    ) -> None:
        self._status, self._token = status, token
        self._answers = PageAnswers(watched)
        self._turn = asyncio.Semaphore(1)

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer a request."""
        path = request.path
        if not (path == PAGE and self._token is not None) and (
            why := refusal(request, self._token)
        ):
            return web.Response(status=401, text=why + "\n")
        if request.method not in ("GET", "HEAD"):
            return web.Response(status=405, text="this is only to be looked at\n")
        if path == "/status.json":
            async with self._turn:
                found = await asyncio.to_thread(self._status)
            return web.Response(
                body=msgspec.json.encode(found),
                content_type="application/json",
                headers={"Cache-Control": "no-store"},
            )
        if path != PAGE and path not in PATHS:
            return web.Response(status=404, text="there is nothing here\n")
        status, body, headers = await self._answers.answer(path, request.query)
        return web.Response(status=status, body=body, headers=headers)


async def serve_page(
    watched: WatchedSteps,
    status: Callable[[], dict[str, Any]],
    address: Address,
    token: str | None,
    ready: Callable[[str], None],
) -> None:
    """Serve until cancelled; `ready` is told the URL."""
    site = PageSite(watched, status, token)
    server = LimitedServer(site.handle, most=CONNECTIONS, patience=PATIENCE)
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    with socket.create_server((address.host, address.port), family=family) as sock:
        listening = await asyncio.get_running_loop().create_server(server, sock=sock)
        ready(f"http://{address.shown}:{sock.getsockname()[1]}")
        async with listening:
            await server.sweep()
