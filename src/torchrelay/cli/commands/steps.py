"""Commands on the steps of a directory or bucket: ls, rollback, rm."""

from __future__ import annotations

from contextlib import closing
from time import time as now
from typing import TYPE_CHECKING, Any

import typer

import torchrelay as tr
from torchrelay.cli.commands.contents import verified
from torchrelay.cli.output import (
    JSON,
    count,
    fail,
    in_words,
    print_columns,
    print_json,
    size,
    wrong,
)
from torchrelay.cli.sources import instead, is_url
from torchrelay.errors import RelayError, UsageError
from torchrelay.inspection.file_kinds import kind_of

if TYPE_CHECKING:
    from torchrelay.stores.reading.chunks import VerifiedFiles
    from torchrelay.stores.store import Store

PLACE = typer.Argument(help="A directory, or the URL of a bucket (s3://, gs://, az://).")
STEPS = typer.Argument(help="The steps to remove.")
COLUMNS = ["step", "age", "size", "files", "ranks", "torch", "state"]
YES = typer.Option(False, "--yes", "-y", help="Do not ask for confirmation.")


def store_at(place: str) -> Store:
    """The steps of a directory or bucket, looked at without importing torch."""
    from torchrelay.stores.locate import open_store

    _check_place(place)
    return open_store(place)


def opened(place: str) -> tr.Checkpointer:
    """A directory or bucket that is only looked at, by this process alone."""
    _check_place(place)
    return tr.Checkpointer(
        place, no_dist=True, options=tr.options.CheckpointerOptions(read_only=True)
    )


def _check_place(place: str) -> None:
    if is_url(place):
        raise UsageError(f"{place} is an endpoint: inspect it, watch it or pull from it")
    if kind_of(place) in ("torch", "safetensors"):
        raise UsageError(
            f"{place} is a file, and steps are kept in a directory: see torchrelay inspect {place}"
        )


def ls(
    place: str = PLACE,
    verify: bool = typer.Option(False, "--verify", help="Read every byte and check every digest."),
    as_json: bool = JSON,
) -> None:
    """List the steps of a directory or bucket. Exit status 1 if one is damaged, or none exists.

    A step is listed as whole if its commit record is valid and its files have the recorded sizes.
    With --verify it is listed as verified if every digest matches.
    """
    there = store_at(place)
    steps = [listed(there, step) for step in there.steps()]
    if verify:
        known: VerifiedFiles = set()
        for facts in steps:
            if not in_words(facts):
                facts |= verified(place, facts["step"], known=known)
                facts["verified"] = not in_words(facts)
    if as_json:
        print_json(steps)
    elif steps:
        rows = [COLUMNS, *map(_row, steps)]
        for name, shown in (("reused", _reused), ("metrics", _metrics)):
            if any(facts.get(name) for facts in steps):
                column = [name, *map(shown, steps)]
                rows = [[*row, more] for row, more in zip(rows, column, strict=True)]
        print_columns(rows)
        total = sum(facts.get("bytes", 0) for facts in steps)
        print(f"{count(len(steps), 'step')}, {size(total)}")
    if not steps:
        fail(f"no steps in {there.url}{instead(place)}")
    if any(map(in_words, steps)):
        raise typer.Exit(1)


def listed(there: Store, step: int) -> dict[str, Any]:
    """The facts about a step that need no read of its bytes."""
    from torchrelay.stores.opening import open_step

    try:
        with closing(open_step(there, step)) as opened:
            record, holds = opened.record, opened.holds()
    except (RelayError, OSError) as fault:
        return {"step": step, "verified": False, **wrong(fault)}
    return {
        "step": step,
        "time": record.saved.time,
        "bytes": record.volume_bytes,
        "files": len(record.volumes),
        "ranks": len(record.ranks),
        "torch": record.saved.torch,
        "reused": record.saved.reused,
        "metrics": record.saved.metrics,
        "mark": None if record.mark is None else str(record.mark),
        "verified": False,
        "damage": None if holds else "a file is missing or has another size",
        "unread": None,
    }


def _row(facts: dict[str, Any]) -> list[str]:
    shown = [""] * 5
    if "time" in facts:
        numbers = [facts["files"], facts["ranks"], facts["torch"]]
        shown = [age(facts["time"]), size(facts["bytes"]), *map(str, numbers)]
    state = in_words(facts) or ("verified" if facts["verified"] else "whole")
    marked = f", {facts['mark']}" if facts.get("mark") else ""
    return [str(facts["step"]), *shown, state + marked]


def _reused(facts: dict[str, Any]) -> str:
    return size(facts["reused"]) if facts.get("reused") else ""


def _metrics(facts: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value:.6g}" for name, value in facts.get("metrics", {}).items())


def age(time: str) -> str:
    """How long ago a time of a commit record was; the text itself, if it is not a time."""
    from torchrelay.steps import epoch_seconds

    then = epoch_seconds(time)
    if then is None:
        return time
    seconds = now() - then
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(0, seconds):.0f} s"


def rollback(
    place: str = PLACE, step: int = typer.Argument(help="Step to resume from."), yes: bool = YES
) -> None:
    """Delete every step above one, so that the next start resumes from that one."""
    with opened(place) as there:
        _check_present(there, place, [step])
        newer = [found for found in there.steps() if found > step]
    if not newer:
        print(f"nothing to delete: {step} is the newest step")
        return
    _ask(f"Delete {_named(newer)} of {place}?", yes)
    with tr.Checkpointer(place, no_dist=True) as there:
        print(f"deleted {_named(there.rollback(step))}")


def rm(place: str = PLACE, steps: list[int] = STEPS, yes: bool = YES) -> None:
    """Remove steps. Nothing is removed if one of them does not exist."""
    with opened(place) as there:
        _check_present(there, place, steps)
    chosen = list(dict.fromkeys(steps))
    _ask(f"Remove {_named(chosen)} of {place}?", yes)
    with tr.Checkpointer(place, no_dist=True) as there:
        for step in chosen:
            there.delete(step)
    print(f"removed {_named(chosen)}")


def _named(steps: list[int]) -> str:
    return f"step{'' if len(steps) == 1 else 's'} {', '.join(map(str, steps))}"


def _ask(question: str, yes: bool) -> None:
    if not yes:
        typer.confirm(question, abort=True)


def _check_present(there: tr.Checkpointer, place: str, steps: list[int]) -> None:
    present = there.steps()
    absent = ", ".join(map(str, sorted(set(steps) - set(present))))
    if absent:
        shown = f"; existing: {', '.join(map(str, present))}" if present else instead(place)
        fail(f"step {absent} does not exist in {place}{shown}")
