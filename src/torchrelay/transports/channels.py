"""TCP connections of our own between two ranks, for the chunks of one transfer at a time.

A process group has one connection to each rank and one thread that serves all of them, and what is
posted there can never be taken back. A channel is a few more connections. They share the work, and
they can be cut: after that nothing is written to memory that was put in. So chunks come straight to
where they belong, and a peer that wakes up late finds nobody.

The sender listens where gloo would, for as long as it takes; a receiver shows the token that it was
told over the group.
"""

from __future__ import annotations

import hmac
import queue
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import torch

from torchrelay.memory import threads
from torchrelay.memory.pool import cores
from torchrelay.state.digest import running_digest
from torchrelay.transports import wire
from torchrelay.transports.addresses import listen_here
from torchrelay.transports.buffers import IN_FLIGHT
from torchrelay.transports.clock import Deadline
from torchrelay.transports.handing import Report, Way

WORTH_BYTES = 64 << 20  # of a state, from which on it gains more than connecting costs
MOST_CONNECTIONS = 16
CONNECT_SECONDS = 3.0
TRY_AGAIN_SECONDS = 60.0  # after a receiver could not connect
POSTED = 4  # chunks at a time on each connection
KEPT = 4  # idle channels of each peer
TOKEN_BYTES = 16
IN_CACHE = 512 << 10  # bytes
SLOW_SECONDS = 0.002  # for the hashing of so many: fifty times what it takes
OFTEN = 4  # times in one transfer

# Seconds until an idle connection is tried, between tries, and how often; milliseconds that bytes
# may be on their way.
_TCP_OPTIONS = {
    "TCP_KEEPIDLE": 60,
    "TCP_KEEPINTVL": 10,
    "TCP_KEEPCNT": 3,
    "TCP_USER_TIMEOUT": 30_000,
}
_NUMBER = struct.Struct("<I")
_Job = tuple[torch.Tensor, Report]


