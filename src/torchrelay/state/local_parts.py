"""Which boxes of a tensor this process has, and where; and destinations for some boxes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensorBase
from torch.distributed._shard.sharded_tensor.shard import Shard
from torch.distributed._shard.sharding_spec.api import EnumerableShardingSpec

from torchrelay.geometry.boxes import Box, without
from torchrelay.record import manifest as m
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


class BoxesOfWhole(t.ShardedTensor):
    """A ShardedTensor without a process group: no process has the boxes that are not here."""

    # Torch's own asks its group even for its size.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]


def boxes_of_whole(parts: Sequence[tuple[Box, torch.Tensor]], shape: Sequence[int]) -> BoxesOfWhole:
    """A destination for some boxes of a tensor of this shape, by the memory that takes each."""
    boxes = [box for box, _ in parts]
    here, there = (
        [t.shard_metadata(m.Box(*box, None), owner) for box in some]
        for some, owner in (
            (boxes, "rank:0/cpu"),
            (without(((0,) * len(shape), tuple(shape)), boxes), "rank:1/cpu"),
        )
    )
    spec = EnumerableShardingSpec([*here, *there])
    how: dict[str, Any] = {"layout": torch.strided, "pin_memory": False, "requires_grad": False}
    kind = parts[0][1].dtype
    built: BoxesOfWhole = ShardedTensorBase.__new__(BoxesOfWhole, spec, *shape, dtype=kind, **how)
    built._local_shards = [Shard(x.detach(), y) for (_, x), y in zip(parts, here, strict=True)]
    return built
