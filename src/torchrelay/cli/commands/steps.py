"""Commands on the steps of a place: ls, rollback, rm."""

from __future__ import annotations

from time import time as now
from typing import Any

import typer

import torchrelay as tr
from torchrelay.cli.output import (
    JSON,
    fail,
    in_words,
    one_line_errors,
    print_json,
    print_table,
    progress_bar,
    size,
)
from torchrelay.cli.sources import is_url
from torchrelay.stores.locate import split_step

PLACE = typer.Argument(help="A directory, or a bucket's URL (s3://, gs://, az://).")
STEPS = typer.Argument(None, help="The steps to remove.")


def add_to(app: typer.Typer) -> None:
    """Register the commands."""
    app.command("ls")(_ls)
    app.command("rollback")(_rollback)
    app.command("rm")(_rm)


def opened(place: str) -> tr.Checkpointer:
    """A place as this process alone looks at it, without a trace."""
    if is_url(place):
        raise tr.UsageError(f"{place} is an endpoint: inspect it, watch it or pull from it")
    return tr.Checkpointer(place, group=False, read_only=True)


def _ls(
    place: str = PLACE,
    verify: bool = typer.Option(False, "--verify", help="Read every byte and check every digest."),
    as_json: bool = JSON,
) -> None:
    """List the steps of a place. Exit status 1 if one is damaged, or if there is none.

    A step is listed as whole if its commit record is valid and its files have the sizes that the
    record says; with --verify, as verified, if every byte is the one that was written.
    """
    with one_line_errors(), opened(place) as there:
        steps = [listed(there, step, verify=verify) for step in there.steps()]
        if as_json:
            print_json(steps)
        elif steps:
            print_table(
                ["step", "age", "size", "files", "ranks", "torch", "state"],
                [_row(facts) for facts in steps],
            )
            total = sum(facts.get("bytes", 0) for facts in steps)
            aside = len(there.aside())
            note = f"; {aside} set aside by a rollback" if aside else ""
            print(f"{len(steps)} step{'s' if len(steps) > 1 else ''}, {size(total)}{note}")
        if not steps:
            above, step = split_step(place)
            hint = "" if step is None else f": it is one itself, of {above}"
            fail(f"there is no step in {there.url}{hint}")
        if any(facts["damage"] for facts in steps):
            raise typer.Exit(1)


def listed(there: tr.Checkpointer, step: int, *, verify: bool = False) -> dict[str, Any]:
    """What is known of a step; `verified` is true only after every byte was read."""
    try:
        record = there.record(step)
    except tr.RelayError as fault:
        return {"step": step, "verified": False, "damage": str(fault)}
    damage = None if there.holds(step) else "a file is missing or has another size"
    if verify and damage is None:
        damage = _damage(there, step)
    return {
        "step": step,
        "time": record.time,
        "bytes": record.nbytes,
        "files": len(record.files),
        "ranks": record.world,
        "torch": record.torch,
        "verified": verify and damage is None,
        "damage": damage,
    }


def _damage(there: tr.Checkpointer, step: int) -> str | None:
    try:
        with progress_bar(f"verifying step {step}") as show:
            there.verify(step, progress=show)
    except tr.CheckpointError as fault:
        return str(fault)
    return None


def _row(facts: dict[str, Any]) -> list[object]:
    state = in_words(facts["damage"]).removeprefix("is ") if facts["damage"] else "whole"
    if facts["verified"]:
        state = "verified"
    if "time" not in facts:
        return [facts["step"], "", "", "", "", "", state]
    shown = [age(facts["time"]), size(facts["bytes"]), facts["files"], facts["ranks"]]
    return [facts["step"], *shown, facts["torch"], state]


def age(time: str) -> str:
    """How long ago a time of a commit record was; the text itself, if it is no time."""
    from torchrelay.record.checkpoint.schema import epoch_seconds

    then = epoch_seconds(time)
    if then is None:
        return time
    seconds = now() - then
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(0, seconds):.0f} s"


def _rollback(
    place: str = PLACE,
    step: int = typer.Argument(help="The step that the run shall go on from."),
) -> None:
    """Set aside every step above one, so that the next start goes on from that one.

    Their bytes stay until `rm --aside`.
    """
    with one_line_errors(), tr.Checkpointer(place, group=False) as there:
        if step not in there.steps():
            fail(f"there is no step {step} in {there.url}")
        newer = there.rollback(step)
        print(f"set aside: {', '.join(map(str, newer)) or 'nothing, it is the newest step'}")


def _rm(
    place: str = PLACE,
    steps: list[int] = STEPS,
    aside: bool = typer.Option(False, "--aside", help="Remove what rollbacks have set aside."),
    yes: bool = typer.Option(False, "--yes", "-y", help="Do not ask."),
) -> None:
    """Remove steps. Nothing is removed if one of them is not there."""
    steps = steps or []
    with one_line_errors():
        with opened(place) as there:
            present, set_aside = there.steps(), there.aside() if aside else []
        absent = sorted(set(steps) - set(present))
        if absent:
            shown = ", ".join(map(str, present)) or "none"
            fail(f"there is no step {', '.join(map(str, absent))} in {place}; there are: {shown}")
        named = ", ".join([*(f"step {step}" for step in steps), *set_aside])
        if not named:
            fail("nothing is set aside" if aside else "name a step to remove, or --aside")
        if not yes:
            typer.confirm(f"Remove {named} of {place}?", abort=True)
        with tr.Checkpointer(place, group=False) as there:
            for step in dict.fromkeys(steps):
                there.delete(step)
            for name in set_aside:
                there.remove_aside(name)
        print(f"removed {named}")
