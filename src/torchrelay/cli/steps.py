"""Commands on the steps of a place: ls, inspect, verify, rollback, rm."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import typer

import torchrelay as tr
from torchrelay.cli.output import (
    fail,
    one_line_errors,
    print_json,
    print_table,
    progress_bar,
    size,
)

if TYPE_CHECKING:
    from torchrelay.stores.records import Checkpoint

PLACE = typer.Argument(help="A directory, or a bucket's URL (s3://, gs://, az://).")
STEP = typer.Option(None, "--step", help="The newest, if it is left out.")
STEPS = typer.Argument(None, help="The steps to remove.")
JSON = typer.Option(False, "--json", help="Print JSON.")


def add_to(app: typer.Typer) -> None:
    """Register the commands."""
    app.command("ls")(_ls)
    app.command("inspect")(_inspect)
    app.command("verify")(_verify)
    app.command("rollback")(_rollback)
    app.command("rm")(_rm)


def opened(place: str) -> tr.Checkpointer:
    """A place as this process alone looks at it, without a trace."""
    return tr.Checkpointer(place, group=False, read_only=True)


def _ls(place: str = PLACE, as_json: bool = JSON) -> None:
    """List the steps of a place. Exit status 1 if one is damaged, or if there is none.

    A step is listed as whole if its commit record is valid and its files have the sizes that the
    record says; `verify` reads the bytes too.
    """
    with one_line_errors(), opened(place) as there:
        steps = [_listed(there, step) for step in there.steps()]
        if as_json:
            print_json(steps)
        elif steps:
            print_table(
                ["step", "time", "size", "files", "ranks", "torch", "state"],
                [_row(facts) for facts in steps],
            )
            total = sum(facts.get("bytes", 0) for facts in steps)
            aside = len(there.aside())
            note = f"; {aside} set aside by a rollback" if aside else ""
            print(f"{len(steps)} steps, {size(total)}{note}")
        if not steps:
            fail(f"there is no step in {there.url}")
        if any(facts["damage"] for facts in steps):
            raise typer.Exit(1)


def _listed(there: tr.Checkpointer, step: int) -> dict[str, Any]:
    try:
        record = there.record(step)
    except tr.RelayError as fault:
        return {"step": step, "damage": str(fault)}
    damage = None if there.holds(step) else "a file is missing or has another size"
    return {
        "step": step,
        "time": record.time,
        "bytes": record.nbytes,
        "files": len(record.files),
        "ranks": record.world,
        "torch": record.torch,
        "damage": damage,
    }


def _row(facts: dict[str, Any]) -> list[object]:
    state = f"damaged: {facts['damage']}" if facts["damage"] else "whole"
    if "time" not in facts:
        return [facts["step"], "", "", "", "", "", state]
    shown = [facts["time"], size(facts["bytes"]), facts["files"], facts["ranks"], facts["torch"]]
    return [facts["step"], *shown, state]


def _inspect(place: str = PLACE, step: int | None = STEP, as_json: bool = JSON) -> None:
    """Show the tensors of a step with their sizes, shards and files, and the totals."""
    with one_line_errors(), opened(place) as there:
        found = step if step is not None else there.latest()
        if found is None:
            fail(f"there is no whole step in {there.url}")
            return
        record = there.record(found)
        tensors = _tensors(record)
        total = sum(tensor["bytes"] for tensor in tensors)
        if as_json:
            print_json({"step": found, "bytes": total, "tensors": tensors})
            return
        print_table(
            ["tensor", "dtype", "shape", "size", "shards", "files"],
            [
                [
                    tensor["name"],
                    tensor["dtype"],
                    "x".join(map(str, tensor["shape"])) or "()",
                    size(tensor["bytes"]),
                    tensor["shards"],
                    ", ".join(tensor["files"]),
                ]
                for tensor in tensors
            ],
        )
        files = f"{len(record.files)} files of {size(record.nbytes)}"
        print(f"step {found}: {len(tensors)} tensors, {size(total)}; {files}")


def _tensors(record: Checkpoint) -> list[dict[str, Any]]:
    from torchrelay.state.tensors import dtype_named

    return [
        {
            "name": tensor.name,
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "bytes": _count(tensor.shape) * dtype_named(tensor.dtype).itemsize,
            "shards": len(tensor.shards),
            "files": sorted({record.files[shard.file].name for shard in tensor.shards}),
        }
        for tensor in record.tensors
    ]


def _count(shape: tuple[int, ...]) -> int:
    found = 1
    for length in shape:
        found *= length
    return found


def _verify(
    place: str = PLACE,
    step: int | None = STEP,
    every: bool = typer.Option(False, "--all", help="Every step of the place."),
    as_json: bool = JSON,
) -> None:
    """Read every byte of a step and check every digest. Exit status 1 if one is wrong."""
    with one_line_errors(), opened(place) as there:
        if every and step is not None:
            fail("--step and --all exclude each other")
        steps: list[int | None] = [*there.steps()] if every else [step]
        if not steps:
            fail(f"there is no step in {there.url}")
        checked: list[dict[str, Any]] = []
        for wanted in steps:
            shown = "verifying" if wanted is None else f"verifying step {wanted}"
            try:
                with progress_bar(shown) as show:
                    found = there.verify(wanted, progress=show)
                checked.append({"step": found, "damage": None})
            except tr.DamagedError as fault:
                checked.append({"step": fault.step, "damage": str(fault)})
        if as_json:
            print_json(checked)
        else:
            for facts in checked:
                damage = facts["damage"]
                print(
                    f"step {facts['step']} " + (f"is damaged: {damage}" if damage else "verifies")
                )
        if any(facts["damage"] for facts in checked):
            raise typer.Exit(1)


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
