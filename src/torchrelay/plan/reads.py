"""Which boxes of recorded tensors go to which memory. Pure: nothing is read here."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import prod
from typing import NamedTuple

import torch

from torchrelay.geometry.boxes import Box, shared, within
from torchrelay.geometry.strides import contiguous_strides
from torchrelay.plan.stored import Shard, Shards, StoredTensor
from torchrelay.record.dtypes import itemsize
from torchrelay.record.manifest import TensorLeaf
from torchrelay.state import tensors as t
from torchrelay.state.local_parts import cut


class Portion(NamedTuple):
    """The box of a stored tensor that fills an image of a share. `layout` has its strides in
    memory, unless they are row-major."""

    tensor: StoredTensor
    box: Box
    layout: tuple[int, ...] | None

    @property
    def nbytes(self) -> int:
        return prod(self.box[1]) * itemsize(self.tensor.dtype)

    @property
    def shard(self) -> Shard | None:
        """The shard that is all of it, byte for byte; none where it has to be put together."""
        if self.layout is not None or not self.tensor.shards:
            return None
        found: Shard = self.tensor.shards[0]
        return found if (found.offsets, found.sizes) == self.box else None

    def over(self, storage: torch.UntypedStorage, offset: int = 0) -> torch.Tensor:
        """Its elements in the memory of an image."""
        record = TensorLeaf(self.tensor.dtype, self.box[1], None, 0)
        strides = self.layout or contiguous_strides(self.box[1])
        return t.over_storage(storage, offset, record, strides)


class BoxRead(NamedTuple):
    """A box of a stored shard, and the tensor of its shape that wants it."""

    tensor: StoredTensor
    shard: Shard
    offsets: tuple[int, ...]  # in the shard
    sizes: tuple[int, ...]
    destination: torch.Tensor


def plan_reads(stored: StoredTensor, box: Box, place: torch.Tensor) -> Iterator[BoxRead]:
    """The reads that fill `place` with a box of a stored tensor: each element of it once."""
    shards: Iterable[Shard] = stored.shards
    if isinstance(shards, Shards):  # many: most have no elements of the box
        shards = map(shards.__getitem__, shards.kind.near(box))
    for shard in shards:
        around = shard.offsets, shard.sizes
        if around == box:
            yield BoxRead(stored, shard, (0,) * len(shard.sizes), shard.sizes, place)
        elif (both := shared(around, box)) is not None:
            part = cut(place, within(both, box), both[1])
            yield BoxRead(stored, shard, within(both, around), both[1], part)