def usual_connections() -> int:
    """Half as many as cores, so that as many can hash: two on small machines, eight on large ones,
    which fill a link of 100 Gbit/s."""
    return max(2, min(8, cores() // 2))


class Channel:
    """One end of some connections. A way over it carries chunks in order, each connection some."""

    def __init__(self, id: str, lanes: list[socket.socket]) -> None:
        self.id, self._lanes = id, [_Lane(lane) for lane in lanes]
        self.whole = True  # until it is cut from here

    def __len__(self) -> int:
        return len(self._lanes)

    @property
    def room(self) -> int:
        """Chunks that should be under way."""
        return POSTED * len(self._lanes)

    @property
    def buffers(self) -> int:
        """Of those, the ones that may be in buffers: enough to keep every connection busy."""
        return max(IN_FLIGHT, len(self._lanes) + 1)

    def way_in(self, transfer: int, *, hashes: bool = False) -> Way:
        """Of one transfer. `hashes`: each chunk is reported with its digest."""
        return _Spread([_Receiving(lane, transfer, hashes) for lane in self._lanes])

    def way_on(self, transfer: int, *, hashes: bool = False) -> Way:
        return _Spread([_Sending(lane, transfer, hashes) for lane in self._lanes])

    def cut(self) -> None:
        """Close the connections: what is under way fails, here and at the other end. No memory that
        was put in is touched from here on."""
        self.whole = False
        for lane in self._lanes:
            lane.cut()


class _Lane:
    """One connection. Nothing is moved on it once `cut` has returned."""

    def __init__(self, connection: socket.socket) -> None:
        connection.settimeout(None)
        _keep_alive(connection)
        self._connection = connection
        self._moving = threading.Lock()

    def __del__(self) -> None:
        self._connection.close()  # with the group that it was kept for

    def send(self, data: memoryview) -> None:
        with self._moving:
            while data.nbytes:
                data = data[self._connection.send(data) :]

    def fill(self, memory: memoryview) -> None:
        with self._moving:
            while memory.nbytes:
                count = self._connection.recv_into(memory, 0, socket.MSG_WAITALL)
                if not count:
                    raise ConnectionResetError("closed by the other side")
                memory = memory[count:]

    def cut(self) -> None:
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)  # wakes up whoever waits in it
        with self._moving:
            self._connection.close()


class _Pieces:
    """How much of a chunk is moved and hashed at a time: what stays in a core's cache.

    Each piece may wait twice for the interpreter's lock. Hashing one takes no time to speak of; if
    it does again and again, another thread keeps the lock, and chunks are moved whole from then on.
    """

    def __init__(self) -> None:
        self._slow = 0

    def of(self, data: memoryview) -> Iterator[memoryview]:
        at = 0
        while at < data.nbytes:
            size = IN_CACHE if self._slow < OFTEN else data.nbytes
            yield data[at : at + size]
            at += size

    def hash(self, digest: Any, piece: memoryview) -> None:
        begun = time.monotonic()
        digest.update(piece)
        self._slow += time.monotonic() - begun > SLOW_SECONDS


class _Thread:
    """Chunks through one connection, one after the other, on a thread of their own."""

    def __init__(self, lane: _Lane, transfer: int, hashes: bool) -> None:
        self._lane, self._transfer, self._hashes = lane, transfer, hashes
        self._pieces = _Pieces()
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._started = False

    def put(self, data: torch.Tensor, report: Report) -> None:
        self._jobs.put((data, report))
        if not self._started:
            self._started = True
            threads.run(self._run, "channel")

    def close(self) -> None:
        self._jobs.put(None)

    def _run(self) -> None:
        fault: Exception | None = None
        begun = False
        while (job := self._jobs.get()) is not None:
            data, report = job
            made = b""
            try:
                if fault is None and not begun:
                    begun = True
                    self._begin()
                if fault is None:
                    made = self._move(memoryview(data.numpy()))  # type: ignore[arg-type]
            except OSError as cause:
                fault = cause
            report(fault, False, made)
            del job, data, report  # not kept alive while waiting for the next

    def _begin(self) -> None:
        raise NotImplementedError

    def _move(self, data: memoryview) -> bytes:
        """Move a chunk; its digest, if that is wanted."""
        raise NotImplementedError


class _Sending(_Thread):
    def _begin(self) -> None:
        self._lane.send(memoryview(_NUMBER.pack(self._transfer)))

    def _move(self, data: memoryview) -> bytes:
        if not self._hashes:
            self._lane.send(data)
            return b""
        digest = running_digest()
        for piece in self._pieces.of(data):
            self._pieces.hash(digest, piece)
            self._lane.send(piece)
        return bytes(digest.digest())


class _Receiving(_Thread):
    def _begin(self) -> None:
        number = bytearray(_NUMBER.size)
        self._lane.fill(memoryview(number))
        if _NUMBER.unpack(number)[0] != self._transfer:
            raise ConnectionError("bytes of another transfer")

    def _move(self, data: memoryview) -> bytes:
        if not self._hashes:
            self._lane.fill(data)
            return b""
        digest = running_digest()
        for piece in self._pieces.of(data):
            self._lane.fill(piece)
            self._pieces.hash(digest, piece)
        return bytes(digest.digest())


class _Spread:
    """Chunks dealt out to several ways, in turn."""

    def __init__(self, ways: list[_Thread]) -> None:
        self._ways, self._next = ways, 0

    def put(self, data: torch.Tensor, report: Report) -> None:
        way = self._ways[self._next]
        self._next = (self._next + 1) % len(self._ways)
        way.put(data, report)

    def close(self) -> None:
        for way in self._ways:
            way.close()


class Berth:
    """A transfer's place for a channel: none, or one that may yet have to be connected."""

    def __init__(
        self,
        record: wire.Channel | None = None,
        channel: Channel | None = None,
        give: Callable[[Channel], None] | None = None,
        listener: socket.socket | None = None,
        far: Callable[[], None] | None = None,
    ) -> None:
        self.record = record
        self.channel: Channel | None = None  # once both sides have it
        self.instead: dict[str, str] = {}  # why there is none although there should be
        self.connections = 0  # that the transfer had
        self._ready, self._give, self._listener, self._far = channel, give, listener, far

    def answered(self, accept: wire.Accept, deadline: Deadline) -> None:
        """What the receiver says to it."""
        if accept.channel:
            self.agreed(deadline)
        elif accept.route == "group":
            if self._far is not None:
                self._far()
            if self._ready is not None:
                self._ready.cut()  # it is lost there

    def agreed(self, deadline: Deadline) -> None:
        """Both sides want it, and the receiver has connected."""
        if self._listener is not None and self.record is not None:
            ends = time.monotonic() + min(CONNECT_SECONDS, deadline.left())
            try:
                self._ready = _accept(self._listener, self.record, ends)
            except OSError as fault:
                self.instead = {"connections": f"not made: {fault}"}
            self._listener.close()
        self.channel = self._ready
        self.connections = 0 if self.channel is None else len(self.channel)

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
        self._idle: dict[tuple[str, int], list[Channel]] = {}  # by side here, and peer
        self._far: set[int] = set()  # peers that could be near, and took the group
        self._failed: dict[int, tuple[float, str]] = {}  # when and why connecting to a peer failed

    def propose(self, peer: int, connections: int, *, near: bool) -> Berth:
        """For a sender: with a channel that is there, or one that the receiver may connect to. One
        that is `near` should need none, unless it took the group before."""
        if not connections or (near and peer not in self._far):
            return Berth(far=lambda: self._far.add(peer))
        give = self._giver("out", peer)
        idle = self._take("out", peer, lambda idle: len(idle) == connections)
        if idle is not None:
            return Berth(wire.Channel(idle.id, connections), idle, give)
        try:
            listener = listen_here()
        except OSError as fault:
            berth = Berth()
            berth.instead = {"connections": f"not made: {fault}"}
            return berth
        host, port = listener.getsockname()[:2]
        token = secrets.token_bytes(TOKEN_BYTES)
        record = wire.Channel(secrets.token_hex(8), connections, host, port, token)
        return Berth(record, None, give, listener)

    def answer(
        self, peer: int, record: wire.Channel | None, connections: int, left: float
    ) -> Berth:
        """For a receiver: connected as the sender proposes, unless that cannot be."""
        berth = Berth()
        if record is None or not connections or not 0 < record.lanes <= MOST_CONNECTIONS:
            return berth
        give = self._giver("in", peer)
        channel = self._take("in", peer, lambda idle: idle.id == record.id)
        if channel is None and record.port:
            failed_at, why = self._failed.get(peer, (float("-inf"), ""))
            if time.monotonic() < failed_at + TRY_AGAIN_SECONDS:
                berth.instead = {"connections": why}
                return berth
            seconds = min(CONNECT_SECONDS, left / 4)
            try:
                channel = _connect(record, time.monotonic() + seconds)
            except (OSError, OverflowError, ValueError) as fault:  # or no host or port at all
                why = f"not made: {record.host} port {record.port}: {fault}"[:300]
                berth.instead = {"connections": why}
                if seconds == CONNECT_SECONDS or not isinstance(fault, TimeoutError):
                    self._failed[peer] = time.monotonic(), why
        return berth if channel is None else Berth(record, channel, give)

    def _giver(self, side: str, peer: int) -> Callable[[Channel], None]:
        def give(channel: Channel) -> None:
            with self._lock:
                idle = self._idle.setdefault((side, peer), [])
                idle.append(channel)
                dropped = [idle.pop(0) for _ in range(len(idle) - KEPT)]
            for one in dropped:
                one.cut()

        return give

    def _take(self, side: str, peer: int, fits: Callable[[Channel], bool]) -> Channel | None:
        with self._lock:
            idle = self._idle.get((side, peer), [])
            found = next(filter(fits, idle), None)
            if found is not None:
                idle.remove(found)
            return found


def _keep_alive(connection: socket.socket) -> None:
    """Have the kernel notice a peer that is gone, and routers a connection that is idle."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _TCP_OPTIONS.items():
        with suppress(OSError, AttributeError):  # of another system, or no TCP
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


# Making one: the receiver connects, says the token and which of the connections it is.


def _connect(record: wire.Channel, ends: float) -> Channel:
    lanes: list[socket.socket] = []
    try:
        for lane in range(record.lanes):
            left = max(ends - time.monotonic(), 0.001)
            lanes.append(socket.create_connection((record.host, record.port), left))
            lanes[-1].sendall(record.token + _NUMBER.pack(lane))
        return Channel(record.id, lanes)
    except BaseException:
        for one in lanes:
            one.close()
        raise


def _accept(listener: socket.socket, record: wire.Channel, ends: float) -> Channel:
    """The connections of whoever shows the token; others are turned away."""
    lanes: dict[int, socket.socket] = {}
    try:
        while len(lanes) < record.lanes:
            listener.settimeout(max(ends - time.monotonic(), 0.001))
            one = listener.accept()[0]
            number = _hear(one, record, ends)
            if number is None or number in lanes:
                one.close()
            else:
                lanes[number] = one
        return Channel(record.id, [lanes[number] for number in range(record.lanes)])
    except BaseException:
        for one in lanes.values():
            one.close()
        raise


def _hear(connection: socket.socket, record: wire.Channel, ends: float) -> int | None:
    """Which connection this is; None for a stranger."""
    size = TOKEN_BYTES + _NUMBER.size
    heard = b""
    with suppress(OSError):
        while len(heard) < size:
            connection.settimeout(max(ends - time.monotonic(), 0.001))
            more = connection.recv(size - len(heard))
            if not more:
                return None
            heard += more
    if len(heard) < size or not hmac.compare_digest(heard[:TOKEN_BYTES], record.token):
        return None
    number: int = _NUMBER.unpack(heard[TOKEN_BYTES:])[0]
    return number if number < record.lanes else None
