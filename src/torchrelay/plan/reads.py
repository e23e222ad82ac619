"""Which boxes of recorded tensors go to which memory. Pure: nothing is read here."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch

from torchrelay.geometry.boxes import Box, shared, within
from torchrelay.record.stored import Shard, StoredTensor
from torchrelay.state.local_parts import cut

_MANY = 32  # shards of a tensor that are not looked at one by one


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


def _near(shards: Sequence[Shard], box: Box) -> Sequence[Shard]:
    """The shards that may have elements of a box: where there are many, most have none."""
    if len(shards) <= _MANY:
        return shards
    offsets = np.array([shard.offsets for shard in shards], np.int64)
    ends = offsets + np.array([shard.sizes for shard in shards], np.int64)
    first = np.array(box[0], np.int64)
    meet = ((offsets < first + np.array(box[1], np.int64)) & (ends > first)).all(1)
    return [shards[index] for index in np.flatnonzero(meet).tolist()]
