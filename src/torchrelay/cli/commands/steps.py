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
    wrong,
)
from torchrelay.cli.sources import instead, is_file, is_url

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
    if is_file(place):
        raise tr.UsageError(
            f"{place} is a file, and steps are kept in a directory: see torchrelay inspect {place}"
        )
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
            note = _set_aside(there)
            print(f"{len(steps)} step{'s' if len(steps) > 1 else ''}, {size(total)}{note}")
        if not steps:
            fail(f"there is no step in {there.url}{_set_aside(there) or instead(place)}")
        if any(map(in_words, steps)):
            raise typer.Exit(1)


def _set_aside(there: tr.Checkpointer) -> str:
    aside = len(there.aside())
    return f"; {aside} set aside by a rollback" if aside else ""


def listed(there: tr.Checkpointer, step: int, *, verify: bool = False) -> dict[str, Any]:
    """What is known of a step; `verified` is true only after every byte was read."""
    try:
        record = there.record(step)
    except tr.RelayError as fault:
        return {"step": step, "verified": False, **wrong(fault)}
    found = _checked(there, step, verify=verify)
    return {
        "step": step,
        "time": record.time,
        "bytes": record.nbytes,
        "files": len(record.files),
        "ranks": record.world,
        "torch": record.torch,
        "verified": verify and not in_words(found),
        **found,
    }


def _checked(there: tr.Checkpointer, step: int, *, verify: bool) -> dict[str, str | None]:
    try:
        if not there.holds(step):
            return {"damage": "a file is missing or has another size", "unread": None}
        if verify:
            with progress_bar(f"verifying step {step}") as show:
                there.verify(step, progress=show)
    except tr.CheckpointError as fault:
        return wrong(fault)
    return {"damage": None, "unread": None}


def _row(facts: dict[str, Any]) -> list[object]:
    state = in_words(facts) or ("verified" if facts["verified"] else "whole")
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
    with one_line_errors():
        with opened(place) as there:
            _check_present(there, place, [step])
        with tr.Checkpointer(place, group=False) as there:
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
            set_aside = there.aside() if aside else []
            _check_present(there, place, steps)
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


def _check_present(there: tr.Checkpointer, place: str, steps: list[int]) -> None:
    present = there.steps()
    absent = ", ".join(map(str, sorted(set(steps) - set(present))))
    if absent:
        shown = f"; there are: {', '.join(map(str, present))}" if present else instead(place)
        fail(f"there is no step {absent} in {place}{shown}")
