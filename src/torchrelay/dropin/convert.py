"""From one kind of checkpoint to another, without running anything that it holds."""

from __future__ import annotations

import os
from contextlib import closing
from typing import Any, Literal

from torchrelay.checkpointer import Checkpointer
from torchrelay.dropin.stock_dcp import (
    read_stock,
    read_torch_save,
    write_stock,
    write_torch_save,
)
from torchrelay.errors import UsageError
from torchrelay.inspection.safetensors_file import read_tensors
from torchrelay.inspection.safetensors_source import SafetensorsSource
from torchrelay.progress import ProgressCallback
from torchrelay.stores.locate import OBJECTS, directory_at, scheme_of, split_step

Kind = Literal["torchrelay", "dcp", "torch"]
KINDS = ("torchrelay", "dcp", "torch")
SAFETENSORS = ".safetensors"


def kind_of(place: str | os.PathLike[str]) -> Kind | Literal["safetensors"]:
    """The kind of checkpoint at a path or URL: steps of this library, a stock DCP directory, a file
    of `torch.save` or of safetensors."""
    if scheme_of(place)[0] in OBJECTS:
        return "torchrelay"
    path = directory_at(place)
    if path.is_file():
        return "safetensors" if path.suffix == SAFETENSORS else "torch"
    if (path / ".metadata").is_file():
        return "dcp"
    if path.is_dir():
        return "torchrelay"
    raise UsageError(f"{os.fspath(place)}: no checkpoint there: name another path")


def convert(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    to: Kind = "torchrelay",
    step: int | None = None,
    progress: ProgressCallback | None = None,
) -> int | None:
    """Read a checkpoint of any kind whole, and write it as another kind.

    `step` is the one that is read from a place with several (the newest that verifies, by
    default), and the one that is written to such a place (0, by default). Returns the latter. A
    source may name its step itself (`runs/a/step-100`). A safetensors file is a flat dict.
    `progress` is called for steps of this library that are read or written.
    """
    if to not in KINDS:
        raise UsageError(f"to is one of {', '.join(KINDS)}, not {to!r}")
    state, found = loaded(source, step, progress)
    if to == "dcp":
        write_stock(target, state)
        return None
    if to == "torch":
        write_torch_save(target, state)
        return None
    written = found if step is None else step
    with Checkpointer(target, group=False) as places:
        return places.save(written or 0, state, progress=progress).step


def loaded(
    source: str | os.PathLike[str], step: int | None, progress: ProgressCallback | None = None
) -> tuple[Any, int | None]:
    """The state of a checkpoint of any kind, and its step where the kind has one."""
    kind = kind_of(source)
    if kind == "torchrelay":
        place, named = split_step(source)
        with Checkpointer(place, group=False, read_only=True) as places:
            found = places.load(step=step if named is None else named, progress=progress)
        return found.state, found.step
    if kind == "safetensors":
        with closing(SafetensorsSource(directory_at(source))) as file:
            return read_tensors(file), None
    return (read_stock(source) if kind == "dcp" else read_torch_save(source)), None
