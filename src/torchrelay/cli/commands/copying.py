"""The command that copies steps between directories and buckets: copy. No torch."""

from __future__ import annotations

import sys
import time
from contextlib import closing
from typing import TYPE_CHECKING

import typer

from torchrelay.cli.commands.steps import store_at
from torchrelay.cli.output import fail, plain, progress_bar, size
from torchrelay.cli.sources import instead
from torchrelay.errors import RelayError, StepNotFoundError, UsageError

if TYPE_CHECKING:
    from torchrelay.stores.store import Store

FROM = typer.Argument(help="A directory or bucket with steps, or one step (runs/a/step-100).")
TO = typer.Argument(help="The directory or bucket to copy to.")
STEPS = typer.Option([], "--step", help="Step to copy, as often as needed (default: the newest).")
ALL = typer.Option(False, "--all", help="Copy all steps.")


def copy(source: str = FROM, target: str = TO, step: list[int] = STEPS, all_: bool = ALL) -> None:
    """Copy steps from one directory or bucket to another; every digest is compared.

    A step appears whole or not at all. A copy that was interrupted continues, and a step that is
    there already is not copied again. Exit status 1 if a step could not be copied; the others are.
    """
    from torchrelay.stores.locate import split_step

    place, named = split_step(source)
    if named is not None and (step or all_):
        raise UsageError(f"{source} is step {named}: leave out --step and --all")
    if step and all_:
        raise UsageError("give --step or --all, not both")
    there, here = store_at(place), store_at(target)
    if there.url == here.url:
        raise UsageError(f"{target} is where the steps are: name another place")
    failed = 0
    for number in _chosen(there, source, [named] if named is not None else step, every=all_):
        try:
            print(plain(_copied(there, here, number)), flush=True)
        except RelayError as fault:
            failed += 1
            print(plain(f"error: {fault}"), file=sys.stderr, flush=True)
    if failed:
        raise typer.Exit(1)


def _chosen(there: Store, source: str, named: list[int], *, every: bool) -> list[int]:
    present = there.steps()
    if not present:
        raise StepNotFoundError(f"no step in {there.url}{instead(source)}")
    if every:
        return present
    if absent := sorted(set(named) - set(present)):
        shown = ", ".join(map(str, present))
        fail(f"no step {', '.join(map(str, absent))} in {there.url}; it has {shown}")
    return sorted(set(named)) or present[-1:]


def _copied(there: Store, here: Store, step: int) -> str:
    """Copy a step; what became of it, in a line."""
    from torchrelay.mirror.step_copy import copy_step, copy_token, presence
    from torchrelay.stores.opening import open_step

    begun = time.monotonic()
    with closing(open_step(there, step)) as opened:
        nbytes = opened.record.volume_bytes
        found = presence(opened, here)
        if found.whole:
            return f"{here.url}/step-{step}: {size(nbytes)}, there already"
        token = copy_token(opened, found.replaces)
        with progress_bar(f"copying step {step}") as show:
            copied = copy_step(opened, here, show, token=token)
    rate = size(int(copied.written / max(1e-9, time.monotonic() - begun)))
    more = f", {size(copied.left)} of it copied before" if copied.left else ""
    more += f", {size(copied.unchanged)} of it unchanged there" if copied.unchanged else ""
    return f"{here.url}/step-{step}: {size(nbytes)} at {rate}/s{more}"
