"""Which receiver goes to which send of a process. Pure: it knows no sockets and no clock.

A receiver that has joined goes to the oldest open send that is for its rank, has not served it yet
and has the step that it asks for. If there is none it waits. A receiver that waits while sends of
other steps alone are open for it has made a mistake, or its send comes a little later: after a
while it goes to the oldest of those sends, which refuses it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

UNDECIDED_SECONDS = 2.0  # at most, until a wrong step is refused


@dataclass(eq=False)
class OpenSend:
    """A send that is under way: its step, and the ranks that it waits for."""

    step: int | None
    ranks: frozenset[int]
    window: float  # seconds
    inbox: Any = None  # takes its receivers
    wanted: set[int] = field(default_factory=set)
    overlaps: frozenset[int] = frozenset()  # ranks for which another send was open meanwhile

    def __post_init__(self) -> None:
        self.wanted = set(self.ranks)

    def fits(self, rank: int, step: int | None) -> bool:
        return rank in self.wanted and (step is None or step == self.step)


@dataclass(eq=False)
class ReceiverJoined:
    """A receiver that has joined, with the step that it asks for."""

    rank: int
    step: int | None
    connection: Any = None
    message: Any = None  # its `Join`
    several: bool = False  # another state was or is here for it: it cannot tell which one it got
    undecided_since: float | None = None  # only sends of other steps are open for it


Match = tuple[ReceiverJoined, OpenSend]


class Matcher:
    """The open sends and the waiting receivers of one process in one group."""

    def __init__(self) -> None:
        self._sends: list[OpenSend] = []
        self._joins: list[ReceiverJoined] = []

    def open(self, send: OpenSend) -> None:
        # Both stay marked when one of them ends. A receiver that named no step, and was refused one
        # of them, must not take the other together with the first of another rank.
        for other in self._sends:
            shared = send.ranks & other.ranks
            send.overlaps, other.overlaps = send.overlaps | shared, other.overlaps | shared
        self._sends.append(send)

    def close(self, send: OpenSend) -> None:
        if send in self._sends:
            self._sends.remove(send)

    def join(self, join: ReceiverJoined) -> None:
        join.undecided_since = None
        for other in self._joins:
            if other.rank == join.rank:
                join.several = other.several = True
        self._joins.append(join)

    def leave(self, join: ReceiverJoined) -> None:
        if join in self._joins:
            self._joins.remove(join)

    def matches(self) -> Iterator[Match]:
        """The receivers that can be served now, each with its send."""
        for join in list(self._joins):
            send = next((one for one in self._sends if one.fits(join.rank, join.step)), None)
            if send is None:
                continue
            join.several = join.several or join.rank in send.overlaps
            self._joins.remove(join)
            send.wanted.discard(join.rank)
            yield join, send

    def wrong_steps(self, now: float) -> tuple[list[Match], float | None]:
        """The receivers whose step is not going to come, each with the send that it was probably
        meant for, and when to ask again."""
        found: list[Match] = []
        again: float | None = None
        for join in list(self._joins):
            sends = [one for one in self._sends if join.rank in one.wanted]
            if not sends:
                join.undecided_since = None
                continue
            if join.undecided_since is None:
                join.undecided_since = now
            seconds = min(UNDECIDED_SECONDS, *(one.window for one in sends))
            due = join.undecided_since + seconds
            if due <= now:
                self._joins.remove(join)
                sends[0].wanted.discard(join.rank)
                found.append((join, sends[0]))
            else:
                again = due if again is None else min(again, due)
        return found, again
