"""A server of the page on made-up steps and a made-up status, which a test changes as it goes."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from typing import Any

from aiohttp import web

from tests.support.held_source import HeldSource
from torchrelay.endpoint.page import PAGE
from torchrelay.endpoint.page.answers import PageAnswers
from torchrelay.inspection.seam import Contents


class HeldSteps:
    """Implements `WatchedSteps` on states in memory."""

    def __init__(self, sources: Mapping[int, HeldSource]) -> None:
        self._sources = sources

    def steps(self) -> list[int]:
        return sorted(self._sources)

    def contents(self, step: int) -> Contents:
        return self._sources[step].contents

    @contextmanager
    def source(self, step: int) -> Iterator[HeldSource]:
        yield self._sources[step]


class WatchedSite:
    """`status` is what `/status.json` tells. `asked` has the paths and tokens of all requests."""

    def __init__(self, sources: Mapping[int, HeldSource], token: str | None = None) -> None:
        self._token = token
        self._answers = PageAnswers(HeldSteps(sources))
        self.url = ""
        self.asked: list[tuple[str, str]] = []
        newest = max(sources)
        self.status: dict[str, Any] = {
            "step": newest, "steps": [], "publishes": [], "transfers": [], "finished": [],
            "readers": 0, "seeds": [], "ranks": [], "failures": 0, "started": time.time(),
        }  # fmt: skip

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        sent = request.headers.get("Authorization", "")
        self.asked.append((request.path_qs, sent))
        if request.path != PAGE and self._token and sent != f"Bearer {self._token}":
            return web.Response(status=401, text="this endpoint needs its token")
        if request.path == "/status.json":
            return web.json_response({**self.status, "url": self.url, "now": time.time()})
        status, body, headers = await self._answers.answer(request.path, request.query)
        return web.Response(status=status, body=body, headers=headers)


@asynccontextmanager
async def serving(site: WatchedSite) -> AsyncIterator[WatchedSite]:
    runner = web.ServerRunner(web.Server(site.handle))
    await runner.setup()
    listening = web.TCPSite(runner, "127.0.0.1", 0)
    await listening.start()
    host, port = runner.addresses[0][:2]
    site.url = f"http://{host}:{port}"
    try:
        yield site
    finally:
        await runner.cleanup()
