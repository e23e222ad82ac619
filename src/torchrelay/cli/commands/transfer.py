"""Commands that give states to others and take them: serve, pull."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

import torchrelay as tr
from torchrelay.cli.access import CERTFILE, KEYFILE, chosen_access, endpoints
from torchrelay.cli.commands.contents import INCLUDE
from torchrelay.cli.commands.conversion import write_file
from torchrelay.cli.output import JSON, end_with_status, plain, print_json, progress_bar, size
from torchrelay.cli.sources import SECONDS, SOURCE, STEP, at_newest, is_url
from torchrelay.errors import UsageError
from torchrelay.inspection.file_kinds import kind_of

if TYPE_CHECKING:
    from torchrelay.endpoint.front import Endpoint

URLS = typer.Argument(help="URL of an endpoint, or of several that have the same step.")
OUT = typer.Option(
    ..., "-o", "--out", help="NAME.safetensors, or a directory or bucket for a step."
)
ADDRESS = typer.Option("127.0.0.1:0", "--address", help="HOST:PORT; port 0 takes a free one.")
FOLLOW = typer.Option(False, "--follow", help="Publish newer steps of the source as they appear.")
INTERVAL = typer.Option(2.0, "--interval", min=0.05, help="Seconds between checks for newer steps.")


def serve(
    source: str = SOURCE,
    step: int | None = STEP,
    address: str = ADDRESS,
    certfile: str | None = CERTFILE,
    keyfile: str | None = KEYFILE,
    follow: bool = FOLLOW,
    interval: float = INTERVAL,
) -> None:
    """Serve a state over HTTP until Ctrl-C; the page to watch it is at the URL that is printed.

    Other addresses than loopback need a token: --token-file, or TORCHRELAY_TOKEN. The state is
    read into memory.
    """
    place = not is_url(source) and kind_of(source) == "torchrelay"
    if follow and (step is not None or not place):
        raise UsageError("--follow is for a place with steps, without --step")
    end_with_status()
    found, number = _loaded(source, step)
    access = chosen_access(certfile=certfile, keyfile=keyfile)
    with tr.serve(found, step=number, address=address, access=access, no_dist=True) as endpoint:
        del found
        print(f"serving step {number} of {source} at {endpoint.url}", flush=True)
        while True:
            time.sleep(interval)
            if follow:
                number = _follow(endpoint, source, number)


def _follow(endpoint: Endpoint, source: str, number: int) -> int:
    """Publish a newer step of the directory, if there is one; returns the newest that was tried.
    The step that is served stays where a newer one cannot be read."""
    newer = number
    try:
        with tr.Checkpointer(
            source, no_dist=True, options=tr.options.CheckpointerOptions(read_only=True)
        ) as there:
            newer = max(number, there.latest() or 0)
        if newer > number:
            published = endpoint.publish(_loaded(source, newer)[0], step=newer)
            published.result()
            print(published.skipped or f"serving step {newer}", flush=True)
        return newer
    except tr.errors.CheckpointError as fault:
        print(plain(f"still serving what was served before: {fault}"), file=sys.stderr, flush=True)
        return newer if isinstance(fault, tr.errors.DamagedError) else number


def _loaded(source: str, step: int | None) -> tuple[Any, int]:
    """A state of any source, and its step; 0 where it has none."""
    from torchrelay.dropin.conversion import loaded

    if is_url(source):
        pulled = tr.pull(source, step=step, access=chosen_access(), no_dist=True)
        return pulled.state, pulled.step or 0
    with progress_bar("reading") as show:
        state, found = loaded(at_newest(source) if step is None else source, step, show)
    return state, found or 0


def pull(
    urls: list[str] = URLS,
    out: str = OUT,
    step: int | None = STEP,
    newer_than: int | None = typer.Option(
        None, "--newer-than", help="Wait for a step above this one."
    ),
    timeout: float = typer.Option(
        SECONDS, "--timeout", min=0.1, help="Seconds for the whole call."
    ),
    include: list[str] = INCLUDE,
    as_json: bool = JSON,
) -> None:
    """Write what endpoints serve as a safetensors file, or as a checkpoint step.

    Every byte is verified. Nothing has the name before all of it is there.
    """
    from torchrelay.deadlines import Deadline
    from torchrelay.inspection.step_source import StepSource
    from torchrelay.mirror.step_copy import copy_step
    from torchrelay.stores.locate import open_store

    as_file = out.endswith(".safetensors")
    if include and not as_file:
        raise UsageError("--include is for -o NAME.safetensors; a step is pulled whole")
    begun = time.monotonic()
    deadline = Deadline(timeout)
    there = endpoints(urls)
    reason = "it was interrupted"
    try:
        if newer_than is not None:
            step = max(there.wait(newer_than, deadline), default=-1)
            if step <= newer_than:
                text = f"no step above {newer_than} came at {there.name} in time"
                raise tr.errors.TransferTimeoutError(
                    f"{text}: give a longer --timeout", phase="wait"
                )
        opened = there.open(step, deadline)
        if as_file:
            state = StepSource(there.name, opened)
            if not opened.files.trusted:
                with progress_bar("verifying") as show:
                    state.verify(show)
            nbytes = write_file(state, include, Path(out), quiet=as_json)
        else:
            nbytes = opened.record.volume_bytes
            with progress_bar("pulling") as show:
                copy_step(opened, open_store(out), show)
        reason = ""
        opened.close()
    except tr.errors.RelayError as fault:
        reason = fault.message
        raise
    finally:
        there.end(reason, 0 if reason else nbytes)
    seconds = time.monotonic() - begun
    facts = {
        "out": out,
        "step": opened.record.step,
        "bytes": nbytes,
        "seconds": seconds,
        "route": "mapped" if there.mapped else "http",
        "sources": there.supplied,
        "failed": there.faulty,
    }
    if as_json:
        print_json(facts)
        return
    rate = size(int(nbytes / seconds))
    how = ", from memory of this host" if there.mapped else ""
    print(f"{out}: step {opened.record.step}, {size(nbytes)} at {rate}/s{how}")
    for url, why in there.faulty.items():
        print(plain(f"note: {url} was left out: {why}"))
