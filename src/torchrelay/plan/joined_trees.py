"""The trees of several live ranks, laid over each other.

Where two ranks have a path, the first one's leaf counts. Ranks mostly have one tree; then a leaf
has the same number on all of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import NamedTuple

import msgspec

from torchrelay.plan.overlay import laid_over
from torchrelay.record.rows import LeafRows
from torchrelay.record.schema import Record
from torchrelay.record.values import encode_key
from torchrelay.state.paths import LeafPaths
from torchrelay.state.tree import show

_encode = msgspec.msgpack.Encoder().encode


class Home(NamedTuple):
    """Ranks with one tree, by their places. Its leaves are counted from `shift` on in the joined
    tree; the first of the ranks has those that are not distributed."""

    members: list[int]
    shift: int


class JoinedTrees:
    """The records of `ranks`, which are valid streams, in the order of the ranks.

    `exact`: all have one tree, so everything in it was one state.
    """

    def __init__(self, records: Mapping[int, Record]) -> None:
        self.ranks = list(records)
        self.records = list(records.values())
        self.rows = [LeafRows(record) for record in self.records]
        self.homes: list[Home] = []
        self.leaves = 0
        for place, rows in enumerate(self.rows):
            home = next((one for one in self.homes if self.first(one).tree == rows.tree), None)
            if home is None:
                self.homes.append(Home([place], self.leaves))
                self.leaves += len(rows)
            else:
                home.members.append(place)
        self.exact = len(self.homes) == 1
        firsts = map(self.first, self.homes)
        self.tree = laid_over([(rows.tree, len(rows)) for rows in firsts])

    def first(self, home: Home) -> LeafRows:
        """The leaves of the first rank of a home."""
        return self.rows[home.members[0]]

    @cached_property
    def _paths(self) -> list[LeafPaths]:
        return [LeafPaths(self.first(home).tree) for home in self.homes]

    def path(self, leaf: int) -> str:
        """The path of a leaf of the joined tree, for a message."""
        number = max(n for n, home in enumerate(self.homes) if home.shift <= leaf)
        return show(self._paths[number][leaf - self.homes[number].shift])

    def path_key(self, home: int, leaf: int) -> bytes:
        """The path of a leaf, the same as of another tree's leaf at that path. Spelled as bytes: a
        peer's keys may hash alike."""
        steps = self._paths[home].steps(leaf - self.homes[home].shift)
        return _encode([encode_key(key) for key in steps])
