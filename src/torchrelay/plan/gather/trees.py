"""The trees of several live ranks, next to each other."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import NamedTuple

import msgspec

from torchrelay.record.rows import LeafRows
from torchrelay.record.schema import Record
from torchrelay.record.values import encode_key
from torchrelay.state.paths import LeafPaths
from torchrelay.state.tree import show

_encode = msgspec.msgpack.Encoder().encode


class Home(NamedTuple):
    """Ranks with one tree, by their places. The first of them has the leaves that are not
    distributed. In the union its leaves are counted from `shift` on, its images from `image` on."""

    members: list[int]
    shift: int
    image: int


class JoinedTrees:
    """The records of `ranks`, which are valid streams, in the order of the ranks. Ranks mostly have
    one tree; then a leaf has the same number on all of them."""

    def __init__(self, records: Mapping[int, Record]) -> None:
        self.ranks = list(records)
        self.records = list(records.values())
        self.rows = [LeafRows(record) for record in self.records]
        self.homes: list[Home] = []
        self.leaves = self.images = 0
        for place, rows in enumerate(self.rows):
            home = next((one for one in self.homes if self.first(one).tree == rows.tree), None)
            if home is None:
                self.homes.append(Home([place], self.leaves, self.images))
                self.leaves += len(rows)
                self.images += rows.record.images
            else:
                home.members.append(place)

    def first(self, home: Home) -> LeafRows:
        """The leaves of the first rank of a home."""
        return self.rows[home.members[0]]

    @cached_property
    def _paths(self) -> list[LeafPaths]:
        return [LeafPaths(self.first(home).tree) for home in self.homes]

    def path(self, leaf: int) -> str:
        """The path of a leaf, for a message."""
        number = max(n for n, home in enumerate(self.homes) if home.shift <= leaf)
        return show(self._paths[number][leaf - self.homes[number].shift])

    def path_key(self, home: int, leaf: int) -> bytes:
        """The path of a leaf, the same as of another tree's leaf at that path. Spelled as bytes: a
        peer's keys may hash alike."""
        steps = self._paths[home].steps(leaf - self.homes[home].shift)
        return _encode([encode_key(key) for key in steps])
