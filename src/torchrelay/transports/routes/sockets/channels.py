"""TCP connections of our own between two ranks, for the chunks of one transfer at a time: made,
agreed on, kept for the next.

A process group has one connection to each rank and one thread that serves all of them, and what is
posted there can never be taken back. A channel is a few more connections, which share the work, and
can be cut. The sender listens where gloo would, for as long as it takes; a receiver shows a random
token there, and tells the sender over the group which. It connects to no other address than those
that this process is connected to already: where that is, is not for a peer to choose.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from torchrelay.deadlines import Deadline
from torchrelay.memory.pool import cores
from torchrelay.transports.group.c10d import ProcessGroup
from torchrelay.transports.protocol import wire
from torchrelay.transports.routes.sockets.addresses import check_peer, listen_here, own
from torchrelay.transports.routes.sockets.tcp import NUMBER, Lanes

NAME = "connections"  # of the route
MOST_CONNECTIONS = 16  # of a channel
CONNECT_SECONDS = 3.0
HELLO_SECONDS = 0.5  # for a connection to say who it is: strangers must not use up the time
TRY_AGAIN_SECONDS = 60.0  # after a receiver could not connect
KEPT = 4  # idle channels of each peer
TOKEN_BYTES = 16


class Channel(msgspec.Struct, array_like=True, frozen=True):
    """Connections that were kept from an earlier transfer, or (with a port) are to be made by the
    receiver, with a token of its own that it says in its answer."""

    id: wire.Name
    lanes: Annotated[int, Meta(ge=1, le=MOST_CONNECTIONS)]
    host: wire.Name = ""
    port: Annotated[int, Meta(ge=0, le=0xFFFF)] = 0


def usual_connections() -> int:
    """Half as many as cores, so that as many can hash: two on small machines, eight on large
    ones."""
    return max(2, min(8, cores() // 2))


class ChannelUse:
    """A transfer's place for a channel: none, or one that may yet have to be connected."""

    def __init__(
        self,
        record: Channel | None = None,
        channel: Lanes | None = None,
        give: Callable[[Lanes], None] | None = None,
        listener: socket.socket | None = None,
        far: Callable[[], None] | None = None,
        token: bytes = b"",
    ) -> None:
        self.record = record
        self.token = token  # that a receiver has shown
        self.channel: Lanes | None = None  # once both sides have it
        self.instead: dict[str, str] = {}  # why there is none although there should be
        self.connections = 0  # that the transfer had
        self._ready, self._give, self._listener, self._far = channel, give, listener, far

    def answered(self, taken: str, token: bytes, deadline: Deadline) -> None:
        """Which route the receiver takes; with this one, it has shown a token."""
        if taken == NAME:
            self.agreed(deadline, token)
        elif taken == "group":
            if self._far is not None:
                self._far()
            if self._ready is not None:
                self._ready.cut()  # it is lost there

    def agreed(self, deadline: Deadline, token: bytes = b"") -> None:
        """Both sides want it, and the receiver has connected, with this token."""
        if self._listener is not None and self.record is not None:
            ends = time.monotonic() + min(CONNECT_SECONDS, deadline.left())
            try:
                self._ready = _accept(self._listener, self.record, token, ends)
            except OSError as fault:
                self.instead = {"connections": f"not made: {fault}"}
            self._listener.close()
        self.channel = self._ready
        self.connections = 0 if self.channel is None else len(self.channel)

    def decline(self) -> None:
        """The transfer goes without it, although both sides may have it."""
        self.end(keep=False)
        self.channel, self.connections = None, 0

    def end(self, *, keep: bool) -> None:
        """The transfer has no more use for it: it is kept for the next one, or cut. One that was
        not agreed on has not been used, and is kept."""
        if self._listener is not None:
            self._listener.close()
        ready, self._ready = self._ready, None
        if ready is None or not ready.whole:
            return
        if (keep or self.channel is None) and self._give is not None:
            self._give(ready)
        else:
            ready.cut()


