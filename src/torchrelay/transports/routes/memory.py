"""Route "memory": the receiver reads the sender's host memory, on the same machine.

Host memory is read from where it lies straight to where it belongs, by a few threads and without
the sender's help. Chunks that the receiver cannot read where they lie come through a ring of shared
buffers, as it asks for them.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from functools import partial
from typing import Annotated, NamedTuple

import msgspec
import numpy as np
from msgspec import Meta

from torchrelay.errors import PeerLostError
from torchrelay.geometry.runs import Moves, Runs, moves
from torchrelay.memory.gpu.side import in_use
from torchrelay.memory.vectors import Batch, OtherMemoryError, batches, copy, read
from torchrelay.record.digest import RollingDigest
from torchrelay.transports.routes import route as r
from torchrelay.transports.routes.host import place
from torchrelay.transports.routes.host.chunk_paths import ChunkPaths, SenderMemory, choose_paths
from torchrelay.transports.routes.host.place import Process
from torchrelay.transports.routes.host.ring import (
    Fill,
    MappedRing,
    MappedRings,
    NeedsRing,
    Ring,
    RingFiller,
    SharedRings,
)
from torchrelay.transports.routes.outgoing import Outgoing
from torchrelay.transports.routes.reading import ReadDone, ReadingFetch
from torchrelay.transports.wire import messages as m

IN_CACHE = 1 << 20  # bytes that are read and then hashed
BUFFER_BYTES = 512 << 20  # of all threads that read, at most, unless one takes more
_ZEROS = np.zeros(64 << 10, np.uint8)
_to_sender: msgspec.msgpack.Decoder[NeedsRing | Fill] = msgspec.msgpack.Decoder(NeedsRing | Fill)
_to_receiver: msgspec.msgpack.Decoder[Ring | Fill] = msgspec.msgpack.Decoder(Ring | Fill)


class MemoryFacts(msgspec.Struct, array_like=True, frozen=True):
    """Where the sender's process is.

    Its claim (`place.claim`) is at address `beacon` of its memory and in its file `fd`: a receiver
    that finds it there reads the process of the rank that it talks to.
    """

    place: m.Place
    beacon: Annotated[int, Meta(ge=0, le=(1 << 63) - 1)] = 0
    fd: m.Descriptor = -1
    verify: bool = False  # digests are compared

    @property
    def process(self) -> Process:
        return Process(self.place.pid, self.fd, self.beacon)


class MemoryTable(msgspec.Struct, array_like=True, frozen=True):
    """Where the bytes of a state lie in the sender's memory."""

    host: m.Blob = b""  # `geometry.runs.Runs.pack`
    apart: m.ChunkRanges = ()  # chunks that have bytes elsewhere: on a device, or strided


class MemoryService(r.RouteService):
    """Says where the bytes lie, and keeps them there."""

    _proof: place.Proof | None = None
    _ring: RingFiller | None = None

    def offer(self, outgoing: Outgoing) -> bytes | r.Unavailable:
        return m.write(self.facts(outgoing))

    def facts(self, outgoing: Outgoing) -> MemoryFacts:
        here, to = place.here(), self._receiver
        elsewhere = MemoryFacts(here)
        if place.apart(here, to.join.place) or not to.join.nonce:
            return elsewhere
        claim = place.claim(to.join.nonce, to.member.rank, to.rank, to.transfer)
        try:
            self._proof = place.Proof(claim)
        except OSError:
            return elsewhere
        process = self._proof.process
        self.is_likely = True
        return MemoryFacts(here, process.beacon, process.fd, outgoing.verify is True)

    def begin(self, outgoing: Outgoing, accept: m.Accept, link: r.Link) -> bytes:
        self._close_ring()  # of an earlier acceptance
        self.outgoing = outgoing
        return m.write(self.table(outgoing))

    def table(self, outgoing: Outgoing) -> MemoryTable:
        return MemoryTable(outgoing.host, m.to_ranges(list(outgoing.apart)))

    def hear(self, data: bytes) -> None:
        if self.outgoing is None:
            raise r.RouteFault("said something before the data began")
        said = m.read_by(_to_sender, data)
        if isinstance(said, Fill):
            if self._ring is None:
                raise r.RouteFault("asked for a chunk in a ring that it does not have")
            self._ring.fill(said)
            return
        if self._ring is not None:
            raise r.RouteFault("asked for a second ring")
        try:
            rings = self._receiver.member.resources.of(SharedRings)
            snapshot, report = self.outgoing.snapshot, self._receiver.report
            self._ring = RingFiller(snapshot, rings, self._say, report)
        except MemoryError as fault:
            raise r.RouteFault(f"no memory for a ring: {fault}") from fault
        self._say(self._ring.record)

    def _say(self, record: Ring | Fill) -> None:
        self._receiver.send(m.RouteNote(m.write(record)))

    def _close_ring(self) -> None:
        ring, self._ring = self._ring, None
        if ring is not None:
            ring.close()
            self.wire_bytes += ring.filled_bytes
            self.messages += ring.fills

    def close(self) -> None:
        self._close_ring()
        if self._proof is not None:
            self._proof.close()


