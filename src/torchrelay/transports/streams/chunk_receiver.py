"""Chunks from one process, over data connections, to where they belong.

A chunk whose place is one run of host memory is received there and hashed on the way. Any other is
received in a buffer and handed to the landing. Nothing is written after `close`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from torchrelay.deadlines import wait_until_set
from torchrelay.landing.seam import Landing
from torchrelay.memory import threads
from torchrelay.memory.gpu.device_chunks import DeviceChunks
from torchrelay.memory.gpu.kernels import digest_of
from torchrelay.memory.gpu.side import in_use, on_side_stream
from torchrelay.memory.host import at_address
from torchrelay.transports.streams.buffers import BufferPool
from torchrelay.transports.streams.sockets import END, DataSocket


@dataclass(frozen=True)
class ChunkArrived:
    """A chunk is in its place, and has the digest that it was sent with. `data` has its bytes, for
    the next receiver of a chain; `buffer` must be given back after that."""

    index: int
    data: torch.Tensor
    buffer: torch.Tensor | None
    digest: bytes


@dataclass(frozen=True)
class ChunkDamaged:
    """A chunk does not have the digest that it was sent with."""

    index: int


@dataclass(frozen=True)
class FeedLost:
    """No more chunks come from this process."""

    receiver: ChunkReceiver
    reason: str


Connect = Callable[[Callable[[], bool]], DataSocket]  # unless the transfer is over


class ChunkArrivals:
    """The outstanding chunks of one transfer, and their memory; shared by its connections."""

    def __init__(
        self,
        landing: Landing,
        on_gpu: DeviceChunks,
        buffers: BufferPool,
        *,
        verify: bool,
        cells: bool,
        keep: int = 0,
    ) -> None:
        self.landing, self.on_gpu = landing, on_gpu
        self.verify, self.cells = verify, cells
        self._places = landing.places()
        self._host = self._places.host  # made here, not by the threads that write to it
        self._buffers = buffers
        self._room = threading.Semaphore(keep) if keep else None
        self._lock = threading.Lock()
        self.missing = set(range(len(landing.chunks)))
        self._under_way: set[int] = set()
        self._over = False
        self._pinned = landing.on_device and in_use()

    def claim(self, index: int) -> bool:
        """Whether a chunk is still to come, and no other connection is at it."""
        with self._lock:
            if index not in self.missing or index in self._under_way:
                return False
            self._under_way.add(index)
            return True

    def release(self, index: int, *, arrived: bool) -> None:
        with self._lock:
            self._under_way.discard(index)
            if arrived:
                self.missing.discard(index)

    def memory(self, index: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Where a chunk goes; and the buffer, if that is one."""
        chunks = self.landing.chunks
        begin, size = chunks.offsets[index], chunks.sizes[index]
        if index not in self._places.indirect:
            address = self._host.whole(begin, begin + size)
            if address is not None:
                self.landing.torn = self.landing.torn or self._places.live
                return at_address(address, size), None
        if self._room is not None:
            while not self._room.acquire(timeout=0.1):
                if self._over:
                    raise ConnectionError("the transfer is over")
        buffer = self._buffers.take(max(chunks.sizes), pinned=self._pinned)
        return buffer[:size], buffer

    def give(self, buffer: torch.Tensor | None) -> None:
        """Take a buffer back."""
        if buffer is not None:
            self._buffers.give(buffer)
            if self._room is not None:
                self._room.release()

    def stop(self) -> None:
        """No thread waits for a buffer any more."""
        self._over = True


class ChunkReceiver:
    """Takes chunks from one process. Reports `ChunkArrived`, `ChunkDamaged`, `FeedLost`, faults."""

    def __init__(self, arrivals: ChunkArrivals, report: Callable[[object], None]) -> None:
        self._arrivals, self._report = arrivals, report
        self._lock = threading.Lock()
        self._open: dict[DataSocket, threading.Event] = {}  # set when its thread is over
        self._over = False
        self._left = 0  # connections that have not ended
        self.connections = 0

    def connect(self, connect: Connect, count: int) -> None:
        """Make data connections, and take what comes."""
        self.connections = self._left = count
        for _ in range(count):
            threads.run(partial(self._run, connect), "worker")

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
                self._take(sock, index)
            with self._lock:
                self._left -= 1
                ended = not self._left
            if ended:
                self._report(FeedLost(self, "it has no more chunks"))
        except Exception as fault:
            if not self._over:
                self._report(FeedLost(self, str(fault)))
        finally:
            over.set()

    def _take(self, sock: DataSocket, index: int) -> None:
        arrivals = self._arrivals
        if not arrivals.claim(index):
            raise ConnectionError(f"chunk {index} came, which was not asked for")
        arrived = False
        try:
            data, buffer = arrivals.memory(index)
            hashes = arrivals.verify and index not in arrivals.on_gpu and not arrivals.cells
            made, sent = sock.take_chunk(memoryview(data.numpy()), hashes=hashes)  # type: ignore[arg-type]
            try:
                arrived = self._landed(index, data, buffer, made, sent)
            except Exception as fault:
                self._report(fault)  # this process cannot take a chunk
                raise
        finally:
            arrivals.release(index, arrived=arrived)
        if arrived:
            self._report(ChunkArrived(index, data, buffer, sent))
        else:
            arrivals.give(buffer)
            self._report(ChunkDamaged(index))

    def _landed(
        self, index: int, data: torch.Tensor, buffer: torch.Tensor | None, made: bytes, sent: bytes
    ) -> bool:
        """Bring a chunk to its place; whether it has the digest that it was sent with."""
        arrivals = self._arrivals
        on_gpu = index in arrivals.on_gpu  # hashed where it has come to lie
        if arrivals.verify and not made and not on_gpu:
            made = digest_of(data, cells=arrivals.cells)
        if buffer is not None and (on_gpu or not arrivals.verify or made == sent):
            with on_side_stream():
                arrivals.landing.write(index, data)
        if arrivals.verify and on_gpu:
            made = arrivals.on_gpu.digests([index])[index]
        return not arrivals.verify or made == sent

    def close(self) -> None:
        """Cut the connections; returns when no thread writes any more."""
        with self._lock:
            self._over = True
            connections, self._open = self._open, {}
        for sock in connections:
            sock.cut()
        for over in connections.values():
            wait_until_set(over)
