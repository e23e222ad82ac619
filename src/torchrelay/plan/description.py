"""A state taken apart: plain tensors as pieces of memory, and all other leaves one by one.

Everything that describes a live state begins here: the record of what is sent (`state_plan`), the
outline with its named tensors (`at_rest`), and the layout of a destination.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import cached_property

import numpy as np

from torchrelay.errors import RelayError
from torchrelay.geometry.boxes import Numbers
from torchrelay.plan.images import LEAF, PART, Image, Images, reaching
from torchrelay.plan.plain import PlainTensors, find_plain
from torchrelay.plan.sharded import ShardedLeaves, find_sharded
from torchrelay.record import manifest as m
from torchrelay.record.rows import Marks
from torchrelay.state.leaves import describe
from torchrelay.state.paths import LeafPaths
from torchrelay.state.tree import Flat, show


class PlainLayout:
    """The plain tensors of a destination, and the local parts of its distributed ones that are
    plain: kinds and addresses. Holds none of the tensors but local parts."""

    def __init__(self, flat: Flat) -> None:
        self.sharded = find_sharded(flat.leaves)
        self.locals = self.sharded.local_leaves(flat.leaves)
        plain = find_plain(self.locals, offsets=False)
        shared = reaching(plain.addresses, plain.addresses + plain.nbytes)
        # Tensors that share no memory with each other.
        self.plain: PlainTensors = plain.some(~shared) if shared.any() else plain
        self.plain.gpus  # noqa: B018  # asked for while there is time

    @cached_property
    def kinds(self) -> Numbers:
        """The kind of each: of a plain tensor that in `plain`, of a distributed one that in
        `sharded`, counted from there on."""
        return self.sharded.kinds_of(self.plain)


class TakenApart:
    """A state as `plain` tensors that reach into no other, each an image of its own, and `others`:
    leaves that are described tensor by tensor, but for those in `without`.

    Distributed tensors in `sharded` count as their local tensors, which `locals` has in their
    places. `versions` are the version counters of the plain ones. At rest images are row-major, and
    no tensor is on a device. `UnsupportedLeafError` names what cannot be described.
    """

    def __init__(
        self,
        flat: Flat,
        sharded: ShardedLeaves,
        without: Collection[int] = (),
        *,
        at_rest: bool = False,
    ) -> None:
        self.flat, self.sharded, self.at_rest = flat, sharded, at_rest
        self.locals = sharded.local_leaves(flat.leaves)
        self.versions: list[int] = []
        self.plain = find_plain(self.locals, self.versions)
        self._describe_others(without)
        leave = _tangled(self.plain, self.images)
        if leave.any():
            self.plain = self.plain.some(~leave)
            self.versions = np.array(self.versions)[~leave].tolist()
            self._describe_others(without)

    def _describe_others(self, without: Collection[int]) -> None:
        """Describe the leaves that are neither plain nor in `without`."""
        rest = np.ones(self.plain.count, bool)
        rest[self.plain.leaves] = False
        rest[list(without)] = False
        self.others: list[int] = np.flatnonzero(rest).tolist()
        self.described: list[m.Leaf] = []  # of each of the others
        self.images = images = Images()
        self.owners: list[int] = []  # of each tensor in `images`, its leaf
        self.roles: list[int] = []  # of each tensor there, as `Images.resolve` takes them
        for index in self.others:
            leaf = self.flat.leaves[index]
            try:
                described = describe(leaf, (), images.add)
            except RelayError:
                path = LeafPaths(self.flat.tree)[index]
                describe(leaf, path, images.add)  # with its path this time
                raise
            alone = isinstance(described, m.TensorLeaf)
            role = LEAF if alone else self.sharded.numbers.get(index, PART)
            added = len(images) - len(self.owners)
            self.described.append(described)
            self.owners.extend([index] * added)
            self.roles.extend([role] * added)

    @cached_property
    def resolved(self) -> list[Image]:
        """The images of the others."""
        return self.images.resolve(
            self.roles, self.sharded.kinds, self._path_of, at_rest=self.at_rest
        )

    def _path_of(self, ticket: int) -> str:
        return show(LeafPaths(self.flat.tree)[self.owners[ticket]])


def _tangled(plain: PlainTensors, others: Images) -> Marks:
    """Marks plain tensors whose storage has bytes that several tensors, or `others`, have."""
    starts, lows = plain.origins, plain.addresses
    more_lows, more_highs = others.spans
    highs = np.concatenate([lows + plain.nbytes, more_highs])
    meet = reaching(np.concatenate([lows, more_lows]), highs)[: len(lows)]
    touched = np.concatenate([np.array(others.origins, np.uint64), starts[meet]])
    return np.isin(starts, touched) if len(touched) else meet
