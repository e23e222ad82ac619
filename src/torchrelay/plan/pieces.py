"""Plain tensors as pieces of storage images, laid out all at once.

What `images` works out tensor by tensor is here for those plain tensors that reach into no other:
each is a piece of its own. The others are tangled and left to `images`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import numpy as np

from torchrelay.geometry.chunks import ALIGN
from torchrelay.geometry.runs import Column
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

    def hold(self, leaves: Sequence[Any], touched: Collection[int], versions: list[int]) -> bool:
        """Whether these leaves make the same pieces. `touched`: as `lay` takes it; `versions`: as
        `Plains.hold` does."""
        if not self.plains.hold(leaves, versions):
            return False
        return not _within(self.origins, touched).any()


def lay(plains: Plains, leaves: Sequence[Any], touched: Collection[int]) -> Pieces:
    """Lay plain tensors out, without those that share a storage with a tensor that they overlap
    or that is not plain. `touched`: where the storages of such tensors start."""
    starts = origins(plains)
    nbytes = plains.nbytes
    addresses = plains.places
    order = _sharing(starts, addresses)
    leave = _within(starts, touched)
    if order is not None:
        one, other = order[:-1], order[1:]
        same = starts[one] == starts[other]
        overlap = same & (addresses[other] < addresses[one] + nbytes[one])
        leave |= np.isin(starts, starts[one][overlap])
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


def _within(starts: Column, touched: Collection[int]) -> np.ndarray[Any, np.dtype[np.bool_]]:
    if not touched:
        return np.zeros(len(starts), bool)
    return np.isin(starts, np.array(list(touched), np.uint64))


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
