"""Leaves in columns: the recorded ones that are all of an image, pairs of leaves offered and leaves
here, and numbers for the leaves of a share. Pure."""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import Any

import numpy as np

from torchrelay.errors import MismatchError
from torchrelay.geometry.boxes import Numbers
from torchrelay.geometry.numbered import Numbered
from torchrelay.record import manifest as m
from torchrelay.record.kinds import KindTable
from torchrelay.record.rows import LeafRows
from torchrelay.record.schema import LeafKind, Record
from torchrelay.state.matching import Matched
from torchrelay.state.paths import LeafPaths
from torchrelay.state.tree import show

NONE = -1
_ONE_TENSOR = (m.TensorLeaf, m.DTensorLeaf, m.ShardedLeaf)


class WholeLeaves:
    """Of the leaves of several `ranks` of one record, one after the other: `sources` has the image
    that each is all of, and `facts` a number for dtype and shape of those and of empty tensors.
    Both are -1 where there is none."""

    def __init__(self, ranks: Sequence[LeafRows]) -> None:
        self._facts: Numbered[tuple[str, tuple[int, ...]]] = Numbered()
        record, leaves = ranks[0].record, sum(map(len, ranks))
        self.sources: Numbers = np.full(leaves, NONE, np.int64)
        self.facts: Numbers = np.full(leaves, NONE, np.int64)
        known = np.array([self.fact(kind.dtype, kind.shape) for kind in record.kinds], np.int64)
        shift = 0
        for rows in ranks:
            if len(rows.kinds):
                some = np.flatnonzero(rows.is_image)
                at = shift + rows.leaves[some]
                self.sources[at], self.facts[at] = rows.images[some], known[rows.kinds[some]]
            for leaf, found in rows.others.items():
                part = undistributed(found) if isinstance(found, _ONE_TENSOR) else None
                if part is None or part.flags & m.META:
                    continue
                is_all = part.storage >= 0 and part.strides is None and not part.offset
                if is_all:
                    kind = record.kind_of_image(part.storage)
                    is_all = (kind.dtype, kind.shape) == (part.dtype, part.shape)
                if 0 in part.shape or is_all:
                    self.facts[shift + leaf] = self.fact(part.dtype, part.shape)
                    self.sources[shift + leaf] = part.storage
            shift += len(rows)

    def fact(self, dtype: str, shape: tuple[int, ...]) -> int:
        """The number of a dtype and shape."""
        return self._facts.number((dtype, shape))

    def of(self, leaf: int) -> tuple[str, tuple[int, ...]] | None:
        """Dtype and shape of a leaf that has `facts`."""
        fact = int(self.facts[leaf])
        return None if fact == NONE else self._facts.found[fact]

    def check(self, leaf: int, dtype: str, shape: tuple[int, ...], path: str) -> None:
        """`MismatchError` says how a leaf differs from a distributed destination."""
        offered = self.of(leaf)
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
        LeafKind(kind.dtype, kind.shape, None, kind.flags) if kind.sharding >= 0 else kind
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


class Pairs:
    """Pairs of leaves in columns: the one offered, the one here, that of the share; and a reference
    to the image of the share that is all of it, or less than 0."""

    def __init__(self, matched: Matched, leaves: int) -> None:
        self._matched = matched
        self.tree = matched.tree
        if matched.tree is not None:
            self.offered: Numbers = np.arange(leaves)
            self.here: Numbers = self.offered
        else:
            self.offered = np.array([pair[0] for pair in matched.pairs], np.int64)
            self.here = np.array([pair[2] for pair in matched.pairs], np.int64)
        self.leaf: Numbers = self.offered.copy()
        self.refs: Numbers = np.full(len(self.here), NONE, np.int64)

    def path(self, row: int) -> str:
        if self.tree is None:
            return show(self._matched.pairs[row][1])
        return show(LeafPaths(self.tree)[int(self.offered[row])])

    def matched(self, dropped: Set[int]) -> Matched:
        """The pairs with the leaves of the share, but for those that are dropped."""
        found = self._matched
        if not dropped and np.array_equal(self.leaf, self.offered):
            return found
        if self.tree is None:
            paths = [pair[1] for pair in found.pairs]
        else:
            paths = list(map(LeafPaths(self.tree).__getitem__, self.offered.tolist()))
        rows = zip(self.leaf.tolist(), paths, self.here.tolist(), strict=True)
        pairs = [pair for row, pair in enumerate(rows) if row not in dropped]
        return Matched(pairs)


class LeafNumbers:
    """The leaves of a share: the recorded ones, and more where one is needed in several forms."""

    def __init__(self, leaves: int) -> None:
        self.count = leaves
        self._taken = np.zeros(leaves, bool)

    def take(self, leaves: Numbers) -> Numbers:
        """A number for each of some leaves: its own, unless that is taken."""
        found: Numbers = leaves.copy()
        _, first = np.unique(leaves, return_index=True)
        again = np.ones(len(leaves), bool)
        again[first] = self._taken[leaves[first]]
        self._taken[leaves] = True
        more = int(again.sum())
        found[again] = np.arange(self.count, self.count + more)
        self.count += more
        return found

    def free(self) -> list[int]:
        found: list[int] = np.flatnonzero(~self._taken).tolist()
        return found
