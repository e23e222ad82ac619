"""Commands that write another kind of file: convert, export-hf."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import typer

import torchrelay as tr
from torchrelay.cli.commands.contents import INCLUDE, matched
from torchrelay.cli.commands.steps import PLACE, opened
from torchrelay.cli.output import count, fail, plain, progress_bar, size
from torchrelay.cli.sources import STEP, at_newest, instead, is_url, opened_source
from torchrelay.files import exists
from torchrelay.inspection.file_kinds import Kind, kind_of

if TYPE_CHECKING:
    from torchrelay.inspection.opened_state import OpenedState

SUFFIXES: dict[str, Kind] = {".safetensors": "safetensors", ".pt": "torch", ".pth": "torch"}
TO = typer.Option(
    None,
    "--to",
    help="Format to write: a torchrelay step, a DCP directory, a torch.save file or a safetensors "
    "file. The default follows TARGET's suffix (.safetensors, .pt), or is a step.",
)
FRESH = typer.Argument(help="A directory that does not exist.")


def convert(
    source: str = typer.Argument(help="A SOURCE, or a torch.save file."),
    target: str = typer.Argument(help="File or directory to write."),
    to: Kind | None = TO,
    step: int | None = typer.Option(None, "--step", help="Step to read and to write."),
    include: list[str] = INCLUDE,
) -> None:
    """Convert between steps, stock DCP directories, torch.save files and safetensors files.

    A safetensors file contains only tensors, named by their paths; --include selects some of them.
    """
    if to is None:
        to = SUFFIXES.get(Path(target).suffix, "torchrelay")
    if to == "safetensors":
        with _opened(source, step, beside=Path(target)) as state:
            with progress_bar("verifying") as show:
                state.verify(show)  # tensors are read without their digests
            write_file(state, include, Path(target))
        return
    if include:
        raise tr.errors.UsageError("--include is for --to safetensors: leave it out")
    from torchrelay.dropin.conversion import convert

    try:
        with progress_bar("converting") as show:
            # The newest step, or an error: what is damaged is not passed over for an older one.
            exact = source if step is not None else at_newest(source)
            written = convert(exact, target, to=to, step=step, progress=show)
    except tr.errors.StepExistsError as fault:
        fail(f"step {fault.step} is in {target} already: choose another --step, or rm it first")
    except tr.errors.StepOrderError as fault:
        fail(f"{target} has steps above {fault.step}: take a higher --step, or rollback first")
    else:
        print(f"{target}" + ("" if written is None else f" step {written}"))


@contextmanager
def _opened(source: str, step: int | None, beside: Path) -> Iterator[OpenedState]:
    """A source, or a torch.save file. The latter is read whole, so it becomes a step first."""
    if is_url(source) or kind_of(source) != "torch":
        with opened_source(source, step) as state:
            yield state
        return
    from torchrelay.dropin.conversion import convert

    try:
        folder = TemporaryDirectory(dir=beside.parent, prefix=f".{beside.name}.")
    except OSError as fault:
        raise tr.errors.CheckpointError(
            f"cannot be written: {fault.strerror}", file=str(beside)
        ) from fault
    with folder as place:
        convert(source, place, step=step)
        with opened_source(place) as state:
            yield state


def write_file(state: OpenedState, include: list[str], target: Path, *, quiet: bool = False) -> int:
    """Write the tensors of a state as a safetensors file, and say what is not in it; returns its
    bytes."""
    from torchrelay.inspection.safetensors_file import write_safetensors

    (chosen,) = matched(include, state)
    with progress_bar("writing") as show:
        nbytes = write_safetensors(state, chosen.tensors, target, show)
    if quiet:
        return nbytes
    print(f"{target}: {count(len(chosen.tensors), 'tensor')}, {size(nbytes)}")
    if chosen.aliases:
        tied = ", ".join(f"{alias.path} (as {alias.tensor})" for alias in chosen.aliases[:8])
        more = f" and {len(chosen.aliases) - 8} more" if len(chosen.aliases) > 8 else ""
        print(
            plain(f"note: tied tensors are written once; left out: {tied}{more}"), file=sys.stderr
        )
    if chosen.values:
        left = f"{count(len(chosen.values), 'value')} left out for being no tensor"
        print(f"note: {left}: a safetensors file has no place for that", file=sys.stderr)
    return nbytes


def export_hf(
    place: str = PLACE,
    target: Path = FRESH,
    step: int | None = STEP,
    key: str = typer.Option("model", "--key", help="Key of the model in the state."),
) -> None:
    """Write a step's model as model.safetensors (with an index, if it is large).

    A checkpoint has no config.json: copy the model's own next to the files.
    """
    with opened(place) as there:
        step = _check_key(there, place, step, key)
        for name in there.export_hf(target, step=step, key=key):
            print(target / name)
        if not exists(target / "config.json"):
            print(
                f"note: loaders want the model's config.json too: copy it to {target}",
                file=sys.stderr,
            )


def _check_key(there: tr.Checkpointer, place: str, step: int | None, key: str) -> int:
    """The step that is meant, the newest if none is named; it has the key."""
    found = max(there.steps(), default=None) if step is None else step
    if found is None:
        fail(f"no steps in {there.url}{instead(place)}")
    keys = [str(known) for known in getattr(there.record(found).outlines[0].tree, "keys", ())]
    if key not in keys:
        fail(f"step {found} has no key {key!r}: name one with --key: {', '.join(keys)}")
    return found
