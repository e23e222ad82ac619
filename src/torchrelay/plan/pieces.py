"""Plain tensors as pieces of storage images, laid out all at once.

What `images` works out tensor by tensor is here for those plain tensors that reach into no other:
each is a piece of its own. The others are tangled and left to `images`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from torchrelay.geometry.chunks import ALIGN
from torchrelay.geometry.runs import Column
from torchrelay.plan.images import Images, reaching
from torchrelay.plan.plain import Plains, origins

Indices = np.ndarray[Any, np.dtype[np.intp]]


class Pieces(NamedTuple):
    """Plain tensors and the images that they make up. Holds no tensor."""

    plains: Plains
    origins: Column  # where the storage of each starts
    nbytes: Column
    image: Indices  # of each piece; images are numbered in order of first use
    at: Column  # where each lies in its image
    firsts: Indices  # of each image, the first leaf in it
    sizes: Column  # of each image

    def hold(self, leaves: Sequence[Any], others: Images, versions: list[int]) -> bool:
        """Whether these leaves make the same pieces beside `others`. `versions`: as `Plains.hold`
        takes it."""
        if not self.plains.hold(leaves, versions):
            return False
        if not len(others):
            return True
        return not _tangled(self.origins, self.plains.places, self.nbytes, others).any()


def lay(plains: Plains, leaves: Sequence[Any], others: Images) -> Pieces:
    """Lay plain tensors out, without those that share a storage with a tensor that they overlap
    or that is among the `others`."""
    starts = origins(plains)
    nbytes = plains.nbytes
    addresses = plains.places
    leave = _tangled(starts, addresses, nbytes, others)
    order = _sharing(starts, addresses)
    if leave.any():
        keep = ~leave
        plains = plains.some(keep.tolist(), leaves)
        starts, nbytes, addresses = starts[keep], nbytes[keep], addresses[keep]
        order = _sharing(starts, addresses)
    numbers = plains.leaf_of_each
    if order is None:
        image, at = np.arange(len(starts)), np.zeros(len(starts), np.uint64)
        return Pieces(plains, starts, nbytes, image, at, numbers, nbytes)
    return Pieces(plains, starts, nbytes, *_images(starts, nbytes, order, numbers))


def _tangled(
    starts: Column, addresses: Column, nbytes: Column, others: Images
) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Which tensors have a storage of which others, or several of these, have the same bytes."""
    lows, highs = others.spans
    ends = np.concatenate([addresses + nbytes, highs])
    meet = reaching(np.concatenate([addresses, lows]), ends)[: len(starts)]
    touched = np.array(others.origins, np.uint64)
    if meet.any():
        touched = np.concatenate([touched, starts[meet]])
    return np.isin(starts, touched) if len(touched) else meet


def _sharing(starts: Column, addresses: Column) -> Indices | None:
    """The tensors by storage and address, if any two share a storage."""
    some = np.sort(starts)
    return np.lexsort((addresses, starts)) if (some[1:] == some[:-1]).any() else None


def _images(
    starts: Column, nbytes: Column, order: Indices, leaves: Indices
) -> tuple[Indices, Column, Indices, Column]:
    """The last four columns of `Pieces`, where storages have several pieces each.

    `order` is that of storages and, in each, of addresses.
    """
    _, first, image = np.unique(starts, return_index=True, return_inverse=True)
    rank = np.empty(len(first), np.intp)
    rank[np.argsort(first)] = np.arange(len(first))
    image = rank[image]
    aligned = -(-nbytes.astype(np.int64) // ALIGN) * ALIGN
    ends = np.cumsum(aligned[order])
    begins = ends - aligned[order]
    opens = np.ones(len(order), bool)  # the first piece of a storage
    opens[1:] = starts[order][1:] != starts[order][:-1]
    at = np.empty(len(order), np.int64)
    at[order] = begins - np.maximum.accumulate(np.where(opens, begins, 0))
    sizes = np.zeros(len(first), np.int64)
    np.maximum.at(sizes, image, at + nbytes.astype(np.int64))
    return image, at.astype(np.uint64), leaves[np.sort(first)], sizes.astype(np.uint64)
