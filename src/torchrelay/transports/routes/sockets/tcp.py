"""Connections that can be cut, and how chunks go through them.

After `Lanes.cut` nothing is written to memory that was put in. So chunks come straight to where
they belong, and a peer that wakes up late finds nobody.
"""

from __future__ import annotations

import queue
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import torch

from torchrelay.memory import threads
from torchrelay.record.digest import running_digest
from torchrelay.transports.routes.hops import Handed, Way
from torchrelay.transports.transfer.buffers import IN_FLIGHT

POSTED = 4  # chunks at a time on each connection
IN_CACHE = 512 << 10  # bytes
SLOW_SECONDS = 0.002  # for the hashing of so many: fifty times what it takes
OFTEN = 4  # times in one transfer
NUMBER = struct.Struct("<I")

# Seconds until an idle connection is tried, between tries, and how often; milliseconds that bytes
# may be on their way.
_TCP_OPTIONS = {
    "TCP_KEEPIDLE": 60,
    "TCP_KEEPINTVL": 10,
    "TCP_KEEPCNT": 3,
    "TCP_USER_TIMEOUT": 30_000,
}
_Job = tuple[torch.Tensor, Handed]


class Lanes:
    """One end of some connections. A way over it carries chunks in order, each connection some."""

    def __init__(self, id: str, lanes: list[socket.socket]) -> None:
        self.id, self._lanes = id, [_Lane(lane) for lane in lanes]
        self.whole = True  # until it is cut from here

    def __len__(self) -> int:
        return len(self._lanes)

    @property
    def local(self) -> bool:
        """Whether both ends are on this host: what goes through it takes nothing from a link."""
        return all(lane.local for lane in self._lanes)

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

    @property
    def local(self) -> bool:
        with suppress(OSError):  # of one that is closed
            mine, theirs = self._connection.getsockname(), self._connection.getpeername()
            return bool(mine[:1] == theirs[:1])
        return False

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


class _LaneThread:
    """Chunks through one connection, one after the other, on a thread of their own."""

    def __init__(self, lane: _Lane, transfer: int, hashes: bool) -> None:
        self._lane, self._transfer, self._hashes = lane, transfer, hashes
        self._pieces = _Pieces()
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._started = False

    def put(self, data: torch.Tensor, report: Handed) -> None:
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
            except Exception as cause:  # of the connection, as a rule
                fault = cause
            report(fault, False, made)
            del job, data, report  # not kept alive while waiting for the next

    def _begin(self) -> None:
        raise NotImplementedError

    def _move(self, data: memoryview) -> bytes:
        """Move a chunk; its digest, if that is wanted."""
        raise NotImplementedError


class _Sending(_LaneThread):
    def _begin(self) -> None:
        self._lane.send(memoryview(NUMBER.pack(self._transfer)))

    def _move(self, data: memoryview) -> bytes:
        if not self._hashes:
            self._lane.send(data)
            return b""
        digest = running_digest()
        for piece in self._pieces.of(data):
            self._pieces.hash(digest, piece)
            self._lane.send(piece)
        return bytes(digest.digest())


class _Receiving(_LaneThread):
    def _begin(self) -> None:
        number = bytearray(NUMBER.size)
        self._lane.fill(memoryview(number))
        if NUMBER.unpack(number)[0] != self._transfer:
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

    def __init__(self, ways: list[_LaneThread]) -> None:
        self._ways, self._next = ways, 0

    def put(self, data: torch.Tensor, report: Handed) -> None:
        way = self._ways[self._next]
        self._next = (self._next + 1) % len(self._ways)
        way.put(data, report)

    def close(self) -> None:
        for way in self._ways:
            way.close()


def _keep_alive(connection: socket.socket) -> None:
    """Have the kernel notice a peer that is gone, and routers a connection that is idle."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _TCP_OPTIONS.items():
        with suppress(OSError, AttributeError):  # of another system, or no TCP
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
