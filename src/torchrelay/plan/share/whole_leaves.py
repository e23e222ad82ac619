"""The recorded leaves that are all of an image, element for element. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from torchrelay.errors import MismatchError
from torchrelay.geometry.boxes import Numbers
from torchrelay.record import manifest as m
from torchrelay.record.manifest import parts
from torchrelay.record.rows import LeafRows
from torchrelay.record.schema import Record

NONE = -1
ODD = m.CONJ | m.NEG | m.META
_ONE_TENSOR = (m.TensorLeaf, m.DTensorLeaf, m.ShardedLeaf)
_encode = msgspec.msgpack.Encoder().encode


class WholeLeaves:
    """Of the leaves of several `ranks` of one record, one after the other: `sources` has the image
    that each is all of, and `facts` a number for dtype and shape of those and of empty tensors.
    Both are -1 where there is none."""

    def __init__(self, ranks: Sequence[LeafRows]) -> None:
        self._facts: list[tuple[str, tuple[int, ...]]] = []
        self._numbers: dict[bytes, int] = {}  # by encoding: a peer's numbers may hash alike
        record, leaves = ranks[0].record, sum(map(len, ranks))
        self.sources: Numbers = np.full(leaves, NONE, np.int64)
        self.facts: Numbers = np.full(leaves, NONE, np.int64)
        known = np.array([self.fact(kind.dtype, kind.shape) for kind in record.kinds], np.int64)
        plain = np.array([not kind.flags & ODD for kind in record.kinds], bool)
        shift = 0
        for rows in ranks:
            if len(rows.kinds):
                some = np.flatnonzero(rows.is_image & plain[rows.kinds])
                at = shift + rows.leaves[some]
                self.sources[at], self.facts[at] = rows.images[some], known[rows.kinds[some]]
            for leaf, found in rows.others.items():
                if isinstance(found, _ONE_TENSOR):
                    part = undistributed(found)
                    if not part.flags & ODD and (0 in part.shape or _is_all(part, record)):
                        self.facts[shift + leaf] = self.fact(part.dtype, part.shape)
                        self.sources[shift + leaf] = part.storage
            shift += len(rows)

    def fact(self, dtype: str, shape: tuple[int, ...]) -> int:
        """The number of a dtype and shape."""
        number = self._numbers.setdefault(_encode((dtype, shape)), len(self._facts))
        if number == len(self._facts):
            self._facts.append((dtype, shape))
        return number

    def of(self, leaf: int) -> tuple[str, tuple[int, ...]] | None:
        """Dtype and shape of a leaf that has `facts`."""
        fact = int(self.facts[leaf])
        return None if fact == NONE else self._facts[fact]

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


def _is_all(part: m.TensorLeaf, record: Record) -> bool:
    if part.storage < 0 or part.strides is not None or part.offset:
        return False
    kind = record.kind_of_image(part.storage)
    return (kind.dtype, kind.shape) == (part.dtype, part.shape)


def undistributed(leaf: m.Leaf) -> Any:
    """A leaf without the ranks that had it: a distributed tensor is whole."""
    if not isinstance(leaf, (m.DTensorLeaf, m.ShardedLeaf)):
        return leaf
    part = next(parts(leaf))
    flags = leaf.flags | part.flags & m.META
    return m.TensorLeaf(part.dtype, part.shape, None, part.storage, 0, flags)
