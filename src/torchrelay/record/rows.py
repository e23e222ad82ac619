"""The leaves of a rank in a record, as a sequence of leaf records made when asked for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from torchrelay.geometry.boxes import Box, Numbers
from torchrelay.geometry.strides import contiguous_strides
from torchrelay.record import manifest as m
from torchrelay.record.schema import (
    BoxSharding,
    LeafKind,
    RankDifference,
    Record,
    Sharding,
    shape_numbers,
)

Marks = np.ndarray[Any, np.dtype[np.bool_]]


class LeafRows(Sequence[m.Leaf]):
    """Leaves of a rank in a valid record. Tensors are rows: `leaves` has the leaf that each is,
    `kinds` its kind, `images` and `offsets` where it lies. `others` has the rest, by leaf.

    A record that is made of a row has the strides of its image in memory, unless it is `at_rest`:
    images of a step are row-major, and their strides a hint. There a distributed tensor is whole.
    """

    def __init__(self, record: Record, rank: int = 0, *, at_rest: bool = False) -> None:
        found = record.outlines[record.ranks[rank]]
        self.record = record
        self._at_rest = at_rest
        self.tree = found.tree
        self._count = found.leaves
        self.leaves: Numbers = found.row_leaves
        self.kinds: Numbers = found.row_kinds
        self.images: Numbers = found.row_images
        self.offsets: Numbers = found.row_offsets
        pairs = zip(found.other_leaves.tolist(), found.others, strict=True)
        self.others: dict[int, m.Leaf] = dict(pairs)
        if rank in record.difference_of:
            self._differ(record.difference_of[rank])

    def _differ(self, own: RankDifference) -> None:
        if own.images:
            rows, images = np.array(own.images, np.int64).T
            self.images = self.images.copy()
            self.images[rows] = images
        self.others.update(own.leaves)
        replaced = np.isin(self.leaves, np.array([leaf for leaf, _ in own.leaves], np.int64))
        if replaced.any():
            columns = (self.leaves, self.kinds, self.images, self.offsets)
            found = [column[~replaced] for column in columns]
            self.leaves, self.kinds, self.images, self.offsets = found

    def __len__(self) -> int:
        return self._count

    @cached_property
    def is_image(self) -> Marks:
        """Whether each row is all of its image; else it is a view of one of bytes."""
        shapes, image_shapes = shape_numbers(self.record.kinds, self.record.image_kinds)
        strided = np.array(
            [kind.strides is not None and kind.sharding < 0 for kind in self.record.kinds], bool
        )
        same = shapes[self.kinds] == image_shapes[self.record.image_kind[self.images]]
        found: Marks = same & ~strided[self.kinds] & (self.offsets == 0)
        return found

    @cached_property
    def is_sharded(self) -> Marks:
        """Whether each row is a distributed tensor."""
        return np.array([kind.sharding >= 0 for kind in self.record.kinds], bool)[self.kinds]

    def __getitem__(self, index: Any) -> Any:
        found = range(len(self))[index]
        if isinstance(found, range):
            return [self[n] for n in found]
        if found in self.others:
            return self.others[found]
        return self.row(int(np.searchsorted(self.leaves, found)))

    def __iter__(self) -> Iterator[m.Leaf]:
        found: list[Any] = [None] * len(self)
        for index, leaf in self.others.items():
            found[index] = leaf
        for row, index in enumerate(self.leaves.tolist()):
            found[index] = self.row(row)
        return iter(found)

    def row(self, row: int) -> m.Leaf:
        record = self.record
        kind = record.kinds[int(self.kinds[row])]
        image, offset = int(self.images[row]), int(self.offsets[row])
        there = record.image_kinds[int(record.image_kind[image])]
        flags, device = kind.flags, record.devices[int(record.image_devices[image])]
        # At rest an image has elements, in one box that is all of it, or in several.
        box = there.boxes[0] if there.count == 1 else ((0,) * len(there.shape), there.shape)
        if 0 in box[1]:
            image = -1
            flags |= 0 if device == "cpu" else m.ON_DEVICE
        if kind.sharding >= 0:
            part = m.TensorLeaf(kind.dtype, box[1], there.strides, image, 0, flags & m.ON_DEVICE)
            return distributed_leaf(part, box, kind, record.shardings[kind.sharding], record.meshes)
        strides = kind.strides
        if strides is None and not offset and there.shape == kind.shape and not self._at_rest:
            strides = there.strides
        return m.TensorLeaf(kind.dtype, kind.shape, strides, image, offset, flags)


def distributed_leaf(
    part: m.TensorLeaf, box: Box, kind: LeafKind, how: Sharding, meshes: Sequence[m.Mesh]
) -> m.Leaf:
    """The record of a distributed tensor. A rank has one part of it: this box."""
    if isinstance(how, BoxSharding):
        own = (one for one in how.boxes if (one.offsets, one.sizes) == box)
        mine = next(own, m.Box(*box, None))
        facts = (kind.shape, kind.dtype, kind.flags, how.pinned, how.checkpointable)
        return m.ShardedLeaf((part,), (mine,), how.boxes, *facts)
    return m.DTensorLeaf(
        part,
        meshes[how.mesh],
        how.placements,
        kind.shape,
        contiguous_strides(kind.shape) if kind.strides is None else kind.strides,
        how.coordinate,
        kind.flags,
    )
