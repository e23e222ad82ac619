"""Any state as one `.safetensors` file, written a slab at a time; and such states as tensors."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import torch

from torchrelay.errors import CheckpointError, UsageError
from torchrelay.inspection.facts import nbytes_of
from torchrelay.inspection.numbers import memory_of
from torchrelay.inspection.seam import OpenedState
from torchrelay.inspection.slabs import slabs
from torchrelay.plan.stored import StoredTensor
from torchrelay.progress import Progress, ProgressCallback
from torchrelay.state.tensors import dtype_named
from torchrelay.stores.local.files import atomic_file
from torchrelay.stores.shares.layout import Entry, arrange


def write_safetensors(
    source: OpenedState,
    tensors: Sequence[StoredTensor],
    target: str | os.PathLike[str],
    progress: ProgressCallback,
) -> int:
    """Write whole tensors of a state as a file, which takes its name once it is durable; returns
    its bytes. A file that has the name is replaced."""
    path = Path(target)
    entries = [
        Entry(tensor.name, tensor.dtype, tensor.shape, (0,) * len(tensor.shape), tensor.shape)
        for tensor in tensors
    ]
    if not entries:
        raise UsageError(f"{source.name} has no tensors, so there is nothing to write")
    (layout,) = arrange(entries, file_bytes=None).files
    try:
        with atomic_file(path) as file:
            file.write(layout.header)
            for start, index in layout.placed:
                assert file.tell() == start
                for slab in slabs(source, tensors[index]):
                    file.write(memory_of(slab))
                    progress(Progress(file.tell(), layout.nbytes))
    except OSError as fault:
        raise CheckpointError(f"cannot be written: {fault.strerror}", file=str(path)) from fault
    return layout.nbytes


def read_tensors(source: OpenedState) -> dict[str, torch.Tensor]:
    """The tensors of a state by name, whole, on the CPU."""
    found = {}
    for tensor in source.contents.tensors:
        whole = torch.empty(nbytes_of(tensor), dtype=torch.uint8, device="cpu")
        at = 0
        for slab in slabs(source, tensor):
            whole[at : at + slab.size] = torch.from_numpy(slab)
            at += slab.size
        found[tensor.name] = whole.view(dtype_named(tensor.dtype)).view(tensor.shape)
    return found
