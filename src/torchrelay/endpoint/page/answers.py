"""What the page asks for, answered: the page itself, and JSON about the steps that it looks into.

Whoever has steps to show lets a request in by its own rules, and passes it on to here.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

import msgspec

from torchrelay.endpoint.page import PAGE, watch_page
from torchrelay.endpoint.page.data import WatchedSteps, changes, settle, tree, values
from torchrelay.errors import RelayError

_STEP = re.compile(r"[0-9]{1,19}")


class PageAnswer(NamedTuple):
    status: int
    body: bytes
    headers: Mapping[str, str]


class PageAnswers:
    """Answers about one set of steps. One of them is worked out at a time, on a thread."""

    def __init__(self, watched: WatchedSteps) -> None:
        self._watched = watched
        self._turn = asyncio.Semaphore(1)
        self._acts: dict[str, Callable[[Mapping[str, str]], Any]] = {
            "/page/steps.json": lambda query: {"steps": watched.steps()},
            "/page/tree.json": lambda query: tree(watched.contents(_step(query, "step"))),
            "/page/histogram.json": self._values,
            "/page/changes.json": self._changes,
        }

    async def answer(self, path: str, query: Mapping[str, str]) -> PageAnswer:
        """The answer to a GET of one of `PATHS`, or of the page."""
        if path == PAGE:
            return PageAnswer(200, *watch_page())
        try:
            async with self._turn:
                found = await asyncio.to_thread(self._acts[path], query)
        except KeyError as missing:
            return _said(404, f"{missing.args[0]} is not there (any more): choose another")
        except ValueError as fault:
            return _said(400, str(fault))
        except (RelayError, OSError) as fault:
            return _said(503, str(fault))
        headers = {"Content-Type": "application/json", "Cache-Control": "no-store"}
        return PageAnswer(200, msgspec.json.encode(found), headers)

    def _changes(self, query: Mapping[str, str]) -> dict[str, Any]:
        steps = _step(query, "before"), _step(query, "after")
        before, after = map(self._watched.contents, steps)
        found = changes(before, after)
        # Bytes settle what digests leave open, as long as both steps can be read.
        with suppress(KeyError):
            with self._watched.source(steps[0]) as one, self._watched.source(steps[1]) as other:
                settle(found, one, other)
        return found

    def _values(self, query: Mapping[str, str]) -> dict[str, Any]:
        with self._watched.source(_step(query, "step")) as source:
            return values(source, query.get("tensor", ""))


def _step(query: Mapping[str, str], name: str) -> int:
    if not _STEP.fullmatch(query.get(name, "")):
        raise ValueError(f"{name} is the number of a step")
    return int(query[name])


def _said(status: int, text: str) -> PageAnswer:
    headers = {"Content-Type": "text/plain; charset=utf-8", "Cache-Control": "no-store"}
    return PageAnswer(status, f"{text[:500]}\n".encode(), headers)
