"""Chunks from one process, over data connections, to where they belong.

A chunk whose place is one run of host memory is received there and hashed on the way. Any other is
received in a buffer and written to the target. Nothing is written after `close`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from torchrelay.deadlines import wait_until_set
from torchrelay.errors import ResourceError
from torchrelay.landing.read_target import ReadTarget
from torchrelay.memory import threads
from torchrelay.memory.gpu.device_chunks import DeviceChunks
from torchrelay.memory.gpu.side import on_side_stream
from torchrelay.memory.host import at_address
from torchrelay.shortage import shortage
from torchrelay.transports.streams.sockets import END, DataSocket


@dataclass(frozen=True)
class ChunkArrived:
    """A chunk is in its place, and has the digest that it was sent with. `data` has its bytes, for
    the next receiver of a chain; `ChunkReceiver.let_go` must be called after that."""

    index: int
    data: torch.Tensor
    buffered: bool  # it came by way of a buffer
    digest: bytes


@dataclass(frozen=True)
class ChunkDamaged:
    """A chunk does not have the digest that it was sent with."""

    index: int


@dataclass(frozen=True)
class FeedLost:
    """No more chunks come from this process."""

    feed: Feed
    reason: str
    shortage: ResourceError | None = None  # if this process was at fault


Connect = Callable[[Callable[[], bool]], DataSocket]  # unless the transfer is over


class ChunkReceiver:
    """The chunks of one transfer, and their memory. Feeds report `ChunkArrived`, `ChunkDamaged`,
    `FeedLost`, and faults of this process."""

    def __init__(
        self,
        target: ReadTarget,
        on_gpu: DeviceChunks,
        buffer: Callable[[int], torch.Tensor],
        report: Callable[[object], None],
        *,
        verify: bool,
        keep: int = 0,
    ) -> None:
        self._target, self._on_gpu = target, on_gpu
        self._verify = verify
        self._host = target.stream.host
        self._buffer, self.report = buffer, report
        self._room = threading.Semaphore(keep) if keep else None
        # Chunks that have not come, and that no connection is at. Each use is one call.
        self.missing = set(range(len(target.chunks)))
        self._over = False

    def take(self, sock: DataSocket, index: int) -> None:
        """Take a chunk, whose index has come."""
        try:
            self.missing.remove(index)
        except KeyError:
            raise ConnectionError(f"chunk {index} came, which was not asked for") from None
        arrived = buffered = False
        try:
            data, buffered = self._memory(index)
            hashes = self._verify and index not in self._on_gpu
            made, sent = sock.take_chunk(memoryview(data.numpy()), hashes=hashes)  # type: ignore[arg-type]
            try:
                arrived = self._landed(index, data, buffered, made, sent)
            except Exception as fault:
                self.report(fault)  # this process cannot take a chunk
                raise
        finally:
            if not arrived:
                self.missing.add(index)
                self.let_go(buffered)
        self.report(ChunkArrived(index, data, buffered, sent) if arrived else ChunkDamaged(index))

    def _memory(self, index: int) -> tuple[torch.Tensor, bool]:
        """Where a chunk goes; and whether that is a buffer."""
        chunks = self._target.chunks
        begin, size = chunks.offsets[index], chunks.sizes[index]
        address = self._host.whole(begin, begin + size)
        if address is not None:
            self._target.begin()
            return at_address(address, size), False
        if self._room is not None:
            while not self._room.acquire(timeout=0.1):
                if self._over:
                    raise ConnectionError("the transfer is over")
        return self._buffer(max(chunks.sizes))[:size], True

    def _landed(
        self, index: int, data: torch.Tensor, buffered: bool, made: bytes, sent: bytes
    ) -> bool:
        """Bring a chunk to its place; whether it has the digest that it was sent with."""
        on_gpu = index in self._on_gpu  # hashed where it has come to lie
        if buffered and (on_gpu or not self._verify or made == sent):
            with on_side_stream():
                self._target.write(index, data)
        if self._verify and on_gpu:
            made = self._on_gpu.digests([index])[index]
        return not self._verify or made == sent

    def let_go(self, buffered: bool) -> None:
        """A chunk is no longer needed: another may be buffered."""
        if buffered and self._room is not None:
            self._room.release()

    def stop(self) -> None:
        """No thread waits for a buffer any more."""
        self._over = True


class Feed:
    """Data connections to one process, and the threads that take its chunks."""

    def __init__(self, receiver: ChunkReceiver, connect: Connect, count: int) -> None:
        self._receiver = receiver
        self._lock = threading.Lock()
        self._open: dict[DataSocket, threading.Event] = {}  # set when its thread is over
        self._over = False
        self._left = count  # connections that have not ended
        for started in range(count):
            try:
                threads.run(partial(self._run, connect), "worker")
            except ResourceError:
                if not started:
                    raise
                self._miss(count - started)  # the others take all chunks
                break

    def _run(self, connect: Connect) -> None:
        over = threading.Event()
        try:
            sock = connect(lambda: self._over)
            with self._lock:
                if self._over:
                    sock.cut()
                    return
                self._open[sock] = over
            while (index := sock.take_index()) != END:
                self._receiver.take(sock, index)
            self._miss(1)
        except Exception as fault:
            if not self._over:
                lost = FeedLost(self, str(fault), shortage(fault))
                self._receiver.report(lost)
        finally:
            over.set()

    def _miss(self, connections: int) -> None:
        """So many connections bring no more chunks."""
        with self._lock:
            self._left -= connections
            ended = not self._left
        if ended:
            self._receiver.report(FeedLost(self, "it has no more chunks"))

    def close(self) -> None:
        """Cut the connections; returns when no thread writes any more."""
        with self._lock:
            self._over = True
            connections, self._open = self._open, {}
        for sock in connections:
            sock.cut()
        for over in connections.values():
            wait_until_set(over)
