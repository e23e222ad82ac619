"""The states of several live ranks as one: an outlined record, and who has the bytes of its images.

A plain tensor, and every other leaf that is not distributed, is that of the first rank that has its
path. A distributed tensor is one image, whatever boxes of it the ranks have.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import NamedTuple

import msgspec
import numpy as np
from msgspec.structs import replace

from torchrelay.describing.outline import OutlineBuilder, TensorRows
from torchrelay.errors import MismatchError
from torchrelay.geometry.boxes import Box, Numbers
from torchrelay.geometry.numbered import Numbered
from torchrelay.planning.offered_leaves import NONE, whole_kinds
from torchrelay.record import manifest as m
from torchrelay.record.kinds import KindTable
from torchrelay.record.rows import LeafRows, Marks
from torchrelay.record.schema import ImageKind, MeshSharding, Record, StateOutline
from torchrelay.record.values import encode_key
from torchrelay.state.paths import LeafPaths
from torchrelay.state.tree import show

_encode = msgspec.msgpack.Encoder().encode
_DISTRIBUTED = (m.DTensorLeaf, m.ShardedLeaf)


class TreeGroup(NamedTuple):
    """Ranks with one tree, by their indices. The first of them has the leaves that are not
    distributed. In the union its leaves are counted from `shift` on, its images from `image` on."""

    members: list[int]
    shift: int
    image: int


class JoinedTrees:
    """The records of `ranks`, which are valid streams, in the order of the ranks. Ranks mostly have
    one tree; then a leaf has the same number on all of them."""

    def __init__(self, records: Mapping[int, Record]) -> None:
        self.ranks = list(records)
        self.records = list(records.values())
        self.rows = [LeafRows(record) for record in self.records]
        self.groups: list[TreeGroup] = []
        self.leaves = self.images = 0
        for index, rows in enumerate(self.rows):
            group = next((one for one in self.groups if self.first(one).tree == rows.tree), None)
            if group is None:
                self.groups.append(TreeGroup([index], self.leaves, self.images))
                self.leaves += len(rows)
                self.images += rows.record.images
            else:
                group.members.append(index)

    @property
    def first_ranks(self) -> set[int]:
        """The ranks whose values and plain tensors count."""
        return {self.ranks[group.members[0]] for group in self.groups}

    def first(self, group: TreeGroup) -> LeafRows:
        """The leaves of the first rank of a group."""
        return self.rows[group.members[0]]

    @cached_property
    def _paths(self) -> list[LeafPaths]:
        return [LeafPaths(self.first(group).tree) for group in self.groups]

    def path(self, leaf: int) -> str:
        """The path of a leaf, for a message."""
        number = max(n for n, group in enumerate(self.groups) if group.shift <= leaf)
        return show(self._paths[number][leaf - self.groups[number].shift])

    def path_key(self, group: int, leaf: int) -> bytes:
        """The path of a leaf, the same as of another tree's leaf at that path. Spelled as bytes: a
        peer's keys may hash alike."""
        steps = self._paths[group][leaf - self.groups[group].shift]
        return _encode([encode_key(key) for key in steps])


class Tensor(NamedTuple):
    """A distributed tensor: dtype and shape, and the leaf of the joined tree that it is. `partial`:
    it has values that are yet to be reduced."""

    dtype: str
    shape: tuple[int, ...]
    leaf: int
    partial: bool


class Boxes(NamedTuple):
    """What ranks have of the images of a union, in columns and in the order of those images: the
    index of the rank, the image of its record, and the kind of that."""

    images: Numbers
    ranks: Numbers
    sources: Numbers
    kinds: Numbers


