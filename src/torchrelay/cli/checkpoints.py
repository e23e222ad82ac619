"""Commands on checkpoints: ls, inspect, verify, convert, export-hf."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn
from rich.table import Table

from torchrelay.checkpointer import Checkpointer
from torchrelay.dropin.convert import KINDS, convert
from torchrelay.errors import RelayError

PLACE = typer.Argument(help="A directory, or a bucket's URL (s3://, gs://, az://).")
FRESH = typer.Argument(help="A directory that does not exist.")
STEP = typer.Option(None, "--step", help="The newest, if it is left out.")


def add_to(app: typer.Typer) -> None:
    """Register the commands."""
    app.command("ls")(_ls)
    app.command("inspect")(_inspect)
    app.command("verify")(_verify)
    app.command("convert")(_convert)
    app.command("export-hf")(_export_hf)


@contextmanager
def _errors() -> Iterator[None]:
    """An error of ours is one line and exit status 1, not a traceback."""
    try:
        yield
    except RelayError as fault:
        print(f"error: {fault}", file=sys.stderr)
        raise typer.Exit(1) from None


@contextmanager
def _progress(what: str) -> Iterator[Callable[[int, int], None]]:
    columns = (TextColumn(what), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(what, total=None)

        def show(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total)

        yield show


def _ls(place: str = PLACE) -> None:
    """List the steps of a place, and whether their commit records and file sizes hold."""
    with _errors(), Checkpointer(place, read_only=True) as held:
        table = Table("step", "time", "bytes", "files", "ranks", "torch", "holds")
        for step in held.steps():
            try:
                record = held.record(step)
            except RelayError as fault:
                table.add_row(str(step), "", "", "", "", "", f"no: {fault}")
                continue
            holds = "yes" if held.holds(step) else "no: a file is missing or of another size"
            facts = (record.time, f"{record.nbytes:,}", len(record.files), record.world)
            table.add_row(str(step), *map(str, facts), record.torch, holds)
        Console().print(table)


def _inspect(place: str = PLACE, step: int | None = STEP) -> None:
    """Show the tensors of a step."""
    with _errors(), Checkpointer(place, read_only=True) as held:
        found = step if step is not None else held.latest()
        if found is None:
            print(f"error: no step in {place}", file=sys.stderr)
            raise typer.Exit(1)
        record = held.record(found)
        table = Table("tensor", "dtype", "shape", "shards", "files")
        for tensor in record.tensors:
            files = {record.files[shard.file].name for shard in tensor.shards}
            shape = "x".join(map(str, tensor.shape)) or "()"
            table.add_row(
                tensor.name, tensor.dtype, shape, str(len(tensor.shards)), ", ".join(sorted(files))
            )
        Console().print(table)


def _verify(place: str = PLACE, step: int | None = STEP) -> None:
    """Read every byte of a step and check every digest."""
    with _errors(), Checkpointer(place, read_only=True) as held, _progress("verifying") as show:
        print(f"step {held.verify(step, progress=show)} holds")


def _convert(
    source: str = typer.Argument(help="A place with steps, a stock DCP directory, or a file."),
    target: str = typer.Argument(help="Where the other kind is written; must not exist yet."),
    to: str = typer.Option("torchrelay", "--to", help=f"One of {', '.join(KINDS)}."),
    step: int | None = typer.Option(None, "--step", help="The step to read, and to write."),
) -> None:
    """Convert between this format, stock DCP directories and torch.save files."""
    with _errors():
        written = convert(source, target, to=to, step=step)  # type: ignore[arg-type]
        print(f"{target}" + ("" if written is None else f" step {written}"))


def _export_hf(
    place: str = PLACE,
    target: Path = FRESH,
    step: int | None = STEP,
    under: str = typer.Option("model", "--under", help="Key of the state that has the model."),
) -> None:
    """Write a step's model as model.safetensors (with an index, if it is large)."""
    with _errors(), Checkpointer(place, read_only=True) as held:
        for name in held.export_hf(target, step=step, under=under):
            print(target / name)
