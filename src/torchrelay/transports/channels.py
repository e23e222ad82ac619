"""Connections of our own between two ranks, for the chunks of one transfer at a time.

A process group has one connection to each rank and one thread that serves all of them, and what is
posted there can never be taken back. A channel is a few more connections of the same kind (gloo),
which find each other through the group's store. They share the work, and they can be cut: after
that nothing is written to memory that was posted. So chunks come straight to where they belong,
and a peer that wakes up late finds nobody.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from torchrelay.memory import threads
from torchrelay.memory.pool import cores
from torchrelay.transports import c10d, wire
from torchrelay.transports.c10d import ProcessGroup, inside_backend
from torchrelay.transports.clock import Deadline
from torchrelay.transports.handing import Report, Way, way_in, way_on

WORTH_BYTES = 64 << 20  # of a state, from which on it gains more than connecting costs
CONNECT_SECONDS = 5.0
KEPT = 4  # idle ones of each peer; the other end may have cut the oldest
POSTED = 4  # chunks at a time on each connection
SENDER, RECEIVER = 0, 1
_TAG = 1
MOST_CONNECTIONS = 16
_MOST_ID = 64  # characters


def usual_connections() -> int:
    """One for each core, up to what a wide link needs."""
    return min(4, cores())


class Channel:
    """One end of some connections. Its ways carry chunks in order, each connection some of them."""

    def __init__(self, id: str, lanes: list[ProcessGroup], side: int) -> None:
        self.id, self._lanes, self._peer = id, lanes, 1 - side
        self.whole = True  # until it is cut from here
        for lane in lanes:
            c10d.use(lane)

    def __len__(self) -> int:
        return len(self._lanes)

    @property
    def room(self) -> int:
        """Chunks that should be under way."""
        return POSTED * len(self._lanes)

    def way_in(self) -> Way:
        return _Spread([way_in(lane, self._peer, _TAG, None) for lane in self._lanes])

    def way_on(self) -> Way:
        return _Spread([way_on(lane, self._peer, _TAG, notes=False) for lane in self._lanes])

    def cut(self) -> None:
        """Close the connections: what is posted fails, and its memory is not touched from here on.

        The other end notices.
        """
        self.whole = False
        for lane in self._lanes:
            c10d.cut(lane)


class _Spread:
    """Chunks dealt out to several ways, in turn."""

    def __init__(self, ways: list[Way]) -> None:
        self._ways, self._next = ways, 0

    def put(self, data: torch.Tensor, report: Report) -> None:
        way = self._ways[self._next]
        self._next = (self._next + 1) % len(self._ways)
        way.put(data, report)

    def close(self) -> None:
        for way in self._ways:
            way.close()


class Berth:
    """A transfer's place for a channel: none, one that is there, or one to make."""

    def __init__(
        self,
        record: wire.Channel | None = None,
        channel: Channel | None = None,
        give: Callable[[Channel], None] | None = None,
        make: Callable[[float], Channel] | None = None,
    ) -> None:
        self.record = record
        self.instead: dict[str, str] = {}  # why there is no channel although both sides agreed
        self.connections = 0  # that the transfer had
        self._channel, self._give, self._make = channel, give, make
        self._connecting: threads.Running | None = None
        self._lock = threading.Lock()
        self._agreed = self._over = False

    def agreed(self, deadline: Deadline) -> None:
        """Both sides want it: connect, beside whatever is done meanwhile."""
        self._agreed = True
        if self._channel is None and self._make is not None:
            seconds = min(CONNECT_SECONDS, max(deadline.left() / 4, 0.001))
            self._connecting = threads.run(lambda: self._connect(seconds), "connect")

    def _connect(self, seconds: float) -> None:
        assert self._make is not None
        try:
            with inside_backend():
                channel = self._make(seconds)
        except Exception as fault:  # whatever the store or the backend raises
            self.instead = {"connections": f"not made: {fault}"[:300]}
            return
        with self._lock:
            self._channel = channel
            if self._over:
                channel.cut()

    def channel(self, deadline: Deadline) -> Channel | None:
        """The channel, once it stands; None where it could not be made in time."""
        if not self._agreed:
            return None
        if self._connecting is not None:
            seconds = min(CONNECT_SECONDS + 1, deadline.left() / 2)
            if not self._connecting.wait(seconds):
                self.instead = {"connections": f"not made within {seconds:.3g} s"}
        self.connections = 0 if self._channel is None else len(self._channel)
        return self._channel

    def refused(self) -> None:
        """The other side does not want it. One that was made before is lost there."""
        with self._lock:
            if self._channel is not None and not self._over:
                self._channel.cut()
            self._over = True

    def end(self, *, keep: bool) -> None:
        """The transfer has no more use for it: it is kept for the next one, or cut. One that was
        not agreed on has not been used, and is kept."""
        with self._lock:
            channel, over, self._over = self._channel, self._over, True
            if channel is None or over:
                return
            if (keep or not self._agreed) and channel.whole and self._give is not None:
                self._give(channel)
            else:
                channel.cut()


class Channels:
    """The channels of one process group in this process. Those that are idle are kept, by rank."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._idle: dict[tuple[int, int], list[Channel]] = {}  # by side here, and peer

    def propose(self, peer: int, connections: int) -> Berth:
        """For a sender: with a channel that is there, or one to make."""
        if self._store is None or not connections:
            return Berth()
        channel = self._take(SENDER, peer, lambda idle: len(idle) == connections)
        id = secrets.token_hex(8) if channel is None else channel.id
        record = wire.Channel(id, connections, channel is not None)
        return self._berth(SENDER, peer, record, channel)

    def answer(self, peer: int, record: wire.Channel | None, connections: int) -> Berth:
        """For a receiver: as a sender proposes, unless that is not wanted, or was lost here."""
        if self._store is None or record is None or not connections:
            return Berth()
        if not 0 < record.lanes <= MOST_CONNECTIONS or not 0 < len(record.id) <= _MOST_ID:
            return Berth()
        channel = self._take(RECEIVER, peer, lambda idle: idle.id == record.id)
        if record.made != (channel is not None):
            return Berth()
        return self._berth(RECEIVER, peer, record, channel)

    def _berth(self, side: int, peer: int, record: wire.Channel, channel: Channel | None) -> Berth:
        def give(channel: Channel) -> None:
            with self._lock:
                idle = self._idle.setdefault((side, peer), [])
                idle.append(channel)
                del idle[:-KEPT]

        store = self._store
        return Berth(record, channel, give, lambda seconds: _connect(store, record, side, seconds))

    def _take(self, side: int, peer: int, fits: Callable[[Channel], bool]) -> Channel | None:
        with self._lock:
            idle = self._idle.get((side, peer), [])
            found = next(filter(fits, idle), None)
            if found is not None:
                idle.remove(found)
            return found


def store_of(group: Any) -> Any:
    """The store that ranks of a group find each other by; None where there is none to use."""
    if not dist.is_gloo_available():
        return None
    with suppress(Exception):  # a wrapper around a group need not have one
        return group.get_group_store()
    return None


def _connect(store: Any, record: wire.Channel, side: int, seconds: float) -> Channel:
    # A connection to the store of its own: a wait there keeps all other users of one waiting.
    with suppress(Exception):
        store = store.clone()
    lanes: list[Any] = [
        dist.ProcessGroupGloo(
            dist.PrefixStore(f"torchrelay/channel/{record.id}/{lane}", store),  # type: ignore[attr-defined]
            side,
            2,
            timedelta(seconds=seconds),
        )
        for lane in range(record.lanes)
    ]
    return Channel(record.id, lanes, side)
