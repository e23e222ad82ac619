"""Which boxes of a tensor this process has, and where."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from torchrelay.errors import UnsupportedLeafError
from torchrelay.geometry.boxes import Box
from torchrelay.geometry.shards import ShardPiece, size_of
from torchrelay.state import tensors as t
from torchrelay.state.boxed import BoxedTensor
from torchrelay.state.dtensor_pieces import pieces_of


class LocalPart(NamedTuple):
    """A box of a whole tensor, and the strided tensor that has its elements."""

    box: Box
    tensor: torch.Tensor


class LocalBoxes:
    """The boxes of DTensors that are in this process. DTensors with one spec have the same boxes,
    so they are worked out once for each spec."""

    def __init__(self) -> None:
        self._known: dict[object, list[ShardPiece]] = {}

    def of(self, tensor: t.DTensor) -> list[ShardPiece]:
        """The boxes, and where each begins in the local tensor.

        `UnsupportedLeafError` unless the local tensor has their shape, or if the placements do not
        say which boxes they are.
        """
        local, spec = t.dtensor_parts(tensor)
        found = self._known.get(spec)
        if found is None:
            found = self._known[spec] = pieces_of(tuple(tensor.shape), spec)
        if found and (size := size_of(found)) != local.shape and (local.numel() or 0 not in size):
            raise UnsupportedLeafError(
                f"the local tensor has the shape {tuple(local.shape)}, and the placements "
                f"{spec.placements} give this rank the shape {size}: redistribute it first"
            )
        return found


def local_parts(
    tensor: torch.Tensor,
    boxes: LocalBoxes | None = None,
    source: Callable[[torch.Tensor], torch.Tensor] = torch.Tensor.detach,
) -> list[LocalPart]:
    """The parts of a tensor that are in this process: all of a plain one; of a distributed one what
    its mesh gives to this rank, which may be nothing.

    `boxes` has those that are known, `source` gives the tensor that has the elements of a detached
    local one. `UnsupportedLeafError` where a local tensor does not have the shape of its boxes.
    """
    if t.is_dtensor(tensor):
        pieces = (boxes or LocalBoxes()).of(tensor)
        local = source(t.dtensor_parts(tensor)[0].detach())
        if len(pieces) == 1:
            return [LocalPart(pieces[0].box, local)]
        return [LocalPart(box, cut(local, at, box[1])) for box, at in pieces]
    if t.is_sharded(tensor):
        locals_, here, _, _ = t.sharded_parts(tensor)
        for one, box in zip(locals_, here, strict=True):
            if one.shape != box.sizes:
                raise UnsupportedLeafError(
                    f"a shard has the shape {tuple(one.shape)}, and its metadata say {box.sizes}"
                )
        return [
            LocalPart((tuple(box.offsets), tuple(box.sizes)), source(one.detach()))
            for one, box in zip(locals_, here, strict=True)
        ]
    shape = tuple(tensor.shape)
    return [LocalPart(((0,) * len(shape), shape), source(tensor.detach()))]


def tie_of(tensor: torch.Tensor) -> object:
    """A value that two DTensors, or two boxed ones, share if they have the same values in the same
    memory; None for tensors that are never tied.

    A module gives a tied parameter as several DTensors. Where this rank has no elements of it, the
    storage tells that they are one: all ranks must find the same ties.
    """
    if isinstance(tensor, BoxedTensor) and tensor.own is not None:
        addresses = [(one.data_ptr(), one.stride()) for one in tensor.locals_]
        facts = tensor.own.device, tensor.dtype, t.lazy_bits(tensor.own)
        return (facts, tuple(tensor.shape), tensor.boxes, tuple(addresses)) if addresses else None
    if not t.is_dtensor(tensor):
        return None
    local, spec = t.dtensor_parts(tensor)
    where = (local.device, local.data_ptr()) if local.numel() else t.storage_id(local)
    geometry = local.dtype, local.shape, local.stride(), local.storage_offset()
    return where, geometry, tuple(tensor.shape), spec.mesh, spec.placements


def cut(tensor: torch.Tensor, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> torch.Tensor:
    """A view of a box of a tensor."""
    if sizes != tensor.shape:
        for dim, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
            tensor = tensor.narrow(dim, offset, size)
    return tensor
