"""The data phase of a receive on one machine: this process takes the bytes itself.

What the sender has in host memory is read from there straight to where it belongs, by a few threads
and without the sender's help. What it has elsewhere comes through a ring of shared buffers. At the
end the sender is asked whether all is still what it sent; only then is the state whole.
"""

from __future__ import annotations

import ctypes
import queue
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from torchrelay.deadlines import Deadline
from torchrelay.errors import DigestError, PeerLostError, RemoteProtocolError, TransferTimeoutError
from torchrelay.geometry.runs import Moves, Runs, moves
from torchrelay.landing.places import Places
from torchrelay.landing.seam import Landing
from torchrelay.memory.kernels import Tables, by_device
from torchrelay.memory.side import on_side_stream
from torchrelay.memory.vectors import Batch, OtherMemoryError, batches, copy, read
from torchrelay.record.digest import RollingDigest, digest
from torchrelay.record.pause import gc_paused
from torchrelay.transports.group.lines import ControlLine
from torchrelay.transports.protocol import wire
from torchrelay.transports.protocol.events import RETRIES, failure
from torchrelay.transports.routes import device_digests
from torchrelay.transports.routes.chunk_ways import Shares, share
from torchrelay.transports.routes.device_digests import Sources
from torchrelay.transports.routes.read_tables import Readings
from torchrelay.transports.routes.ring import MappedRing
from torchrelay.transports.transfer.buffers import BufferPool
from torchrelay.transports.transfer.worker import Worker

TICK = 1.0
IN_CACHE = 1 << 20  # bytes that are read and then hashed
_ZEROS = np.zeros(64 << 10, np.uint8)


class Ways(NamedTuple):
    """Where bytes come from and go to, and which way each chunk takes."""

    sources: Runs  # of the sender's host memory
    readings: Readings
    opened: Sources  # device memory of the sender
    places: Places
    shares: Shares
    tables: Tables  # of device memory

    @property
    def hashed(self) -> tuple[int, ...]:
        """The chunks whose digests count, where digests do: device memory has its own."""
        return (*self.straight_and_hashed, *self.shares.buffered, *self.shares.ringed)

    @property
    def straight_and_hashed(self) -> list[int]:
        return [chunk for chunk in self.shares.straight if chunk not in self.shares.opened]


def find_ways(
    landing: Landing,
    memory: wire.Memory,
    opened: Sources,
    tables: Tables,
    readings: Readings,
    *,
    reads: bool,
    rank: int,
) -> Ways:
    """`RemoteProtocolError` where what the sender says of its memory cannot be."""
    chunks, places = landing.chunks, landing.places()
    try:
        sources = readings.unpack(memory.host, chunks.stream_bytes)
        shares = share(
            chunks,
            places,
            sources,
            memory,
            reads=reads,
            exported=Runs.merged(*(runs.stretches for runs in opened.values())) if opened else None,
            verify=memory.verify,
        )
    except ValueError as fault:
        raise RemoteProtocolError(str(fault), rank=rank, phase="join") from None
    return Ways(sources, readings, opened, places, shares, tables)


def _clear(gaps: Runs) -> None:
    """Write zeros where the sender's memory leads nowhere: what the memory here was used for before
    is no part of the state."""
    if not len(gaps.starts):
        return
    whole = Moves(gaps.starts, gaps.starts, gaps.addresses, gaps.stops - gaps.starts)
    cut = whole.cut(len(_ZEROS))
    copy(cut._replace(sources=np.full(len(cut.nbytes), _ZEROS.ctypes.data, np.uint64)))


@dataclass(frozen=True)
class Did:
    """A job is over."""

    nbytes: int = 0
    fault: Exception | None = None
    free_slot: int | None = None


