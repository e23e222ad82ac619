"""A state taken apart: plain tensors as pieces of memory, and all other leaves one by one.

Whatever describes a live state begins here: the manifest of what is sent (`blueprint`), and the
outline with its named tensors (`outline`).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np

from torchrelay.errors import RelayError
from torchrelay.plan.images import Images
from torchrelay.plan.pieces import Pieces, lay
from torchrelay.plan.plain import Plains, look
from torchrelay.state.leaves import Finish, describe
from torchrelay.state.paths import LeafPaths
from torchrelay.state.tree import Flat


class Others(NamedTuple):
    """Leaves that are no pieces, described tensor by tensor. Made anew for each capture."""

    leaves: Sequence[int]
    described: list[int | Finish]
    images: Images
    owners: list[int]  # of each tensor taken in, its leaf

    @property
    def facts(self) -> list[tuple[int, int, str]]:
        """Of each image: its first leaf, bytes, device."""
        pairs = zip(self.images.firsts, self.images.resolved, strict=True)
        return [(self.owners[ticket], image.nbytes, image.device) for ticket, image in pairs]


def taken_apart(
    flat: Flat, versions: list[int] | None = None, without: Collection[int] = ()
) -> tuple[Pieces, Others]:
    """The pieces of a state, and what it has besides them, but for the leaves in `without`.

    `versions` is given what autograd counts of the pieces, where it is known without asking again.
    `UnsupportedLeafError` names what cannot be described.
    """
    plains = look(flat.leaves, versions)
    some = others(flat, plains, without)
    pieces = lay(plains, flat.leaves, some.images)
    if len(pieces.plains) < len(plains):
        if versions is not None:
            versions.clear()
        some = others(flat, pieces.plains, without)
    return pieces, some


def others(flat: Flat, plains: Plains, without: Collection[int] = ()) -> Others:
    """Describe the leaves that are neither plain nor in `without`."""
    leaves = _except(plains.leaves, plains.count, without)
    images = Images()
    described: list[int | Finish] = []
    owners: list[int] = []
    for index in leaves:
        leaf = flat.leaves[index]
        try:
            described.append(describe(leaf, (), images.add))
        except RelayError:
            path = LeafPaths(flat.tree).steps(index)
            describe(leaf, path, images.add)  # with its path this time
            raise
        owners += [index] * (len(images) - len(owners))
    return Others(leaves, described, images, owners)


def _except(leaves: Sequence[int], count: int, without: Collection[int]) -> list[int]:
    if len(leaves) == count:
        return []
    rest = np.ones(count, bool)
    rest[np.array([*leaves, *without], np.intp)] = False
    found: list[int] = np.flatnonzero(rest).tolist()
    return found
