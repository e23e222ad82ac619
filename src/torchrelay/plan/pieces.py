"""Plain tensors as pieces of storages, laid out all at once.

What `images` works out tensor by tensor is here for those plain tensors that reach into no other:
each is an image of its own. The others are tangled and left to `images`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from torchrelay.geometry.chunks import ALIGN
from torchrelay.geometry.runs import Column
from torchrelay.plan.images import Images, reaching
from torchrelay.plan.plain import PlainTensors

Indices = np.ndarray[Any, np.dtype[np.intp]]


class Pieces(NamedTuple):
    """Plain tensors and the storages that they are of. Holds no tensor."""

    plain: PlainTensors
    storage: Indices  # of each piece; storages are numbered in order of first use
    at: Column  # where each lies in its storage, without what no piece reaches
    firsts: Indices  # of each storage, the first leaf in it
    sizes: Column  # of each storage


def lay(plain: PlainTensors, others: Images) -> Pieces:
    """Lay plain tensors out, without those that share a storage with a tensor that they overlap
    or that is among the `others`."""
    starts = plain.origins
    nbytes = plain.nbytes
    addresses = plain.address_of
    leave = _tangled(starts, addresses, nbytes, others)
    if leave.any():
        plain = plain.some((~leave).tolist())
        starts, nbytes, addresses = plain.origins, plain.nbytes, plain.address_of
    order = _sharing(starts, addresses)
    if order is None:
        zeros = np.zeros(len(starts), np.uint64)
        return Pieces(plain, np.arange(len(starts)), zeros, plain.leaf_of, nbytes)
    return Pieces(plain, *_storages(starts, nbytes, order, plain.leaf_of))


def _tangled(
    starts: Column, addresses: Column, nbytes: Column, others: Images
) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Marks tensors whose storage has bytes that several tensors, or `others`, have."""
    lows, highs = others.spans
    ends = np.concatenate([addresses + nbytes, highs])
    meet = reaching(np.concatenate([addresses, lows]), ends)[: len(starts)]
    touched = np.array(others.origins, np.uint64)
    if meet.any():
        touched = np.concatenate([touched, starts[meet]])
    return np.isin(starts, touched) if len(touched) else meet


def _sharing(starts: Column, addresses: Column) -> Indices | None:
    """Tensors that do not overlap, by storage and address, if any two share a storage."""
    if starts is addresses:
        return None
    some = np.sort(starts)
    return np.lexsort((addresses, starts)) if (some[1:] == some[:-1]).any() else None


def _storages(
    starts: Column, nbytes: Column, order: Indices, leaves: Indices
) -> tuple[Indices, Column, Indices, Column]:
    """The columns of `Pieces`, where storages have several pieces each.

    `order` is that of storages and, in each, of addresses.
    """
    _, first, storage = np.unique(starts, return_index=True, return_inverse=True)
    rank = np.empty(len(first), np.intp)
    rank[np.argsort(first)] = np.arange(len(first))
    storage = rank[storage]
    aligned = -(-nbytes.astype(np.int64) // ALIGN) * ALIGN
    ends = np.cumsum(aligned[order])
    begins = ends - aligned[order]
    opens = np.ones(len(order), bool)  # the first piece of a storage
    opens[1:] = starts[order][1:] != starts[order][:-1]
    at = np.empty(len(order), np.int64)
    at[order] = begins - np.maximum.accumulate(np.where(opens, begins, 0))
    sizes = np.zeros(len(first), np.int64)
    np.maximum.at(sizes, storage, at + nbytes.astype(np.int64))
    return storage, at.astype(np.uint64), leaves[np.sort(first)], sizes.astype(np.uint64)