class Union:
    """The records of several ranks, which are valid streams; the first rank's values count.

    `record` is outlined like that of a step, with an outline for each tree, whose leaves are
    `rows`. Its images are those of the first rank of each tree, then the distributed `tensors`.
    `boxes` has what ranks have of them, in `box_kinds`.

    `MismatchError` where ranks do not agree on what a tensor is.
    """

    def __init__(self, records: Mapping[int, Record]) -> None:
        self.joined = joined = JoinedTrees(records)
        self.tensors: list[Tensor] = []
        # The distributed tensor that each leaf is, or -1.
        self._tensor_of: Numbers = np.full(joined.leaves, NONE, np.int64)
        self._box_kinds: Numbered[ImageKind] = Numbered()
        self.box_kinds = self._box_kinds.found
        self._by_path: dict[bytes, int] = {}
        self._columns: list[tuple[Numbers, ...]] = []
        for number, group in enumerate(joined.groups):
            first, is_first = joined.first(group), _distributed(joined.first(group))
            every = np.arange(first.record.images)
            kinds_of = self._image_kinds_of(first.record)
            self._add(group.image + every, group.members[0], every, kinds_of)
            for index in group.members:
                rows = joined.rows[index]
                for leaf in np.flatnonzero(_distributed(rows) & ~is_first).tolist():
                    rank = joined.ranks[index]
                    raise MismatchError(
                        f"rank {rank} has it as a distributed tensor, and the first rank has not",
                        rank=rank,
                        path=joined.path(group.shift + leaf),
                    )
                self._add_rows(index, number)
                self._add_others(index, number)
        columns = [np.concatenate(some) for some in zip(*self._columns, strict=True)]
        order = np.argsort(columns[0], kind="stable")
        self.boxes = Boxes(*(column[order] for column in columns))
        kinds = KindTable()
        outlines = tuple([self._outline(group, kinds) for group in joined.groups])
        self.record = kinds.record(
            outlines,
            self._image_kinds(kinds),
            step=joined.records[0].step,
            ranks=tuple(range(len(outlines))),
        )
        self.rows = [LeafRows(self.record, number) for number in range(len(outlines))]

    # What ranks have.

    def _add(self, *columns: Numbers | int) -> None:
        self._columns.append(tuple(map(np.atleast_1d, np.broadcast_arrays(*columns))))

    def _image_kinds_of(self, record: Record) -> Numbers:
        """The kind of each image of a rank's record."""
        return self._box_kinds.numbers(record.image_kinds)[record.image_kind]

    def _add_rows(self, index: int, group: int) -> None:
        """The boxes of one rank of tensors that are rows of its record.

        The rank with index 1 has the lower half of `w` (8 x 4) as leaf 0, and leaf 1 is tied to it:
        both are of image 0 of its record. They are one tensor of the union. It has a box of that:

            tensor 0: float32, (8, 4), leaf 0       _tensor_of: [0, 0]
            box: image joined.images + 0, index 1, source 0, of kind ((4, 0), (4, 4))
        """
        rows, shift = self.joined.rows[index], self.joined.groups[group].shift
        record = rows.record
        partial = [
            isinstance(how, MeshSharding) and _any_partial(how.placements)
            for how in record.shardings
        ]
        tied: dict[int, int] = {}  # by image of the rank, the tensor of its first leaf
        images: dict[int, int] = {}  # by tensor, the image of its first leaf
        for row in np.flatnonzero(rows.is_sharded).tolist():
            leaf, image = shift + int(rows.leaves[row]), int(rows.images[row])
            kind = record.kinds[int(rows.kinds[row])]
            tensor = int(self._tensor_of[leaf])
            if tensor == NONE:
                if image not in tied:
                    facts = kind.dtype, kind.shape, partial[kind.sharding]
                    tied[image] = self._tensor(group, leaf, *facts)
                tensor = self._tensor_of[leaf] = tied[image]
            self._check(self.tensors[tensor], index, kind.dtype, kind.shape)
            images.setdefault(tensor, image)
        tensors, sources = (np.array([*some], np.int64) for some in (images, images.values()))
        kinds = self._image_kinds_of(record)
        self._add(self.joined.images + tensors, index, sources, kinds[sources])

    def _add_others(self, index: int, group: int) -> None:
        """The boxes of one rank of tensors that are records of their own."""
        joined, shift = self.joined, self.joined.groups[group].shift
        record = joined.rows[index].record
        for leaf, found in joined.rows[index].others.items():
            boxes: list[tuple[m.TensorLeaf, Box | None]]
            if isinstance(found, m.DTensorLeaf):
                dtype, partial = found.local.dtype, _any_partial(found.placements)
                boxes = [(found.local, None)]  # a part that is a box of it would be a row
            elif isinstance(found, m.ShardedLeaf):
                dtype, partial = found.dtype, False
                pairs = zip(found.shards, found.boxes, strict=True)
                boxes = [(part, (box.offsets, box.sizes)) for part, box in pairs]
            else:
                continue
            tensor = int(self._tensor_of[shift + leaf])
            if tensor == NONE:
                tensor = self._tensor(group, shift + leaf, dtype, found.shape, partial)
                self._tensor_of[shift + leaf] = tensor
            self._check(self.tensors[tensor], index, dtype, found.shape)
            for part, box in boxes:
                if part.storage < 0:
                    continue
                whole = record.kind_of_image(part.storage).shape == part.shape
                if box is None or not whole or part.strides is not None or part.offset:
                    raise MismatchError(
                        "the part of a distributed tensor on this rank is not a box of it, and "
                        "cannot be resharded: send a copy that shares no memory with other leaves; "
                        "redistribute a tensor with strided shards first",
                        rank=joined.ranks[index],
                        path=joined.path(shift + leaf),
                    )
                kind = self._box_kinds.number(ImageKind.of_boxes(dtype, found.shape, [box]))
                self._add(joined.images + tensor, index, part.storage, kind)

    def _tensor(
        self, group: int, leaf: int, dtype: str, shape: tuple[int, ...], partial: bool
    ) -> int:
        """The number of a tensor; trees that differ are joined by paths."""
        number = len(self.tensors)
        if len(self.joined.groups) > 1:
            key = self.joined.path_key(group, leaf)
            number = self._by_path.setdefault(key, number)
        if number == len(self.tensors):
            self.tensors.append(Tensor(dtype, shape, leaf, partial))
        return number

    def _check(self, known: Tensor, index: int, dtype: str, shape: tuple[int, ...]) -> None:
        """`MismatchError` where a rank has a tensor as something else than another rank."""
        if known.dtype == dtype and known.shape == shape:
            return
        rank = self.joined.ranks[index]
        raise MismatchError(
            f"rank {rank} has it as {dtype} of shape {shape}, another rank as {known.dtype} of "
            f"shape {known.shape}",
            rank=rank,
            path=self.joined.path(known.leaf),
        )

    # The record of all.

    def _image_kinds(self, kinds: KindTable) -> Numbers:
        found = []
        for group in self.joined.groups:
            record = self.joined.first(group).record
            bare = [kind.without_boxes for kind in record.image_kinds]
            found.append(kinds.images.numbers(bare)[record.image_kind])
        tensors = [ImageKind(one.dtype, one.shape, None, 0) for one in self.tensors]
        found.append(kinds.images.numbers(tensors))
        return np.concatenate(found)

    def _outline(self, group: TreeGroup, kinds: KindTable) -> StateOutline:
        """The outline of the first rank of a group; distributed tensors are whole."""
        rows = self.joined.first(group)
        tensors = self._tensor_of[group.shift + rows.leaves]
        images = np.where(tensors >= 0, self.joined.images + tensors, group.image + rows.images)
        kind_of = whole_kinds(rows.record, kinds)[rows.kinds]
        found = OutlineBuilder()
        found.add_rows(TensorRows(rows.leaves, kind_of, images, rows.offsets))
        for leaf, other in rows.others.items():
            found.add(leaf, self._moved(group, leaf, other))
        return found.build(rows.tree, len(rows))

    def _moved(self, group: TreeGroup, leaf: int, found: m.Leaf) -> m.Leaf:
        """A leaf that is not a row, over the images of the union."""
        tensor = int(self._tensor_of[group.shift + leaf])
        if tensor >= 0:
            assert isinstance(found, (m.DTensorLeaf, m.ShardedLeaf))
            facts, flags = self.tensors[tensor], found.flags
            image = self.joined.images + tensor
            if isinstance(found, m.DTensorLeaf) and found.local.flags & m.META:
                image, flags = NONE, flags | m.META
            return m.TensorLeaf(facts.dtype, facts.shape, None, image, 0, flags)
        return m.with_parts(found, lambda part: replace(part, storage=group.image + part.storage))

    def path(self, image: int) -> str:
        """The path of a distributed tensor, for a message."""
        return self.joined.path(self.tensors[image - self.joined.images].leaf)

    def check_value(self, image: int) -> None:
        """`MismatchError` for a tensor whose values are yet to be reduced over ranks."""
        if image >= self.joined.images and self.tensors[image - self.joined.images].partial:
            raise MismatchError(
                "a DTensor with a partial placement has no value yet: redistribute it before it "
                "is sent",
                path=self.path(image),
            )


def _distributed(rows: LeafRows) -> Marks:
    """Marks the leaves that are distributed tensors."""
    found = np.zeros(len(rows), bool)
    found[rows.leaves[rows.is_sharded]] = True
    found[[at for at, leaf in rows.others.items() if isinstance(leaf, _DISTRIBUTED)]] = True
    return found


def _any_partial(placements: tuple[m.Placement, ...]) -> bool:
    return any(placement.kind == "partial" for placement in placements)
