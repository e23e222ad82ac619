"""The distributed tensors of several live ranks, and which rank has which box of each."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import msgspec
import numpy as np

from torchrelay.errors import MismatchError
from torchrelay.geometry.boxes import Box, Numbers
from torchrelay.plan.gather.trees import Home, JoinedTrees
from torchrelay.record import manifest as m
from torchrelay.record.rows import LeafRows, Marks
from torchrelay.record.schema import ImageKind, LeafKind, MeshSharding, Record

_encode = msgspec.msgpack.Encoder().encode
NONE = -1


class Tensor(NamedTuple):
    """A distributed tensor: dtype and shape, and the leaf of the joined tree that it is. `partial`:
    it has values that are yet to be reduced."""

    dtype: str
    shape: tuple[int, ...]
    leaf: int
    partial: bool


class Holders:
    """The distributed `tensors` of joined trees; `tensor_of` has the one that each leaf is, or -1.

    `images` and `kinds` have a row for each tensor and a column for each box that a rank may have
    of it, mostly one for each rank: the image, and its kind (in `box_kinds`) as a box of the whole,
    or -1. `rank_of` has the place of the rank of each column.

    `MismatchError` where ranks do not agree on what a tensor is.
    """

    def __init__(self, joined: JoinedTrees) -> None:
        self._joined = joined
        self.tensors: list[Tensor] = []
        self.tensor_of: Numbers = np.full(joined.leaves, NONE, np.int64)
        self.box_kinds: list[ImageKind] = []
        # By encoding: numbers of a peer may hash alike.
        self._box_numbers: dict[bytes, int] = {}
        self._by_path: dict[bytes, int] = {}
        self._rows: list[tuple[int, Numbers, Numbers, Numbers]] = []  # by rank, in columns
        self._others: list[tuple[int, int, int, int]] = []  # box by box
        for number, home in enumerate(joined.homes):
            for place in home.members:
                self._check_distributed(place, home)
                self._add_rows(place, number)
                self._add_others(place, number)
        self._lay_out()
        self.partial = np.array([tensor.partial for tensor in self.tensors], bool)

    def _check_distributed(self, place: int, home: Home) -> None:
        """The leaves that are distributed on a rank are so on the first one of its home too."""
        first = _distributed(self._joined.first(home))
        for leaf in np.flatnonzero(_distributed(self._joined.rows[place]) & ~first)[:1].tolist():
            rank = self._joined.ranks[place]
            raise MismatchError(
                f"rank {rank} has it as a distributed tensor, and the first rank has not",
                rank=rank,
                path=self._joined.path(home.shift + leaf),
            )

    def _add_rows(self, place: int, home: int) -> None:
        """The boxes of one rank of tensors that are rows of its record."""
        rows = self._joined.rows[place]
        some = np.flatnonzero(rows.is_sharded)
        leaves, images = self._joined.homes[home].shift + rows.leaves[some], rows.images[some]
        kinds = [rows.record.kinds[number] for number in rows.kinds[some].tolist()]
        # Tied leaves have one image, and are one tensor.
        new = np.flatnonzero(self.tensor_of[leaves] == NONE)
        _, once, inverse = np.unique(images[new], return_index=True, return_inverse=True)
        numbers = [
            self._tensor(home, int(leaves[at]), kinds[at].dtype, kinds[at].shape, partial)
            for at in new[once].tolist()
            for partial in [_is_partial(rows.record, kinds[at])]
        ]
        self.tensor_of[leaves[new]] = np.array(numbers, np.int64)[inverse]
        tensors = self.tensor_of[leaves]
        for tensor, kind in zip(tensors.tolist(), kinds, strict=True):
            known = self.tensors[tensor]
            if known.dtype != kind.dtype or known.shape != kind.shape:
                self._refuse(known, place, f"as {kind.dtype} of shape {kind.shape}")
        boxes = np.array([*map(self._box_kind, rows.record.image_kinds)], np.int64)
        if len(some):
            self._rows.append((place, tensors, images, boxes[rows.record.image_kind[images]]))

    def _add_others(self, place: int, home: int) -> None:
        """The boxes of one rank of tensors that are records of their own."""
        joined, shift = self._joined, self._joined.homes[home].shift
        rows = joined.rows[place]
        for leaf, found in rows.others.items():
            if not isinstance(found, (m.DTensorLeaf, m.ShardedLeaf)):
                continue
            dtype = found.local.dtype if isinstance(found, m.DTensorLeaf) else found.dtype
            tensor = int(self.tensor_of[shift + leaf])
            if tensor == NONE:
                partial = isinstance(found, m.DTensorLeaf) and _any_partial(found.placements)
                tensor = self._tensor(home, shift + leaf, dtype, found.shape, partial)
                self.tensor_of[shift + leaf] = tensor
            known = self.tensors[tensor]
            if (known.dtype, known.shape) != (dtype, found.shape):
                self._refuse(known, place, f"as {dtype} of shape {found.shape}")
            for part, box in _boxes(found):
                if box is None or not _is_all(part, rows.record):
                    raise MismatchError(
                        "the part of a distributed tensor on this rank is not a box of it, and "
                        "cannot be resharded: send a copy that shares no memory with other leaves",
                        rank=joined.ranks[place],
                        path=joined.path(shift + leaf),
                    )
                kind = self._box_kind(ImageKind.of_boxes(dtype, found.shape, [box]))
                self._others.append((tensor, place, part.storage, kind))

    def _tensor(
        self, home: int, leaf: int, dtype: str, shape: tuple[int, ...], partial: bool
    ) -> int:
        """The number of a tensor; trees that differ are joined by paths."""
        number = len(self.tensors)
        if len(self._joined.homes) > 1:
            key = self._joined.path_key(home, leaf)
            number = self._by_path.setdefault(key, number)
        if number == len(self.tensors):
            self.tensors.append(Tensor(dtype, shape, leaf, partial))
        return number

    def _box_kind(self, kind: ImageKind) -> int:
        key = _encode((kind.dtype, kind.shape, kind.strides, kind.boxes))
        number = self._box_numbers.setdefault(key, len(self.box_kinds))
        if number == len(self.box_kinds):
            self.box_kinds.append(kind)
        return number

    def _refuse(self, tensor: Tensor, place: int, said: str) -> None:
        rank = self._joined.ranks[place]
        raise MismatchError(
            f"rank {rank} has it {said}, another rank as {tensor.dtype} of shape {tensor.shape}",
            rank=rank,
            path=self._joined.path(tensor.leaf),
        )

    def _lay_out(self) -> None:
        """The columns side by side: one for each rank, and more for one that has several boxes."""
        counts: dict[tuple[int, int], int] = {}  # by tensor and rank, boxes so far
        slots = [1] * len(self._joined.ranks)
        others = []
        for tensor, place, image, kind in self._others:
            slot = counts.get((tensor, place), 0)
            counts[tensor, place] = slot + 1
            slots[place] = max(slots[place], slot + 1)
            others.append((tensor, place, slot, image, kind))
        firsts = [sum(slots[:place]) for place in range(len(slots))]
        self.rank_of: Numbers = np.repeat(np.arange(len(slots)), slots)
        shape = (len(self.tensors), len(self.rank_of))
        self.images: Numbers = np.full(shape, NONE, np.int64)
        self.kinds: Numbers = np.full(shape, NONE, np.int64)
        for place, tensors, images, kinds in self._rows:
            self.images[tensors, firsts[place]] = images
            self.kinds[tensors, firsts[place]] = kinds
        for tensor, place, slot, image, kind in others:
            self.images[tensor, firsts[place] + slot] = image
            self.kinds[tensor, firsts[place] + slot] = kind


def _distributed(rows: LeafRows) -> Marks:
    """Marks the leaves that are distributed tensors."""
    found = np.zeros(len(rows), bool)
    found[rows.leaves[rows.is_sharded]] = True
    others = rows.others.items()
    found[[at for at, leaf in others if isinstance(leaf, (m.DTensorLeaf, m.ShardedLeaf))]] = True
    return found


def _boxes(leaf: m.DTensorLeaf | m.ShardedLeaf) -> Iterator[tuple[m.TensorLeaf, Box | None]]:
    """The strided tensors of a leaf that have bytes, each with the box of the whole that it is, if
    it is known to be one."""
    boxes: list[tuple[m.TensorLeaf, Box | None]]
    if isinstance(leaf, m.ShardedLeaf):
        pairs = zip(leaf.shards, leaf.boxes, strict=True)
        boxes = [(part, (box.offsets, box.sizes)) for part, box in pairs]
    else:
        boxes = [(leaf.local, None)]
    return ((part, box) for part, box in boxes if part.storage >= 0)


def _is_all(part: m.TensorLeaf, record: Record) -> bool:
    """Whether a strided tensor is all of its image."""
    there = record.image_kinds[int(record.image_kind[part.storage])]
    return there.shape == part.shape and part.strides is None and not part.offset


def _is_partial(record: Record, kind: LeafKind) -> bool:
    how = record.shardings[kind.sharding]
    return isinstance(how, MeshSharding) and _any_partial(how.placements)


def _any_partial(placements: tuple[m.Placement, ...]) -> bool:
    return any(placement.kind == "partial" for placement in placements)
