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


def local_parts(tensor: torch.Tensor) -> list[LocalPart]:
    """The parts of a tensor that are in this process: all of a plain one; of a distributed one what
    its mesh gives to this rank, which may be nothing."""
    if t.is_dtensor(tensor):
        if tensor.device_mesh.get_coordinate() is None:
            return []
        local, _ = t.dtensor_parts(tensor)
        # torch's protocol for whoever saves or loads it
        chunks: Any = tensor.__create_chunk_list__()  # type: ignore[no-untyped-call]
        return [
            LocalPart((tuple(chunk.offsets), tuple(chunk.sizes)), local.detach())
            for chunk in chunks
        ]
    if isinstance(tensor, t.ShardedTensor):
        locals_, boxes, _, _ = t.sharded_parts(tensor)
        return [
            LocalPart((tuple(box.offsets), tuple(box.sizes)), local.detach())
            for local, box in zip(locals_, boxes, strict=True)
        ]
    shape = tuple(tensor.shape)
    return [LocalPart(((0,) * len(shape), shape), tensor.detach())]


def tie_of(tensor: torch.Tensor) -> object:
    """What two DTensors have in common if they are the same values in the same memory; None for
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
