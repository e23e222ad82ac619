"""From what a user types as SOURCE to a state that commands look at."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING

import typer

from torchrelay.deadlines import Deadline
from torchrelay.errors import StepNotFoundError, UsageError
from torchrelay.files import exists
from torchrelay.inspection.file_kinds import Kind, is_torch_save, kind_of
from torchrelay.stores.locate import directory_at, open_store, scheme_of, split_step

if TYPE_CHECKING:
    from torchrelay.inspection.opened_state import OpenedState
    from torchrelay.inspection.step_source import StepSource
    from torchrelay.sources.source import Source

HELP = (
    "A place with steps, a step (runs/a/step-100), an endpoint's URL, a .safetensors file or a "
    "DCP directory."
)
SECONDS = 3600.0  # that a step may be looked at
SOURCE = typer.Argument(help=HELP)
FILES = (  # of other programs, in a folder: how they end, what they are, what looks at one
    ("*.safetensors", "safetensors", "inspect {}"),
    ("*.bin", "torch.save", "convert {} PLACE"),
    ("*.pt", "torch.save", "convert {} PLACE"),
    ("*.pth", "torch.save", "convert {} PLACE"),
)
STEP = typer.Option(None, "--step", help="Step to use (default: the newest).")


@contextmanager
def opened_source(name: str, step: int | None = None) -> Iterator[OpenedState]:
    """The state that a name stands for, until the block ends."""
    with closing(_open(name, step)) as source:
        yield source


def _open(name: str, step: int | None) -> OpenedState:
    if is_url(name):
        from torchrelay.cli.access import endpoints

        return _opened(endpoints(name), step)
    kind = state_kind(name)
    if kind == "torchrelay":
        return _open_step(name, step)
    path = directory_at(name)
    if kind == "torch" and is_torch_save(path):
        raise UsageError(
            f"{name} is a torch.save file, which can only be read as a whole: convert it first, by "
            f"torchrelay convert {name} PLACE"
        )
    if step is not None:
        raise StepNotFoundError(f"{name} is one state without a step: leave out --step", step=step)
    if kind == "dcp":
        from torchrelay.dropin.dcp_directory import StockDirectory

        return StockDirectory(path)
    from torchrelay.inspection.safetensors_file import SafetensorsSource

    return SafetensorsSource(path)


def state_kind(name: str) -> Kind:
    """The kind of checkpoint that a name is of; `UsageError` unless something has this name."""
    kind = kind_of(name)
    if kind is None:
        raise UsageError(f"{name} has no state: give {HELP[0].lower()}{HELP[1:-1]}")
    return kind


def at_newest(name: str) -> str:
    """A place by the name of its newest step, which may be damaged; other sources as they are."""
    if is_url(name) or kind_of(name) != "torchrelay" or split_step(name)[1] is not None:
        return name
    store = open_store(name)
    steps = store.steps()
    if not steps:
        raise StepNotFoundError(f"no step in {store.url}{instead(name)}")
    return f"{name.rstrip('/')}/step-{steps[-1]}"


def instead(name: str) -> str:
    """Explains a place without steps and names the command for it, to end a message with."""
    above, step = split_step(name)
    local = scheme_of(name)[0] == "file"
    if local and not exists(directory_at(name)):
        return ": there is no such directory"
    if step is not None:
        return f": it is one itself, of {above}"
    if kind_of(name) == "dcp":
        return f": it is a DCP directory, see torchrelay inspect {name}"
    for pattern, kind, command in FILES if local else ():
        if found := sorted(directory_at(name).glob(pattern)):
            return f": it has {kind} files, see torchrelay {command.format(found[0])}"
    return ""


def _open_step(name: str, step: int | None) -> OpenedState:
    from torchrelay.sources.places import StoreSource

    place, named = split_step(name)
    if None not in (named, step) and named != step:
        raise UsageError(f"{name} is step {named}: leave out --step, or name the place above it")
    store = open_store(place)
    source = StoreSource(store)
    wanted = named if step is None else step
    try:
        found = _opened(source, wanted)
    except StepNotFoundError as fault:
        if steps := store.steps():
            fault.message += f"; it has {', '.join(map(str, steps[-8:]))}"
        elif command := instead(name):
            fault.message = f"no step in {store.url}{command}"
        raise
    found.name = f"{source.name}/step-{found.contents.step}"
    return found


def _opened(source: Source, step: int | None) -> StepSource:
    """A step of a source, or its newest; one that is replaced meanwhile is looked for again."""
    from torchrelay.inspection.step_source import StepSource

    deadline = Deadline(SECONDS)
    while True:
        steps = [step] if step is not None else sorted(source.steps(deadline))
        if not steps:
            raise StepNotFoundError(f"no step in {source.name}")
        try:
            return StepSource(source.name, source.open(steps[-1], deadline), source.end)
        except StepNotFoundError:
            if step is not None or sorted(source.steps(deadline)) == steps:
                raise


def is_url(name: str) -> bool:
    """Whether a name is of an endpoint."""
    return name.startswith(("http://", "https://"))
