"""A state taken apart: plain tensors as pieces of memory, and all other leaves one by one.

Everything that describes a live state begins here: the record of what is sent (`state_plan`), and
the outline with its named tensors (`outline`).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np

from torchrelay.errors import RelayError
from torchrelay.plan.images import LEAF, PART, Images
from torchrelay.plan.pieces import Pieces, lay
from torchrelay.plan.plain import PlainTensors, find_plain
from torchrelay.plan.sharded import ShardedLeaves
from torchrelay.state.leaves import Finish, describe
from torchrelay.state.paths import LeafPaths
from torchrelay.state.tree import Flat


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
    leaves = sharded.local_leaves(flat.leaves)
    plain = find_plain(leaves, versions, nothing_else=sharded.nothing_else)
    some = others(flat, plain, without, sharded)
    pieces = lay(plain, some.images)
    if len(pieces.plain) < len(plain):
        if versions is not None:
            kept = set(pieces.plain.leaves)
            pairs = zip(plain.leaves, versions, strict=True)
            versions[:] = [version for leaf, version in pairs if leaf in kept]
        some = others(flat, pieces.plain, without, sharded)
    return pieces, some


def others(
    flat: Flat, plain: PlainTensors, without: Collection[int], sharded: ShardedLeaves
) -> Others:
    """Describe the leaves that are neither plain nor in `without`."""
    leaves = _except(plain.leaves, plain.count, without)
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


def _except(leaves: Sequence[int], count: int, without: Collection[int]) -> list[int]:
    if len(leaves) == count:
        return []
    rest = np.ones(count, bool)
    rest[np.array([*leaves, *without], np.intp)] = False
    found: list[int] = np.flatnonzero(rest).tolist()
    return found