class Channels:
    """The channels of one process group in this process. Those that are idle are kept, by rank."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: dict[tuple[str, int], list[Lanes]] = {}  # by side here, and peer
        self._far: set[int] = set()  # peers that could be near, and took the group
        self._failed: dict[int, tuple[float, str]] = {}  # when and why connecting to a peer failed

    def propose(
        self, peer: int, connections: int, *, near: bool, local: bool = False
    ) -> ChannelUse:
        """For a sender: with a channel that is there, or one that the receiver may connect to.

        A peer on this host (`near`) normally needs no connection, because it reads memory
        directly; one that took the group before gets one. `local`: only a channel within this host
        is of use.
        """
        if not connections or (near and peer not in self._far):
            return ChannelUse(far=lambda: self._far.add(peer))
        give = self._giver("out", peer)

        def fits(idle: Lanes) -> bool:
            return len(idle) == connections and (idle.local or not local)

        idle = self._take("out", peer, fits)
        if idle is not None:
            return ChannelUse(Channel(idle.id, connections), idle, give)
        try:
            listener = listen_here()
        except OSError as fault:
            use = ChannelUse()
            use.instead = {"connections": f"not made: {fault}"}
            return use
        host, port = listener.getsockname()[:2]
        record = Channel(secrets.token_hex(8), connections, host, port)
        return ChannelUse(record, None, give, listener)

    def answer(
        self,
        peer: int,
        record: Channel | None,
        connections: int,
        left: float,
        *,
        local: bool = False,
    ) -> ChannelUse:
        """For a receiver: connected as the sender proposes, unless that cannot be, or should be
        `local` and is not."""
        use = ChannelUse()
        if record is None or not connections or not 0 < record.lanes <= MOST_CONNECTIONS:
            return use
        give, token = self._giver("in", peer), secrets.token_bytes(TOKEN_BYTES)
        channel = self._take("in", peer, lambda idle: idle.id == record.id)
        if channel is None and record.port:
            failed_at, why = self._failed.get(peer, (float("-inf"), ""))
            if time.monotonic() < failed_at + TRY_AGAIN_SECONDS:
                use.instead = {"connections": why}
                return use
            seconds = min(CONNECT_SECONDS, left / 4)
            try:
                check_peer(record.host)
                if local and not own(record.host):
                    return use
                channel = _connect(record, token, time.monotonic() + seconds)
            except (OSError, OverflowError, ValueError) as fault:  # or no host or port at all
                why = f"not made: {record.host} port {record.port}: {fault}"[:300]
                use.instead = {"connections": why}
                if seconds == CONNECT_SECONDS or not isinstance(fault, TimeoutError):
                    self._failed[peer] = time.monotonic(), why
        return use if channel is None else ChannelUse(record, channel, give, token=token)

    def _giver(self, side: str, peer: int) -> Callable[[Lanes], None]:
        def give(channel: Lanes) -> None:
            with self._lock:
                idle = self._idle.setdefault((side, peer), [])
                idle.append(channel)
                dropped = [idle.pop(0) for _ in range(len(idle) - KEPT)]
            for one in dropped:
                one.cut()

        return give

    def _take(self, side: str, peer: int, fits: Callable[[Lanes], bool]) -> Lanes | None:
        with self._lock:
            idle = self._idle.get((side, peer), [])
            found = next(filter(fits, idle), None)
            if found is not None:
                idle.remove(found)
            return found


_channels: weakref.WeakKeyDictionary[Any, Channels] = weakref.WeakKeyDictionary()
_channels_lock = threading.Lock()


def channels_of(group: ProcessGroup) -> Channels:
    """The one `Channels` of a group in this process: they end with the group."""
    with _channels_lock:
        return _channels.setdefault(group, Channels())


# Making one: the receiver connects, says the token and which of the connections it is.


def _connect(record: Channel, token: bytes, ends: float) -> Lanes:
    lanes: list[socket.socket] = []
    try:
        for lane in range(record.lanes):
            left = max(ends - time.monotonic(), 0.001)
            lanes.append(socket.create_connection((record.host, record.port), left))
            lanes[-1].sendall(token + NUMBER.pack(lane))
        return Lanes(record.id, lanes)
    except BaseException:
        for one in lanes:
            one.close()
        raise


def _accept(listener: socket.socket, record: Channel, token: bytes, ends: float) -> Lanes:
    """The connections of whoever shows the token; others are turned away."""
    if len(token) != TOKEN_BYTES:
        raise OSError("the receiver says no token")
    lanes: dict[int, socket.socket] = {}
    try:
        while len(lanes) < record.lanes:
            listener.settimeout(max(ends - time.monotonic(), 0.001))
            one = listener.accept()[0]
            number = _hear(one, record, token, min(ends, time.monotonic() + HELLO_SECONDS))
            if number is None or number in lanes:
                one.close()
                if time.monotonic() > ends:  # however many knock
                    raise TimeoutError("timed out")
            else:
                lanes[number] = one
        return Lanes(record.id, [lanes[number] for number in range(record.lanes)])
    except BaseException:
        for one in lanes.values():
            one.close()
        raise


def _hear(connection: socket.socket, record: Channel, token: bytes, ends: float) -> int | None:
    """Which connection this is; None for a stranger."""
    size = TOKEN_BYTES + NUMBER.size
    heard = b""
    with suppress(OSError):
        while len(heard) < size:
            connection.settimeout(max(ends - time.monotonic(), 0.001))
            more = connection.recv(size - len(heard))
            if not more:
                return None
            heard += more
    if len(heard) < size or not hmac.compare_digest(heard[:TOKEN_BYTES], token):
        return None
    number: int = NUMBER.unpack(heard[TOKEN_BYTES:])[0]
    return number if number < record.lanes else None
