"""A tensor read a slab at a time, whatever boxes it is cut into.

A slab fixes the first indices, takes a range of the next and all of the rest. So what a box has of
it is one run of bytes, and memory is bounded by the slab however large the tensor is.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from math import prod
from operator import mul
from typing import TYPE_CHECKING

import numpy as np

from torchrelay.geometry.boxes import Box, shared, within
from torchrelay.geometry.strides import contiguous_strides
from torchrelay.inspection.numbers import Array, memory_of
from torchrelay.record.dtypes import itemsize

if TYPE_CHECKING:
    from torchrelay.inspection.opened_state import StateReader
    from torchrelay.planning.stored import Shard, StoredTensor

SLAB_BYTES = 8 << 20


def slabs(
    source: StateReader, tensor: StoredTensor, most: int = SLAB_BYTES, start: int = 0
) -> Iterator[Array]:
    """The elements of a tensor in row-major order, as bytes from `start` on; one slab after the
    other."""
    if 0 in tensor.shape:
        return
    shape, item = tensor.shape or (1,), itemsize(tensor.dtype)
    tail = [prod(shape[dim + 1 :]) for dim in range(len(shape))]
    depth = next((dim for dim in range(len(shape)) if tail[dim] * item <= most), len(shape) - 1)
    rows = max(1, most // (tail[depth] * item))
    skip = start  # bytes of the slabs from here on
    for fixed in product(*map(range, shape[:depth])):
        for low in range(0, shape[depth], rows):
            height = min(rows, shape[depth] - low)
            nbytes = height * tail[depth] * item
            if skip < nbytes:
                offsets = (*fixed, low, *(0,) * (len(shape) - depth - 1))
                sizes = (*(1,) * depth, height, *shape[depth + 1 :])
                slab = np.empty(sizes, f"V{item}")
                for shard in tensor.shards:
                    _fill(source, slab, (offsets, sizes), shard)
                yield slab.reshape(-1).view("uint8")[skip:]
            skip = max(0, skip - nbytes)


def _fill(source: StateReader, slab: Array, place: Box, shard: Shard) -> None:
    """Read what a box has of a slab, which is `place` of the tensor, into its place there."""
    box = (shard.offsets or (0,), shard.sizes or (1,))
    both = shared(place, box)
    if both is None:
        return
    first = sum(map(mul, within(both, box), contiguous_strides(box[1])))
    part = np.empty(both[1], slab.dtype)
    source.read_into(shard.file, shard.start + first * slab.itemsize, memory_of(part))
    inside = zip(within(both, place), both[1], strict=True)
    slab[tuple([slice(at, at + size) for at, size in inside])] = part
