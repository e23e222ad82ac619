"""Commands that write another kind of file: convert, export-hf."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Literal

import typer

import torchrelay as tr
from torchrelay.cli.output import fail, one_line_errors
from torchrelay.cli.steps import PLACE, STEP, opened

FRESH = typer.Argument(help="A directory that does not exist.")


def add_to(app: typer.Typer) -> None:
    """Register the commands."""
    app.command("convert")(_convert)
    app.command("export-hf")(_export_hf)


def _convert(
    source: str = typer.Argument(help="A place with steps, a stock DCP directory, or a file."),
    target: str = typer.Argument(help="Where the other kind is written."),
    to: Literal["torchrelay", "dcp", "torch"] = typer.Option(
        "torchrelay", "--to", help="Steps of this library, a DCP directory, or a torch.save file."
    ),
    step: int | None = typer.Option(None, "--step", help="The step to read, and to write."),
) -> None:
    """Convert between this format, stock DCP directories and torch.save files."""
    from torchrelay.dropin.convert import convert

    with one_line_errors():
        try:
            written = convert(source, target, to=to, step=step)
        except tr.StepExistsError as fault:
            fail(f"step {fault.step} is in {target} already: choose another --step, or rm it first")
        except tr.StepOrderError as fault:
            fail(f"{target} has steps above {fault.step}: take a higher --step, or rollback first")
        else:
            print(f"{target}" + ("" if written is None else f" step {written}"))


def _export_hf(
    place: str = PLACE,
    target: Path = FRESH,
    step: int | None = STEP,
    under: str = typer.Option("model", "--under", help="Key of the state that has the model."),
) -> None:
    """Write a step's model as model.safetensors (with an index, if it is large).

    A checkpoint has no config.json: copy the model's own beside the files.
    """
    with one_line_errors(), opened(place) as there:
        _check_key(there, step, under)
        for name in there.export_hf(target, step=step, under=under):
            print(target / name)
        if not (target / "config.json").exists():
            print(
                f"note: loaders want the model's config.json too: copy it to {target}",
                file=sys.stderr,
            )


def _check_key(there: tr.Checkpointer, step: int | None, key: str) -> None:
    found = there.latest() if step is None else step
    if found is None:
        fail(f"there is no whole step in {there.url}")
        return
    keys = [str(known) for known in getattr(there.record(found).outline(0).tree, "keys", ())]
    if key not in keys:
        fail(f"step {found} has no key {key!r}: name one with --under: {', '.join(keys)}")
