"""From one kind of checkpoint to another, without running anything that it holds."""

from __future__ import annotations

import os
from contextlib import closing
from typing import Any, Literal

import torch

from torchrelay.checkpointer import Checkpointer
from torchrelay.dropin.stock_dcp import (
    read_stock,
    read_torch_save,
    write_stock,
    write_torch_save,
)
from torchrelay.errors import UsageError
from torchrelay.inspection.facts import nbytes_of
from torchrelay.inspection.file_kinds import kind_of
from torchrelay.inspection.safetensors_file import SafetensorsSource
from torchrelay.inspection.slabs import slabs
from torchrelay.memory.free import take_free
from torchrelay.options import CheckpointerOptions
from torchrelay.progress import ProgressCallback
from torchrelay.state.tensors import dtype_named
from torchrelay.stores.locate import directory_at, split_step

KINDS = ("torchrelay", "dcp", "torch")


def convert(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    to: Literal["torchrelay", "dcp", "torch"] = "torchrelay",
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
    with Checkpointer(target, no_dist=True) as places:
        return places.save(written or 0, state, progress=progress).step


def loaded(
    source: str | os.PathLike[str], step: int | None, progress: ProgressCallback | None = None
) -> tuple[Any, int | None]:
    """The state of a checkpoint of any kind, and its step where the kind has one."""
    kind = kind_of(source)
    if kind is None:
        raise UsageError(f"{os.fspath(source)}: no checkpoint there: name another path")
    if kind == "torchrelay":
        place, named = split_step(source)
        with Checkpointer(
            place, no_dist=True, options=CheckpointerOptions(read_only=True)
        ) as places:
            found = places.load(step=step if named is None else named, progress=progress)
        return found.state, found.step
    if kind == "safetensors":
        with closing(SafetensorsSource(directory_at(source))) as file:
            return _tensors(file), None
    return (read_stock(source) if kind == "dcp" else read_torch_save(source)), None


def _tensors(source: SafetensorsSource) -> dict[str, torch.Tensor]:
    """The tensors of a file by name, whole, on the CPU."""
    found = {}
    for tensor in source.contents.tensors:
        take_free(nbytes_of(tensor), tensor.name)
        whole = torch.empty(nbytes_of(tensor), dtype=torch.uint8, device="cpu")
        at = 0
        for slab in slabs(source, tensor):
            whole[at : at + slab.size] = torch.from_numpy(slab)
            at += slab.size
        found[tensor.name] = whole.view(dtype_named(tensor.dtype)).view(tensor.shape)
    return found