class Pull:
    """Runs until every byte is in its place and the sender has confirmed it."""

    def __init__(
        self,
        line: ControlLine,
        events: queue.SimpleQueue[object],
        landing: Landing,
        memory: wire.Memory,
        ways: Ways,
        threads: int,
        *,
        ring: MappedRing | None,
        named: Callable[[int, int], str],
        step: int | None,
        deadline: Deadline,
        buffers: BufferPool,
        progress: Callable[[int, int], None],
    ) -> None:
        self._line, self._events, self._landing = line, events, landing
        self._sender, self._pid = line.peer, memory.place.pid
        self._memory, self._ways, self._ring = memory, ways, ring
        self._verify = memory.verify
        self._step, self._deadline, self._named = step, deadline, named
        self._buffers, self._progress = buffers, progress
        self._chunks = landing.chunks
        self._digests: dict[int, bytes] = {}
        if ways.places.making:
            threads = max(1, threads - 1)
        if ways.shares.buffered:
            # Each thread has a buffer of its own.
            threads = min(threads, max(1, buffers.limit // max(self._chunks.sizes)))
        self._worker = Worker(threads, niceness=0)
        self._outstanding = 0
        self._unfilled: list[int] = []  # chunks to ask for
        self._asked: dict[int, int] = {}  # the chunk that each slot was asked for
        self._trailer: wire.Trailer | None = None
        self._done_bytes = 0
        self.retried: list[int] = []
        self.wire_bytes = 0
        self.messages = 0

    @property
    def done(self) -> str:
        return f"{self._done_bytes} of {self._chunks.stream_bytes} bytes done"

    def run(self) -> None:
        shares, places = self._ways.shares, self._ways.places
        if places.live:
            self._landing.torn = True
        if self._verify or shares.buffered or shares.ringed:
            places.host  # noqa: B018  # made here, not by the threads that write to it
        self._read_straight(places, shares)
        self._read_buffered(shares.buffered)
        self._ask_for(shares.ringed)
        copied = self._copy_device_memory(places)
        self._wait()
        self._confirm()
        while bad := self._unequal(copied):
            self._ask_for([chunk for chunk in bad if chunk in shares.ringed])
            self._read_buffered([chunk for chunk in bad if chunk in shares.buffered])
            for chunk in set(bad) & set(self._ways.straight_and_hashed):
                self._submit(partial(self._read_and_hash, chunk))
            self._wait()
            self._confirm()
        self._count_rest()

    def finish(self) -> None:
        """Nobody waits for bytes from here."""

    def close(self) -> None:
        """Nothing is written after this."""
        self._worker.stop()

    # Straight from the sender's memory

    def _read_straight(self, places: Places, shares: Shares) -> None:
        sources, straight = self._ways.sources, shares.straight
        if self._verify:
            straight = self._ways.straight_and_hashed
            _clear(self._of(places.host, straight).without(sources))
            for chunk in straight:
                self._submit(partial(self._read_and_hash, chunk))
            return
        sources = self._of(sources, straight)
        with gc_paused():  # memory may be made as it goes
            for part in places.parts():
                _clear(self._of(part, straight).without(sources.facing(part)))
                for batch in self._ways.readings.batches(sources.facing(part), part):
                    self._submit(partial(self._read_batch, batch))

    def _of(self, runs: Runs, chunks: list[int]) -> Runs:
        """What they have of these chunks."""
        if len(chunks) == len(self._chunks):
            return runs
        offsets, sizes = self._chunks.offsets, self._chunks.sizes
        return runs.only([offsets[i] for i in chunks], [sizes[i] for i in chunks])

    def _read_buffered(self, chunks: Iterable[int]) -> None:
        for chunk in chunks:
            self._submit(partial(self._read_chunk, chunk))

    def _read_batch(self, batch: Batch) -> Did:
        read(self._pid, batch)
        return Did(batch.nbytes)

    def _read_and_hash(self, chunk: int) -> Did:
        """Some at a time, each piece hashed where it has come to lie while it is in cache."""
        begin, size = self._chunks.offsets[chunk], self._chunks.sizes[chunk]
        found = moves(self._ways.sources.only([begin], [size]), self._ways.places.host)
        rolling = RollingDigest(begin)
        for batch in batches(found, piece=IN_CACHE):
            read(self._pid, batch)
            rolling.add(batch.copies.positions.tolist(), batch.here.tolist())
        self._digests[chunk] = rolling.end(begin + size)
        return Did(size)

    def _read_chunk(self, chunk: int) -> Did:
        """By way of a buffer, for what does not land in host memory as it comes."""
        size = self._chunks.sizes[chunk]
        begin = self._chunks.offsets[chunk]
        buffer = self._buffers.take(
            max(self._chunks.sizes), pinned=len(self._ways.places.device.starts) > 0
        )
        data = buffer[:size]
        whole = Runs([begin], [data.data_ptr()], [size])
        parts = batches(moves(self._ways.sources, whole))
        if sum(part.nbytes for part in parts) < size:
            ctypes.memset(data.data_ptr(), 0, size)  # what alignment leaves open is zeros
        for part in parts:
            read(self._pid, part)
        self._land(chunk, data)
        self._buffers.give(buffer)
        return Did(size)

    def _land(self, chunk: int, data: torch.Tensor) -> None:
        if self._verify:
            self._digests[chunk] = digest(data)
        with on_side_stream():
            self._landing.write(chunk, data)

    # From device to device

    def _copy_device_memory(self, places: Places) -> device_digests.Copied | None:
        """Copy what the sender has opened to us; returns when it is in its place."""
        if not self._ways.opened:
            return None
        copied = device_digests.copy(
            self._ways.opened,
            by_device(places.device),
            self._chunks.stream_bytes,
            self._ways.tables,
            digests=self._memory.device_digests,
        )
        self.messages += copied.pieces
        self._count(copied.nbytes)
        return copied

    # Through the ring

    def _ask_for(self, chunks: Iterable[int]) -> None:
        self._unfilled = list(chunks)
        self._outstanding += len(self._unfilled)
        if not self._unfilled:
            return
        if self._ring is None or self._ring.record.slot_bytes < max(self._chunks.sizes):
            raise RemoteProtocolError(
                "no ring was opened that holds a chunk", rank=self._sender, phase="data"
            )
        for slot in range(self._ring.record.slots):
            self._fill(slot)

    def _fill(self, slot: int) -> None:
        if self._unfilled:
            chunk = self._asked[slot] = self._unfilled.pop(0)
            self._line.send(wire.Fill(chunk, slot))

    def _take_slot(self, filled: wire.Filled) -> Did:
        assert self._ring is not None
        size = self._chunks.sizes[filled.chunk]
        self._land(filled.chunk, self._ring.slot(filled.slot, size))
        return Did(size, free_slot=filled.slot)

    # Events

    def _submit(self, job: Callable[[], Did], *, counted: bool = False) -> None:
        def run() -> None:
            try:
                self._events.put(job())
            except Exception as fault:
                self._events.put(Did(fault=fault))

        self._outstanding += not counted
        self._worker.submit(run)

    def _wait(self) -> None:
        while self._outstanding:
            self._handle(self._next())

    def _confirm(self) -> None:
        self._trailer = None
        self._line.send(wire.Pulled())
        self._landing.arrived()
        while self._trailer is None:
            self._handle(self._next())

    def _next(self) -> object:
        while not self._deadline.passed:
            try:
                return self._events.get(timeout=max(min(TICK, self._deadline.left()), 0.001))
            except queue.Empty:
                continue
        raise TransferTimeoutError(
            f"timed out after {self._deadline.seconds:.3g} s: not all data was read; {self.done}",
            rank=self._sender,
            step=self._step,
            phase="data",
        )

    def _handle(self, event: object) -> None:
        if isinstance(event, Did):
            if event.fault is not None:
                raise self._lost(event.fault)
            self._outstanding -= 1
            self.messages += 1
            self._count(event.nbytes)
            if event.free_slot is not None:
                self._fill(event.free_slot)
        elif isinstance(event, wire.Filled):
            if self._asked.pop(event.slot, None) != event.chunk:
                raise RemoteProtocolError(
                    f"slot {event.slot} with chunk {event.chunk}, which was not asked for",
                    rank=self._sender,
                    phase="data",
                )
            self._submit(partial(self._take_slot, event), counted=True)
        elif isinstance(event, wire.Trailer):
            self._trailer = event
        elif not isinstance(event, wire.Knock):
            raise failure(event, self._sender, "data")

    def _count(self, nbytes: int) -> None:
        self.wire_bytes += nbytes
        self._done_bytes = min(self._done_bytes + nbytes, self._chunks.stream_bytes)
        self._progress(self._done_bytes, self._chunks.stream_bytes)

    def _count_rest(self) -> None:
        """Padding between tensors is counted with the rest, and never read."""
        if self._done_bytes < self._chunks.stream_bytes:
            self._done_bytes = self._chunks.stream_bytes
            self._progress(self._done_bytes, self._chunks.stream_bytes)

    def _lost(self, fault: Exception) -> Exception:
        if not isinstance(fault, OtherMemoryError):
            return fault
        return PeerLostError(
            f"the sender's memory is gone: {fault.strerror}; {self.done}",
            rank=self._sender,
            step=self._step,
            phase="data",
        )

    def _unequal(self, copied: device_digests.Copied | None) -> list[int]:
        """The chunks that are not what was sent; raises once they have been read often enough."""
        assert self._trailer is not None
        if copied is not None and self._memory.device_digests:
            at = copied.differs(self._trailer.device)
            if at is not None:
                end = min(
                    at + device_digests.cell_bytes(self._chunks.stream_bytes),
                    self._chunks.stream_bytes,
                )
                raise self._differs(f"device memory with {self._named(at, end)}")
        if not self._verify:
            return []
        theirs = self._trailer.digests
        if len(theirs) != len(self._chunks):
            raise RemoteProtocolError(
                f"{len(theirs)} digests for {len(self._chunks)} chunks", rank=self._sender
            )
        bad = [index for index, mine in self._digests.items() if mine != theirs[index]]
        if any(self.retried.count(index) >= RETRIES for index in bad):
            raise self._differs(f"chunk {bad[0]}, after {RETRIES} more tries,")
        self.retried += bad
        return bad

    def _differs(self, what: str) -> DigestError:
        return DigestError(
            f"{what} does not have the digest it was sent with: "
            "was the state changed while it was sent?",
            rank=self._sender,
            step=self._step,
            phase="data",
        )
