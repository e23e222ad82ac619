"""A state taken apart: plain tensors as pieces of memory, and all other leaves one by one.

Everything that describes a live state begins here: the record of what is sent (`state_plan`), the
outline with its named tensors (`at_rest`), and the layout of a destination.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from torchrelay.errors import RelayError
from torchrelay.geometry.boxes import Numbers
from torchrelay.geometry.chunks import ALIGN
from torchrelay.geometry.runs import Column
from torchrelay.plan.images import LEAF, PART, Images, reaching
from torchrelay.plan.plain import PlainTensors, find_plain
from torchrelay.plan.sharded import ShardedLeaves, find_sharded
from torchrelay.state.leaves import Finish, describe
from torchrelay.state.paths import LeafPaths
from torchrelay.state.tree import Flat

Indices = np.ndarray[Any, np.dtype[np.intp]]


class Pieces(NamedTuple):
    """Plain tensors that reach into no other, each an image of its own, and their storages. Holds
    no tensor."""

    plain: PlainTensors
    storage: Indices  # of each piece; storages are numbered in order of first use
    at: Column  # where each lies in its storage, without what no piece reaches
    firsts: Indices  # of each storage, the first leaf in it
    sizes: Column  # of each storage


class PlainLayout:
    """The plain tensors of a destination, and the local parts of its distributed ones that are
    plain: kinds and addresses. Holds none of the tensors but local parts."""

    def __init__(self, flat: Flat) -> None:
        self.sharded = find_sharded(flat.leaves)
        self.locals = self.sharded.local_leaves(flat.leaves)
        nothing_else = self.sharded.nothing_else
        plain = find_plain(self.locals, offsets=False, nothing_else=nothing_else)
        shared = reaching(plain.address_of, plain.address_of + plain.nbytes)
        # Tensors that share no memory with each other.
        self.plain: PlainTensors = plain.some((~shared).tolist()) if shared.any() else plain
        self.plain.on_host, self.plain.leaf_of  # noqa: B018  # asked for while there is time

    @cached_property
    def kinds(self) -> Numbers:
        """The kind of each: of a plain tensor that in `plain`, of a distributed one that in
        `sharded`, counted from there on."""
        return self.sharded.kinds_of(self.plain)


class Others(NamedTuple):
    """Leaves that are not pieces, described tensor by tensor."""

    leaves: Sequence[int]
    described: list[int | Finish]
    images: Images
    owners: list[int]  # of each tensor taken in, its leaf
    roles: list[int]  # of each tensor taken in, as `Images.resolve` takes them


def taken_apart(
    flat: Flat,
    versions: list[int] | None = None,
    without: Collection[int] = (),
    sharded: ShardedLeaves | None = None,
) -> tuple[Pieces, Others]:
    """The pieces of a state, and what it has besides them, but for the leaves in `without`.

    Distributed tensors in `sharded` count as their local tensors. `versions` receives the version
    counters of the pieces. `UnsupportedLeafError` names what cannot be described.
    """
    sharded = sharded or ShardedLeaves()
    plain = find_plain(
        sharded.local_leaves(flat.leaves), versions, nothing_else=sharded.nothing_else
    )
    others = _describe_others(flat, plain, without, sharded)
    leave = _tangled(plain, others.images)
    if leave.any():
        plain = plain.some((~leave).tolist())
        if versions is not None:
            versions[:] = np.array(versions)[~leave].tolist()
        others = _describe_others(flat, plain, without, sharded)
    return _storages(plain), others


def _describe_others(
    flat: Flat, plain: PlainTensors, without: Collection[int], sharded: ShardedLeaves
) -> Others:
    """Describe the leaves that are neither plain nor in `without`."""
    rest = np.ones(plain.count, bool)
    rest[plain.leaf_of] = False
    rest[list(without)] = False
    leaves = np.flatnonzero(rest).tolist()
    images = Images()
    found = Others(leaves, [], images, [], [])
    for index in leaves:
        leaf = flat.leaves[index]
        try:
            described = describe(leaf, (), images.add)
        except RelayError:
            path = LeafPaths(flat.tree).steps(index)
            describe(leaf, path, images.add)  # with its path this time
            raise
        role = LEAF if isinstance(described, int) else sharded.numbers.get(index, PART)
        added = len(images) - len(found.owners)
        found.described.append(described)
        found.owners.extend([index] * added)
        found.roles.extend([role] * added)
    return found


def _tangled(plain: PlainTensors, others: Images) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Marks plain tensors whose storage has bytes that several tensors, or `others`, have."""
    starts, lows = plain.origins, plain.address_of
    more_lows, more_highs = others.spans
    highs = np.concatenate([lows + plain.nbytes, more_highs])
    meet = reaching(np.concatenate([lows, more_lows]), highs)[: len(lows)]
    touched = np.concatenate([np.array(others.origins, np.uint64), starts[meet]])
    return np.isin(starts, touched) if len(touched) else meet


def _storages(plain: PlainTensors) -> Pieces:
    """Lay plain tensors that do not overlap out by their storages."""
    starts, addresses, nbytes = plain.origins, plain.address_of, plain.nbytes
    if starts is addresses or len(np.unique(starts)) == len(starts):  # each has its own
        zeros = np.zeros(len(starts), np.uint64)
        return Pieces(plain, np.arange(len(starts)), zeros, plain.leaf_of, nbytes)
    order = np.lexsort((addresses, starts))
    _, first, storage = np.unique(starts, return_index=True, return_inverse=True)
    rank = np.empty(len(first), np.intp)
    rank[np.argsort(first)] = np.arange(len(first))
    storage = rank[storage]
    aligned = -(-nbytes.astype(np.int64) // ALIGN) * ALIGN
    begins = np.cumsum(aligned[order]) - aligned[order]
    opens = np.ones(len(order), bool)  # the first piece of a storage
    opens[1:] = starts[order][1:] != starts[order][:-1]
    at = np.empty(len(order), np.int64)
    at[order] = begins - np.maximum.accumulate(np.where(opens, begins, 0))
    sizes = np.zeros(len(first), np.int64)
    np.maximum.at(sizes, storage, at + nbytes.astype(np.int64))
    firsts = plain.leaf_of[np.sort(first)]
    return Pieces(plain, storage, at.astype(np.uint64), firsts, sizes.astype(np.uint64))
