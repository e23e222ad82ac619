"""Answers to what the page asks for: the page itself, and JSON about the steps that it shows.

A server admits a request by its own rules, and passes it on to here.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from torchrelay.endpoint.page import PAGE, watch_page
from torchrelay.endpoint.page.data import WatchedSteps, changes, settle, tree, values
from torchrelay.endpoint.server.http.connections import FRESH, Response
from torchrelay.endpoint.server.http.requests import Refusal, Request
from torchrelay.errors import RelayError


class PageAnswers:
    """Answers about one set of steps. One of them is worked out at a time."""

    def __init__(self, watched: WatchedSteps) -> None:
        self._watched = watched
        self._turn = threading.Lock()
        self._acts: dict[str, Callable[[Request], Any]] = {
            "/page/steps.json": lambda request: {"steps": watched.steps()},
            "/page/tree.json": lambda request: tree(watched.contents(_step(request, "step"))),
            "/page/histogram.json": self._values,
            "/page/changes.json": self._changes,
        }

    def answer(self, request: Request) -> Response:
        """The answer to a GET of one of `PATHS`, or of the page."""
        if request.path == PAGE:
            page = watch_page()
            return Response(200, page.body, page.kind, page.headers)
        try:
            with self._turn:
                found = self._acts[request.path](request)
        except KeyError as missing:
            return _refused(404, f"{missing.args[0]} is not available (any more): choose another")
        except ValueError as fault:
            return _refused(400, str(fault))
        except (RelayError, OSError) as fault:
            return _refused(503, str(fault))
        return Response.json(found)

    def _changes(self, request: Request) -> dict[str, Any]:
        steps = _step(request, "before"), _step(request, "after")
        before, after = map(self._watched.contents, steps)
        found = changes(before, after)
        # Bytes decide what digests leave open, as long as both steps can be read.
        with suppress(KeyError):
            with self._watched.source(steps[0]) as one, self._watched.source(steps[1]) as other:
                settle(found, one, other)
        return found

    def _values(self, request: Request) -> dict[str, Any]:
        with self._watched.source(_step(request, "step")) as source:
            return values(source, request.field("tensor"))


def _step(request: Request, name: str) -> int:
    if (found := request.number(name)) is None:
        raise Refusal(400, f"{name} must be a number")
    return found


def _refused(status: int, text: str) -> Response:
    return Response(status, f"{text[:500]}\n".encode(), headers=FRESH)
