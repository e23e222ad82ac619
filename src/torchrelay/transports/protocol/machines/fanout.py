"""Who sends to whom. Plain data: ranks in, ranks out; tested without processes.

With several receivers the bytes cross a link about once: receivers form a chain, each passes a
chunk on as it arrives. Those that no link is before are fed side by side. A receiver whose upstream
is lost is served by the sender directly, and goes on feeding those behind it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple, TypeVar


class Hop(NamedTuple):
    """One receiver's place: where its chunks come from and where they go on to."""

    rank: int
    upstream: int
    downstream: int | None


Receiver = TypeVar("Receiver")


def by_machine(receivers: Sequence[Receiver], machine: Callable[[Receiver], str]) -> list[Receiver]:
    """Receivers of one machine next to each other, machines in the order of their first."""
    order = list(dict.fromkeys(map(machine, receivers)))
    return sorted(receivers, key=lambda receiver: order.index(machine(receiver)))


def chain(sender: int, receivers: Sequence[int]) -> list[Hop]:
    """Receivers in a line, in the order given."""
    before = [sender, *receivers]
    after = [*receivers[1:], None]
    return [Hop(*hop) for hop in zip(receivers, before, after, strict=False)]


def star(sender: int, receivers: Sequence[int]) -> list[Hop]:
    """Each receiver for itself, fed by the sender."""
    return [Hop(receiver, sender, None) for receiver in receivers]


def orphans(hops: Sequence[Hop], lost: Collection[int], finished: Collection[int]) -> list[int]:
    """Receivers whose upstream is lost and who still lack chunks: to be served directly."""
    return [
        hop.rank
        for hop in hops
        if hop.upstream in lost and hop.rank not in lost and hop.rank not in finished
    ]


def head(hops: Sequence[Hop], rank: int, sender: int) -> int:
    """Of the receivers that chunks to this one come through, it included, the sender's own."""
    upstream = {hop.rank: hop.upstream for hop in hops}
    while upstream[rank] != sender:
        rank = upstream[rank]
    return rank


def first_starving(hops: Sequence[Hop], stalled: Collection[int], sender: int) -> int | None:
    """Of receivers that wait in vain, the one nearest to the sender that is not fed by it.

    Those behind it starve because it does: feeding it feeds them.
    """
    for hop in hops:
        if hop.rank in stalled:
            return hop.rank if hop.upstream != sender else None
    return None


def culprits(hops: Sequence[Hop], blocked: Collection[int]) -> list[int]:
    """Of receivers that take no chunks, those to blame: in each chain the one farthest out.

    Those before it are full because it is.
    """
    last: dict[int, int] = {}
    first = {hop.rank: hop.rank for hop in hops}
    for hop in hops:
        if hop.downstream is not None:
            first[hop.downstream] = first[hop.rank]
        if hop.rank in blocked:
            last[first[hop.rank]] = hop.rank
    return list(last.values())


class StallJudge:
    """Finds who holds up the others. One stall soon makes several, so all of them are heard first,
    for `pause` seconds after the first."""

    def __init__(self) -> None:
        self._blocked: set[int] = set()
        self._starving: set[int] = set()
        self._due = float("inf")

    def blocked(self, rank: int, now: float, pause: float) -> None:
        """It takes no chunks."""
        self._blocked.add(rank)
        self._due = min(self._due, now + pause)

    def starving(self, rank: int, now: float, pause: float) -> None:
        """It gets none."""
        self._starving.add(rank)
        self._due = min(self._due, now + pause)

    def verdict(
        self, hops: Sequence[Hop], sender: int, now: float
    ) -> tuple[list[int], int | None] | None:
        """Whom to give up, and whom to feed, once it is time; then it starts anew."""
        if now < self._due:
            return None
        found = culprits(hops, self._blocked), first_starving(hops, self._starving, sender)
        self._blocked, self._starving, self._due = set(), set(), float("inf")
        return found


def served_by(hops: Sequence[Hop], rank: int, upstream: int) -> list[Hop]:
    """The hops after `rank` has got another upstream; its old one no longer feeds anybody."""
    return [
        hop._replace(upstream=upstream)
        if hop.rank == rank
        else hop._replace(downstream=None)
        if hop.downstream == rank
        else hop
        for hop in hops
    ]
