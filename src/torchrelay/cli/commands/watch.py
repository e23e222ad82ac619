"""The command that follows the steps and readers of a directory or an endpoint: watch."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from itertools import chain
from typing import TYPE_CHECKING, Any, NoReturn

import typer

from torchrelay.cli.access import chosen_access
from torchrelay.cli.output import end_with_status, fail, in_words, plain, size
from torchrelay.errors import CheckpointError

if TYPE_CHECKING:
    from torchrelay.cli.commands.watched import WatchedPlaces

INTERVAL = 2.0
WHERE = typer.Argument(help="Directories or buckets, or the URL of an endpoint.")
PAGE_ADDRESS = typer.Option("127.0.0.1:0", "--address", help="HOST:PORT of the page.")


def watch(
    where: list[str] = WHERE,
    page: bool = typer.Option(False, "--page", help="Serve a status page until Ctrl-C."),
    address: str = PAGE_ADDRESS,
    until: int | None = typer.Option(
        None, "--until", help="Exit with status 0 once this step or a later one exists."
    ),
    timeout: float | None = typer.Option(
        None, "--timeout", help="Exit after this many seconds; with --until, with status 1."
    ),
    interval: float = typer.Option(
        INTERVAL, "--interval", min=0.05, help="Seconds between checks."
    ),
    as_json: bool = typer.Option(False, "--json", help="Print a line of JSON for each event."),
) -> None:
    """Tell of steps and transfers as they come and go, from now on. Ctrl-C ends it."""
    from torchrelay.cli.commands.watched import WatchedPlaces

    watched = WatchedPlaces(where)
    if page:
        end_with_status()
        _serve_page(watched, address)
    begun = time.monotonic()

    def left() -> float:
        return interval if timeout is None else begun + timeout - time.monotonic()

    for event in _events(watched.status, left, interval):
        print(json.dumps(event) if as_json else plain(_line(event)), flush=True)
        if until is not None and event["event"] == "step" and event["step"] >= until:
            raise typer.Exit(1 if in_words(event) else 0)
    if until is not None:
        why = "is the job alive?"
        fail(f"no step {until} in {watched.name} after {timeout:g} s; {why}")


def _serve_page(watched: WatchedPlaces, address: str) -> NoReturn:
    from torchrelay.endpoint.address import Address
    from torchrelay.endpoint.page.site import PageSite

    there, token = Address.parse(address), chosen_access().secret()
    there.check(token)
    try:
        site = PageSite(watched, watched.status, there, token)
    except OSError as fault:
        raise CheckpointError(f"cannot listen at {address}: {fault.strerror}") from fault
    print(f"the page is at {site.url}", flush=True)
    while True:
        time.sleep(INTERVAL)


def _events(
    look: Callable[[], dict[str, Any]], left: Callable[[], float], interval: float
) -> Iterator[dict[str, Any]]:
    """Changes, look after look, as long as there is time left."""
    steps: dict[int, dict[str, Any]] = {}
    ended: set[tuple[str, float]] = set()
    running: set[str] = set()
    while True:
        status = look()
        listed = [*(disk["steps"] for disk in status.get("disk", ())), status.get("steps", ())]
        found = {one["step"]: one for one in chain(*listed)}
        for step, facts in sorted(found.items()):
            if step not in steps or _was_replaced(steps[step], facts):
                yield {"event": "step", **facts}
        for step in sorted(steps.keys() - found.keys()):
            yield {"event": "gone", "step": step}
        steps = found
        for one in status["transfers"]:
            if one["reader"] not in running:
                yield {"event": "reading", **one}
        running = {one["reader"] for one in status["transfers"]}
        for one in status["finished"]:
            key = one["reader"], one["ended"]
            if key not in ended:
                ended.add(key)
                yield {"event": one["outcome"], **one}
        if left() <= 0:
            return
        time.sleep(min(interval, max(0.0, left())))


def _was_replaced(before: dict[str, Any], now: dict[str, Any]) -> bool:
    """Whether a step was saved or published again. One that leaves an endpoint, and is still in a
    directory, was not."""
    known = [name for name in ("time", "snapshot") if None not in (before.get(name), now.get(name))]
    return any(before[name] != now[name] for name in known)


def _line(event: dict[str, Any]) -> str:
    kind, what = event["event"], f"step {event['step']}"
    if kind == "gone":
        return f"{what} is gone"
    if kind == "step":
        if message := in_words(event):
            return f"{what} is {message}"
        ranks = event.get("ranks", event.get("world", 1))
        return f"{what}, {size(event['bytes'])} of {ranks} rank{'s' if ranks > 1 else ''}"
    if kind == "reading":
        return f"{event['address']} reads {what}"
    done = f"{event['address']} has read {what}, {size(event['bytes'])}"
    return done if kind == "done" else f"{event['address']} failed at {what}: {event['reason']}"
