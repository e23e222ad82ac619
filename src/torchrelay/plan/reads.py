"""Which boxes of recorded tensors go to which memory. Pure: nothing is read here."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch

from torchrelay.geometry.boxes import Box, shared, within
from torchrelay.plan.stored import Shard, Shards, StoredTensor
from torchrelay.state.local_parts import cut


class BoxRead(NamedTuple):
    """A box of a stored shard, and the tensor of its shape that wants it."""

    tensor: StoredTensor
    shard: Shard
    offsets: tuple[int, ...]  # in the shard
    sizes: tuple[int, ...]
    destination: torch.Tensor


def plan_reads(stored: StoredTensor, box: Box, place: torch.Tensor) -> Iterator[BoxRead]:
    """The reads that fill `place` with a box of a stored tensor: each element of it once."""
    for shard in _near(stored.shards, box):
        around = shard.offsets, shard.sizes
        if around == box:
            yield BoxRead(stored, shard, (0,) * len(shard.sizes), shard.sizes, place)
        elif (both := shared(around, box)) is not None:
            part = cut(place, within(both, box), both[1])
            yield BoxRead(stored, shard, within(both, around), both[1], part)


def _near(shards: Sequence[Shard], box: Box) -> Iterable[Shard]:
    """The shards that may have elements of a box of a destination."""
    if isinstance(shards, Shards):
        return map(shards.__getitem__, shards.kind.near(box))
    return shards
