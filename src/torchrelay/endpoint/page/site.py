"""The page served without an endpoint, for directories and buckets."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from torchrelay.endpoint.address import Address
from torchrelay.endpoint.page import PAGE, PATHS
from torchrelay.endpoint.page.answers import PageAnswers, WatchedSteps
from torchrelay.endpoint.server.http.connections import HttpConnection, HttpServer, Response
from torchrelay.endpoint.server.http.requests import Refusal, Request
from torchrelay.endpoint.server.http.sockets import Acceptor, listen_at

CONNECTIONS = 64
STALL_SECONDS = 10.0


class PageSite:
    """Admits clients as an endpoint does, and answers what the page asks for, until `close`.
    `status` returns what `/status.json` shows. `OSError` where it cannot listen."""

    def __init__(
        self,
        watched: WatchedSteps,
        status: Callable[[], dict[str, Any]],
        address: Address,
        token: str | None,
    ) -> None:
        self._status, self._token = status, token
        self._answers = PageAnswers(watched)
        self._turn = threading.Lock()
        server = HttpServer(
            self._answer, connections=CONNECTIONS, stall=STALL_SECONDS, context=None
        )
        listener = listen_at(address.host, address.port)
        self.url = f"http://{address.shown}:{listener.getsockname()[1]}"
        self.close = Acceptor(listener, server.serve).close

    def _answer(self, request: Request, connection: HttpConnection) -> Response:
        connection.admit(request, self._token, () if self._token is None else (PAGE,))
        if request.method not in ("GET", "HEAD"):
            raise Refusal(405, "this page takes GET")
        if request.path == "/status.json":
            with self._turn:
                found = self._status()
            return Response.json(found)
        if request.path not in (PAGE, *PATHS):
            raise Refusal(404, "nothing is here")
        return self._answers.answer(request)
