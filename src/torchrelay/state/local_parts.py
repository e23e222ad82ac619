"""Which boxes of a tensor this process has, and where."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from torchrelay.geometry.boxes import Box
from torchrelay.state import tensors as t


class LocalPart(NamedTuple):
    """A box of a whole tensor, and the strided tensor that has its elements."""

    box: Box
    tensor: torch.Tensor


class LocalBoxes:
    """The boxes of DTensors that are in this process. DTensors with one spec have the same boxes:
    torch is asked once for each spec, because its answer takes longer than all other work."""

    def __init__(self) -> None:
        self._known: dict[object, list[Box]] = {}

    def of(self, tensor: t.DTensor) -> list[Box]:
        key = type(tensor), t.dtensor_parts(tensor)[1]
        found = self._known.get(key)
        if found is None:
            found = []
            if tensor.device_mesh.get_coordinate() is not None:
                # torch's protocol for whoever saves or loads it
                chunks: Any = tensor.__create_chunk_list__()  # type: ignore[no-untyped-call]
                found = [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in chunks]
            self._known[key] = found
        return found


def local_parts(tensor: torch.Tensor, boxes: LocalBoxes | None = None) -> list[LocalPart]:
    """The parts of a tensor that are in this process: all of a plain one; of a distributed one what
    its mesh gives to this rank, which may be nothing. `boxes` has those that are known."""
    if t.is_dtensor(tensor):
        local, _ = t.dtensor_parts(tensor)
        return [LocalPart(box, local.detach()) for box in (boxes or LocalBoxes()).of(tensor)]
    if isinstance(tensor, t.ShardedTensor):
        locals_, here, _, _ = t.sharded_parts(tensor)
        return [
            LocalPart((tuple(box.offsets), tuple(box.sizes)), local.detach())
            for local, box in zip(locals_, here, strict=True)
        ]
    shape = tuple(tensor.shape)
    return [LocalPart(((0,) * len(shape), shape), tensor.detach())]


def tie_of(tensor: torch.Tensor) -> object:
    """A value that two DTensors share if they have the same values in the same memory; None for
    tensors that are never tied.

    A module gives a tied parameter as several DTensors. Where this rank has no elements of it, the
    storage tells that they are one: all ranks must find the same ties.
    """
    if not t.is_dtensor(tensor):
        return None
    local, spec = t.dtensor_parts(tensor)
    place = (local.device, local.data_ptr()) if local.numel() else t.storage_id(local)
    geometry = local.dtype, local.shape, local.stride(), local.storage_offset()
    return place, geometry, tuple(tensor.shape), spec.mesh, spec.placements


def cut(tensor: torch.Tensor, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> torch.Tensor:
    """A view of a box of a tensor."""
    if sizes != tensor.shape:
        for dim, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
            tensor = tensor.narrow(dim, offset, size)
    return tensor
