"""Answers to what the page asks for: the page itself, and JSON about the steps that it shows.

A server admits a request by its own rules, and passes it on to here. No torch.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict
from math import prod
from typing import Any, Protocol

from torchrelay.endpoint.page import PAGE, watch_page
from torchrelay.endpoint.server.http.connections import Response
from torchrelay.endpoint.server.http.requests import Refusal, Request
from torchrelay.errors import RelayError
from torchrelay.inspection.comparison import compare, distance, touched
from torchrelay.inspection.facts import nbytes_of
from torchrelay.inspection.opened_state import Contents, StateReader
from torchrelay.inspection.statistics import histogram, statistics
from torchrelay.planning.stored import StoredTensor
from torchrelay.shares.layout import rank_of

SETTLED_BYTES = 64 << 20  # of tensors that are compared byte by byte


class WatchedSteps(Protocol):
    """The steps that a page looks into. One that is not there raises `KeyError`."""

    def steps(self) -> list[int]:
        """Steps whose contents are known, in ascending order."""

    def contents(self, step: int) -> Contents: ...

    def source(self, step: int) -> AbstractContextManager[StateReader]:
        """The step, to be read from."""


def tree(contents: Contents) -> dict[str, Any]:
    """Every path of a state. Rows are short, because a state may have many thousands."""
    return {
        "step": contents.step,
        "ranks": contents.ranks,
        "tensors": [
            [tensor.name, tensor.dtype, tensor.shape, nbytes_of(tensor), _ranks(contents, tensor)]
            for tensor in contents.tensors
        ],
        "values": [[value.path, value.text] for value in contents.values],
        "aliases": [[alias.path, alias.tensor] for alias in contents.aliases],
    }


def _ranks(contents: Contents, tensor: StoredTensor) -> list[int]:
    found = {rank_of(contents.volumes[box.file].name) for box in tensor.shards}
    return sorted(rank for rank in found if rank is not None)


def values(source: StateReader, name: str) -> dict[str, Any]:
    """Statistics and a histogram of a tensor; `KeyError` if there is no such tensor."""
    tensor = next((one for one in source.contents.tensors if one.name == name), None)
    if tensor is None:
        raise KeyError(name)
    facts: dict[str, Any] = {
        "tensor": name,
        "dtype": tensor.dtype,
        "shape": tensor.shape,
        "elements": prod(tensor.shape),
        "counts": None,
    }
    numbers = statistics(source, tensor)
    if numbers is not None:
        low, high = float(numbers.min or 0.0), float(numbers.max or 0.0)
        counts = histogram(source, tensor, numbers)
        facts |= {**asdict(numbers), "low": low, "high": high, "counts": counts}
    return facts  # numbers that are not finite are null in JSON


def settle(found: dict[str, Any], one: StateReader, other: StateReader) -> None:
    """Compare the bytes of tensors where `changes` is not certain, up to a limit."""
    before = {tensor.name: tensor for tensor in one.contents.tensors}
    after = {tensor.name: tensor for tensor in other.contents.tensors}
    left = SETTLED_BYTES
    rows: list[list[Any]] = []
    for name, share, certain in found["touched"]:
        if not certain:
            left -= nbytes_of(before[name])
        if certain or left < 0:
            rows.append([name, share, certain])
        elif separate := distance((one, before[name]), (other, after[name])).differing:
            rows.append([name, separate / prod(before[name].shape), True])
        else:
            found["same"] += 1
    found["touched"] = rows


def changes(before: Contents, after: Contents) -> dict[str, Any]:
    """The differences between two states. `touched`: tensors that may have other bytes, which
    share at most, and whether that is certain. `same`: how many are certain to have the same."""
    found = compare(before, after)
    kept = set(found.same)
    rows = [[one.path, one.share, one.certain] for one in touched(before, after)]
    rows = [row for row in rows if row[0] in kept]
    return {
        "before": before.step,
        "after": after.step,
        "added": found.added,
        "removed": found.removed,
        "changed": [asdict(one) for one in found.changed],
        "touched": rows,
        "same": len(kept) - len(rows),
    }


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
            return watch_page()
        try:
            with self._turn:
                found = self._acts[request.path](request)
        except KeyError as missing:
            text = f"{missing.args[0]} is not available (any more): choose another"
            raise Refusal(404, text[:500]) from None
        except ValueError as fault:
            raise Refusal(400, str(fault)[:500]) from None
        except (RelayError, OSError) as fault:
            raise Refusal(503, str(fault)[:500]) from None
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
