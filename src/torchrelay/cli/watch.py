"""The command that tells what becomes of a place: watch."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import typer

from torchrelay.cli.output import fail, one_line_errors, size
from torchrelay.cli.steps import PLACE, listed, opened

INTERVAL = 2.0


def add_to(app: typer.Typer) -> None:
    """Register the command."""
    app.command("watch")(_watch)


def _watch(
    place: str = PLACE,
    until: int | None = typer.Option(
        None, "--until", help="End, with status 0, once this step or a later one is there."
    ),
    timeout: float | None = typer.Option(
        None, "--timeout", help="End after so many seconds; with --until, with status 1."
    ),
    interval: float = typer.Option(INTERVAL, "--interval", min=0.05, help="Seconds between looks."),
    as_json: bool = typer.Option(False, "--json", help="Print a line of JSON for each event."),
) -> None:
    """Tell of steps as they appear and go, from now on. Ctrl-C ends it."""
    begun = time.monotonic()

    def left() -> float:
        return interval if timeout is None else begun + timeout - time.monotonic()

    with one_line_errors(), opened(place) as there:
        for event in _events(there.steps, partial(listed, there), left, interval):
            print(json.dumps(event) if as_json else _line(event), flush=True)
            if until is not None and event["event"] == "step" and event["step"] >= until:
                return
        if until is not None:
            fail(f"there is no step {until} in {there.url} after {timeout:g} s; is the job alive?")


def _events(
    steps: Callable[[], list[int]],
    look: Callable[[int], dict[str, Any]],
    left: Callable[[], float],
    interval: float,
) -> Iterator[dict[str, Any]]:
    """What has changed, look after look, as long as there is time left."""
    known: set[int] = set()
    while True:
        found = steps()
        for step in found:
            if step not in known:
                yield {"event": "step", **look(step)}
        for step in sorted(known.difference(found)):
            yield {"event": "gone", "step": step}
        known = set(found)
        if left() <= 0:
            return
        time.sleep(min(interval, left()))


def _line(event: dict[str, Any]) -> str:
    what = f"step {event['step']}"
    if event["event"] == "gone":
        return f"{what} is gone"
    if event["damage"]:
        return f"{what} is damaged: {event['damage']}"
    return f"{what}, {size(event['bytes'])} of {event['ranks']} ranks, {event['time']}"