class Reachable(NamedTuple):
    """The sender's process, which is on this machine and is the one that it says it is."""

    facts: MemoryFacts
    reads: bool  # its memory can be read where it lies


def reach(facts: MemoryFacts, incoming: r.Incoming) -> Reachable | r.Unavailable:
    """Find out whether the sender's process is on this machine, and can be read."""
    talk = incoming.conversation
    claim = place.claim(incoming.nonce, talk.sender, talk.me, incoming.offer.transfer)
    why = place.apart(place.here(), facts.place) or place.cannot_open(facts.process, claim)
    if why:
        return r.Unavailable(why)
    return Reachable(facts, not place.cannot_read(facts.process, claim))


def _clear(gaps: Runs) -> None:
    """Write zeros where the sender has no bytes: what this memory held before is not part of the
    state."""
    if not len(gaps.starts):
        return
    whole = Moves(gaps.starts, gaps.starts, gaps.addresses, gaps.stops - gaps.starts)
    cut = whole.cut(len(_ZEROS))
    copy(cut._replace(sources=np.full(len(cut.nbytes), _ZEROS.ctypes.data, np.uint64)))


class MemoryFetch(ReadingFetch):
    """Reads the sender's memory, or has chunks put into the ring."""

    _sources: Runs
    _paths: ChunkPaths

    def __init__(self, incoming: r.Incoming, reachable: Reachable) -> None:
        super().__init__(incoming, verify=reachable.facts.verify)
        self._facts, self._reads = reachable
        self._places = self.landing.places
        self._rings = incoming.member.resources.of(MappedRings)
        self._ring: MappedRing | None = None
        self._unfilled: list[int] = []  # chunks to ask for
        self._asked: dict[int, int] = {}  # by slot, the chunk that it was asked for

    def run(self, go: bytes, patience: float) -> None:
        self._plan(m.read_as(MemoryTable, go))
        super().run(go, patience)

    def _plan(
        self,
        table: MemoryTable,
        exported: Runs | None = None,
        strays: m.ChunkRanges = (),
        hashed: frozenset[int] | None = None,
    ) -> None:
        """Find the path of each chunk. `exported`: bytes in device memory that is open here;
        `strays`: chunks that have other bytes too; `hashed`: those that a device can hash, if it
        should. `RemoteProtocolError` for memory that cannot be."""
        chunks, count = self._chunks, len(self._chunks)
        try:
            self._sources = Runs.unpack(table.host, chunks.stream_bytes)
        except ValueError as fault:
            raise self._wrong(str(fault)) from None
        apart, beyond = (tuple(m.from_ranges(some, count)) for some in (table.apart, strays))
        theirs = SenderMemory(self._sources, apart, self._reads, exported, beyond, hashed)
        self._paths = choose_paths(chunks, self._places, theirs, verify=self._verify)

    def _threads(self, most: int) -> int:
        if self._paths.buffered:
            # Each thread has a buffer of its own.
            most = min(most, max(1, BUFFER_BYTES // max(self._chunks.sizes)))
        return most

    def _compared(self) -> list[int]:
        if not self._verify:
            return []
        return [*self._by_host, *self._paths.buffered, *self._paths.ringed]

    @property
    def _by_host(self) -> list[int]:
        """The chunks that are read straight from host memory."""
        return [chunk for chunk in self._paths.straight if chunk not in self._paths.opened]

    def _begin(self) -> None:
        paths = self._paths
        if self.landing.live:
            self.landing.torn = True
        if self._verify:
            _clear(self._of(self._places.host, self._by_host).without(self._sources))
            self._read_chunks(self._by_host, paths.buffered)
        else:
            self._read_straight()
            self._read_chunks([], paths.buffered)
        if paths.ringed:
            self._fill_with(paths.ringed)
            self._talk.send(m.RouteNote(m.write(NeedsRing())))

    def _read_again(self, chunks: list[int]) -> None:
        again, paths = set(chunks), self._paths
        self._read_chunks(again.intersection(self._by_host), again.intersection(paths.buffered))
        self._fill_with([chunk for chunk in paths.ringed if chunk in again])
        if self._ring is not None:
            self._ask(range(self._ring.record.slots))

    def _lost(self, fault: Exception) -> Exception:
        if not isinstance(fault, OtherMemoryError):
            return fault
        return self._talk.lost(f"the sender's memory is gone: {fault.strerror}")

    def close(self) -> None:
        super().close()
        ring, self._ring = self._ring, None
        if ring is not None:
            self._rings.give(self._talk.sender, ring)

    # Straight from the sender's memory

    def _read_straight(self) -> None:
        straight, host = self._paths.straight, self._places.host
        found = moves(self._of(self._sources, straight), host)
        _clear(self._of(host, straight).unfilled(found))
        for batch in batches(found, bridge=True):
            self._submit(partial(self._read_batch, batch))

    def _of(self, runs: Runs, chunks: list[int]) -> Runs:
        """The parts of runs that belong to these chunks."""
        if len(chunks) == len(self._chunks):
            return runs
        offsets, sizes = self._chunks.offsets, self._chunks.sizes
        return runs.only([offsets[i] for i in chunks], [sizes[i] for i in chunks])

    def _read_batch(self, batch: Batch) -> ReadDone:
        read(self._facts.place.pid, batch)
        return ReadDone(batch.nbytes)

    def _read_chunks(self, straight: Iterable[int], buffered: Iterable[int]) -> None:
        for chunk in straight:
            self._submit(partial(self._read_and_hash, chunk))
        for chunk in buffered:
            self._submit(partial(self._read_chunk, chunk))

    def _read_and_hash(self, chunk: int) -> ReadDone:
        """Some at a time: each piece is hashed where it has come to lie while it is in cache."""
        begin, size = self._chunks.offsets[chunk], self._chunks.sizes[chunk]
        found = moves(self._sources.only([begin], [size]), self._places.host)
        rolling = RollingDigest(begin, cells=self._cells)
        for batch in batches(found, piece=IN_CACHE):
            read(self._facts.place.pid, batch)
            rolling.add(batch.copies.positions.tolist(), batch.here.tolist())
        self._mine[chunk] = rolling.end(begin + size)
        return ReadDone(size)

    def _read_chunk(self, chunk: int) -> ReadDone:
        """By way of a buffer, for what does not land in host memory as it comes."""
        begin, size = self._chunks.offsets[chunk], self._chunks.sizes[chunk]
        pinned = len(self._places.device.starts) > 0
        data = self._incoming.member.buffer(max(self._chunks.sizes), pinned=pinned)[:size]
        whole = Runs([begin], [data.data_ptr()], [size])
        parts = batches(moves(self._sources, whole))
        if sum(part.nbytes for part in parts) < size:
            ctypes.memset(data.data_ptr(), 0, size)  # alignment leaves gaps, which are zeros
        for part in parts:
            read(self._facts.place.pid, part)
        self._land(chunk, data)
        return ReadDone(size)

    # Through the ring

    def _fill_with(self, chunks: list[int]) -> None:
        self._unfilled = list(chunks)
        self._outstanding += len(chunks)

    def _ask(self, slots: Iterable[int]) -> None:
        """Ask for a chunk in each of these slots, which are free."""
        for slot in slots:
            if self._unfilled:
                chunk = self._asked[slot] = self._unfilled.pop(0)
                self._talk.send(m.RouteNote(m.write(Fill(chunk, slot))))

    def _hear(self, data: bytes) -> None:
        filled = m.read_by(_to_receiver, data)
        if isinstance(filled, Ring):
            self._map_ring(filled)
            self._ask(range(filled.slots))
        elif self._asked.pop(filled.slot, None) != filled.chunk:
            text = f"slot {filled.slot} with chunk {filled.chunk}, which was not asked for"
            raise self._wrong(text)
        else:
            self._submit(partial(self._take_slot, filled), counted=True)

    def _map_ring(self, record: Ring) -> None:
        if self._ring is not None or record.slot_bytes < max(self._chunks.sizes, default=0):
            raise self._wrong("a second ring, or one that does not hold a chunk")
        sender, process = self._talk.sender, self._facts.process
        try:
            self._ring = self._rings.take(sender, process, record, pinned=in_use())
        except OSError as fault:
            raise PeerLostError(
                f"the sender's buffers cannot be mapped: {fault}", rank=sender
            ) from fault

    def _take_slot(self, filled: Fill) -> ReadDone:
        assert self._ring is not None
        size = self._chunks.sizes[filled.chunk]
        self._land(filled.chunk, self._ring.record.slot(self._ring.tensor, filled.slot, size))
        return ReadDone(size, then=partial(self._ask, [filled.slot]))


def _fetch(facts: bytes, incoming: r.Incoming) -> MemoryFetch | r.Unavailable:
    found = reach(m.read_as(MemoryFacts, facts), incoming)
    return found if isinstance(found, r.Unavailable) else MemoryFetch(incoming, found)


ROUTE = r.Route("memory", MemoryService, _fetch, reads=True, compared_by_request=True)
