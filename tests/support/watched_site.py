"""A server of the page on made-up steps and a made-up status, which a test changes as it goes."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from typing import Any
from urllib.parse import urlencode

from tests.support.held_source import HeldSource
from torchrelay.endpoint.page import PAGE
from torchrelay.endpoint.page.answers import PageAnswers
from torchrelay.endpoint.server.http.connections import HttpConnection, HttpServer, Response
from torchrelay.endpoint.server.http.requests import Refusal, Request
from torchrelay.endpoint.server.http.sockets import Acceptor
from torchrelay.inspection.opened_state import Contents


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

    def answer(self, request: Request, line: HttpConnection) -> Response:
        sent = request.headers.get("authorization", "")
        query = urlencode(request.query, doseq=True)
        self.asked.append((f"{request.path}?{query}" if query else request.path, sent))
        if request.path != PAGE and self._token and sent != f"Bearer {self._token}":
            raise Refusal(401, "this endpoint needs its token")
        if request.path == "/status.json":
            told = {**self.status, "url": self.url, "now": time.time()}
            return Response(body=json.dumps(told).encode(), kind="application/json")
        return self._answers.answer(request)


@asynccontextmanager
async def serving(site: WatchedSite) -> AsyncIterator[WatchedSite]:
    server = HttpServer(site.answer, connections=64, stall=30.0, context=None)
    listener = socket.create_server(("127.0.0.1", 0))
    site.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    acceptor = Acceptor(listener, server.serve)
    try:
        yield site
    finally:
        acceptor.close()
