"""The chain of receivers. Pure.

With several receivers the bytes leave the sender about once: the first receiver takes them from the
sender, and each passes a chunk on as it arrives.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

Member = TypeVar("Member")


class Link(NamedTuple):
    """A receiver, the one that feeds it (None: the sender) and the one that it feeds."""

    rank: int
    upstream: int | None
    downstream: int | None
    depth: int


def by_machine(members: Sequence[Member], machine: Callable[[Member], str]) -> list[Member]:
    """Receivers of one machine next to each other, machines in the order of their first: bytes
    cross to a machine once."""
    order = list(dict.fromkeys(map(machine, members)))
    return sorted(members, key=lambda member: order.index(machine(member)))


def chain(ranks: Sequence[int]) -> list[Link]:
    """Receivers in a row, in the order given."""
    before = [None, *ranks]
    after = [*ranks[1:], None]
    rows = zip(ranks, before, after, strict=False)
    return [Link(*row, depth) for depth, row in enumerate(rows)]
