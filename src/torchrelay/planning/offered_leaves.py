"""The leaves of a recorded state, of one rank or of several laid over each other. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from msgspec.structs import replace

from torchrelay.describing.outline import laid_over
from torchrelay.errors import MismatchError
from torchrelay.geometry.boxes import Numbers
from torchrelay.geometry.numbered import Numbered
from torchrelay.record import manifest as m
from torchrelay.record.kinds import KindTable
from torchrelay.record.rows import LeafRows
from torchrelay.record.schema import Record
from torchrelay.state.objects import OfferedTensor

NONE = -1
_ONE_TENSOR = (m.TensorLeaf, m.DTensorLeaf, m.ShardedLeaf)


class TensorFacts(NamedTuple):
    """The properties that tensors must share to have each other's boxes."""

    dtype: str
    shape: tuple[int, ...]


class RankLeaves(NamedTuple):
    """Some leaves of one rank: their numbers there, and where each was in a list of leaves."""

    rows: LeafRows
    leaves: Numbers
    at: Numbers


class OfferedLeaves:
    """The leaves of these `ranks` of one record. In `tree` the first rank that has a path counts;
    leaves are counted over all ranks, those of the first rank first.

    `images` has the image of the record that each leaf is all of, and `facts` a number for dtype
    and shape of those and of empty tensors. Both are NONE for other leaves.
    """

    def __init__(self, ranks: Sequence[LeafRows]) -> None:
        self._ranks = [ranks[0], *(rows for rows in ranks[1:] if rows.tree != ranks[0].tree)]
        self._numbered: Numbered[TensorFacts] = Numbered()
        self.record: Record = ranks[0].record
        self.count = sum(map(len, self._ranks))
        self.tree = laid_over([(rows.tree, len(rows)) for rows in self._ranks])
        self.images: Numbers = np.full(self.count, NONE, np.int64)
        self.facts: Numbers = np.full(self.count, NONE, np.int64)
        kinds = self.record.kinds
        facts = np.array([self.fact(kind.dtype, kind.shape) for kind in kinds], np.int64)
        shift = 0
        for rows in self._ranks:
            if len(rows.kinds):
                some = np.flatnonzero(rows.is_image)
                leaves = shift + rows.leaves[some]
                self.images[leaves], self.facts[leaves] = rows.images[some], facts[rows.kinds[some]]
            for leaf, found in rows.others.items():
                self._add_other(shift + leaf, found)
            shift += len(rows)

    def _add_other(self, leaf: int, found: m.Leaf) -> None:
        part = undistributed(found) if isinstance(found, _ONE_TENSOR) else None
        if part is None or part.flags & m.META:
            return
        is_all = part.storage >= 0 and part.strides is None and not part.offset
        if is_all:
            kind = self.record.kind_of_image(part.storage)
            is_all = (kind.dtype, kind.shape) == (part.dtype, part.shape)
        if 0 in part.shape or is_all:
            self.facts[leaf] = self.fact(part.dtype, part.shape)
            self.images[leaf] = part.storage

    @property
    def one_state(self) -> bool:
        """Whether all leaves are of one rank, so that they were one state."""
        return len(self._ranks) == 1

    def by_rank(self, leaves: Numbers) -> Iterator[RankLeaves]:
        """Some leaves, those of each rank together."""
        shift = 0
        for rows in self._ranks:
            at = np.flatnonzero((leaves >= shift) & (leaves < shift + len(rows)))
            yield RankLeaves(rows, leaves[at] - shift, at)
            shift += len(rows)

    def tensor_of(self, leaf: int) -> OfferedTensor | None:
        """A leaf that is a tensor."""
        for rows, leaves, _ in self.by_rank(np.array([leaf], np.int64)):
            for one in leaves.tolist():
                found = m.tensor_of(rows[one])
                in_boxes = bool(self.images[leaf] != NONE)
                return None if found is None else OfferedTensor(*found, in_boxes)
        return None

    def fact(self, dtype: str, shape: tuple[int, ...]) -> int:
        """The number of a dtype and shape."""
        return self._numbered.number(TensorFacts(dtype, shape))

    def facts_of(self, leaf: int) -> TensorFacts | None:
        """Dtype and shape of a leaf that has `facts`."""
        number = int(self.facts[leaf])
        return None if number == NONE else self._numbered.found[number]

    def check(self, leaf: int, dtype: str, shape: tuple[int, ...], path: str) -> None:
        """`MismatchError` says how a leaf differs from a distributed destination."""
        offered = self.facts_of(leaf)
        if offered is None:
            raise MismatchError(
                "kind differs: offered something else, the destination has a distributed tensor",
                path=path,
            )
        for what, there, here in zip(("dtype", "shape"), offered, (dtype, shape), strict=True):
            if there != here:
                raise MismatchError(
                    f"{what} differs: offered {there}, the destination has {here}", path=path
                )


def whole_kinds(record: Record, kinds: KindTable) -> Numbers:
    """Of each kind of leaves of a record, its number in another table, where distributed tensors
    are whole."""
    wholes = [
        replace(kind, strides=None, sharding=NONE) if kind.sharding >= 0 else kind
        for kind in record.kinds
    ]
    return kinds.leaves.numbers(wholes)


def undistributed(leaf: m.Leaf) -> Any:
    """A leaf without the ranks that had it: a distributed tensor is whole."""
    if not isinstance(leaf, (m.DTensorLeaf, m.ShardedLeaf)):
        return leaf
    part = next(m.parts(leaf))
    flags = leaf.flags | part.flags & m.META
    return m.TensorLeaf(part.dtype, part.shape, None, part.storage, 0, flags)
