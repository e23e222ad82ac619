"""Route "memory": the receiver reads the sender's host memory, on the same machine.

Host memory is read from where it lies to where it belongs, by a few threads and without the
sender's help. Chunks that the receiver cannot read where they lie come through a ring of shared
buffers, as it asks for them.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from functools import partial

import msgspec
import numpy as np

from torchrelay.errors import PeerLostError
from torchrelay.geometry.runs import Moves, Runs, moves
from torchrelay.memory.digest import RollingDigest
from torchrelay.memory.gpu.side import in_use
from torchrelay.memory.vectors import Batch, OtherMemoryError, batches, copy, read
from torchrelay.transports.routes import route as r
from torchrelay.transports.routes.host import claims, location
from torchrelay.transports.routes.host.chunk_paths import ChunkPath, SenderMemory, choose_paths
from torchrelay.transports.routes.host.facts import (
    MemoryFacts,
    MemoryTable,
    Reachable,
    reach,
    read_facts,
    read_table,
)
from torchrelay.transports.routes.host.ring import (
    Fill,
    MappedRing,
    MappedRings,
    Ring,
    RingFiller,
    SharedRings,
    slots_for,
)
from torchrelay.transports.routes.outgoing import Outgoing
from torchrelay.transports.routes.reading import ReadDone, ReadingFetch
from torchrelay.transports.wire import messages as m

IN_CACHE = 1 << 20  # bytes that are read and then hashed
BUFFER_BYTES = 512 << 20  # of all threads that read, at most, unless one takes more
_ZEROS = np.zeros(64 << 10, np.uint8)
_to_receiver: msgspec.msgpack.Decoder[Ring | Fill] = msgspec.msgpack.Decoder(Ring | Fill)


_read_fill = m.reader(Fill)


class MemoryService(r.RouteService):
    """Says where the bytes lie, and keeps them there. A receiver that takes all of the state needs
    no more than the offer."""

    _proof: claims.Proof | None = None
    _ring: RingFiller | None = None
    _offered: Outgoing | None = None

    def offer(self, outgoing: Outgoing) -> bytes | r.Unavailable:
        here, to = location.here(), self._receiver
        if self.is_elsewhere:
            return m.write(MemoryFacts(here))
        claim = claims.claim(to.join.nonce, to.member.rank, to.rank, to.transfer)
        try:
            self._proof = claims.Proof(claim)
        except OSError:
            return m.write(MemoryFacts(here))
        claimant, table = self._proof.claimant, self.table(outgoing)
        self._offered = outgoing
        verify = outgoing.verify is True
        return m.write(MemoryFacts(here, claimant.beacon, claimant.fd, verify, table))

    @property
    def is_elsewhere(self) -> bool:
        """Whether the receiver is where it reads no memory of this process."""
        join = self._receiver.join
        return bool(location.unreachable(location.here(), join.location)) or not join.nonce

    def begin(self, outgoing: Outgoing, accept: m.Accept, link: r.Link) -> bytes:
        self._close_ring()  # of an earlier acceptance
        self.outgoing = outgoing
        if self._offered is None:
            raise r.RouteFault("took a route that it was not offered")
        return b"" if outgoing is self._offered else m.write(self.table(outgoing))

    def table(self, outgoing: Outgoing) -> MemoryTable:
        return MemoryTable(outgoing.host, m.to_ranges(list(outgoing.elsewhere)))

    def handle_note(self, data: bytes) -> None:
        if self.outgoing is None:
            raise r.RouteFault("sent a note before the data began")
        wanted = _read_fill(data)
        if self._ring is None:
            rings, report = self._receiver.member.resources.of(SharedRings), self._receiver.report
            try:
                self._ring = RingFiller(self.outgoing.snapshot, rings, self._say, report)
            except MemoryError as fault:
                raise r.RouteFault(f"no memory for a ring: {fault}") from fault
            self._say(self._ring.record)
        self._ring.fill(wanted)

    def _say(self, record: Ring | Fill) -> None:
        self._receiver.send(m.RouteNote(m.write(record)))

    def _close_ring(self) -> None:
        ring, self._ring = self._ring, None
        if ring is not None:
            ring.close()
            self.wire_bytes += ring.sent_bytes
            self.messages += ring.fills

    def close(self) -> None:
        self._close_ring()
        if self._proof is not None:
            self._proof.close()


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
    _paths: list[ChunkPath]
    _exported: Runs | None = None  # bytes in device memory of the sender that is open here
    _hashed: frozenset[int] | None = None  # the chunks that a device can hash, if it should

    def __init__(self, incoming: r.Incoming, reachable: Reachable) -> None:
        super().__init__(incoming, verify=reachable.facts.verify)
        self._facts, self._reads = reachable
        self._places = self.target.stream
        self._rings = incoming.member.resources.of(MappedRings)
        self._open = ExitStack()  # memory of the sender that is used by this transfer
        self._ring: MappedRing | None = None
        self._slots, _ = slots_for(self._chunks.sizes)
        self._unfilled: list[int] = []  # chunks to ask for
        self._requested: dict[int, int] = {}  # by slot, the chunk that it was asked for
        self._arrived = False

    def get_ready(self) -> None:
        super().get_ready()
        if self._incoming.whole:
            self._plan(self._facts.table)

    def run(self, go: bytes) -> None:
        if not self._incoming.whole:
            self._plan(read_table(go))
        super().run(go)
        self._arrived = True

    def _plan(self, table: MemoryTable) -> None:
        """Find the path of each chunk. `RemoteProtocolError` for memory that cannot be."""
        chunks, count = self._chunks, len(self._chunks)
        try:
            self._sources = Runs.unpack(table.host, chunks.stream_bytes)
        except ValueError as fault:
            raise self._wrong(str(fault)) from None
        elsewhere, unexported = (
            m.from_ranges(some, count) for some in (table.elsewhere, table.unexported)
        )
        theirs = SenderMemory(
            self._sources, elsewhere, self._reads, self._exported, unexported, self._hashed
        )
        self._paths = choose_paths(chunks, self._places, theirs, verify=self._verify)

    def _on(self, *paths: ChunkPath) -> list[int]:
        """The chunks that take one of these paths."""
        return [chunk for chunk, path in enumerate(self._paths) if path in paths]

    def _threads(self, most: int) -> int:
        if ChunkPath.BUFFERED in self._paths:
            # Each thread has a buffer of its own.
            most = min(most, max(1, BUFFER_BYTES // max(self._chunks.sizes)))
        return most

    def _compared(self) -> list[int]:
        if not self._verify:
            return []
        return self._on(ChunkPath.DIRECT, ChunkPath.BUFFERED, ChunkPath.RINGED)

    def _begin(self) -> None:
        self.target.begin()
        if self._verify:  # each chunk is hashed when it has been read
            _clear(self._of(self._places.host, self._on(ChunkPath.DIRECT)).without(self._sources))
            self._read_chunks(list(range(len(self._chunks))))
        else:
            self._read_direct()
            self._read_chunks(self._on(ChunkPath.BUFFERED, ChunkPath.RINGED, ChunkPath.OPENED))

    def _read_chunks(self, chunks: list[int]) -> None:
        self._unfilled = [chunk for chunk in chunks if self._paths[chunk] is ChunkPath.RINGED]
        for chunk in chunks:
            if self._paths[chunk] is ChunkPath.BUFFERED:
                self._submit(partial(self._read_buffered, chunk))
            elif self._paths[chunk] is ChunkPath.DIRECT:
                self._submit(partial(self._read_and_hash, chunk))
        self._outstanding += len(self._unfilled)
        if self._unfilled:
            self._ask(range(self._slots))

    def _lost(self, fault: Exception) -> Exception:
        if not isinstance(fault, OtherMemoryError):
            return fault
        return self._talk.lost(f"the sender's memory is gone: {fault.strerror}")

    def close(self) -> None:
        super().close()
        ring, self._ring = self._ring, None
        if ring is not None:
            self._rings.give(self._talk.process, ring)
        self._open.close()
        self._incoming.member.resources.settle(self._talk.process, arrived=self._arrived)

    # Directly from the sender's memory

    def _read_direct(self) -> None:
        """All host memory that is read without a buffer, also of chunks that have bytes in opened
        device memory. Many tensors per call: chunks do not matter here."""
        chunks, host = self._on(ChunkPath.DIRECT, ChunkPath.OPENED), self._places.host
        found = moves(self._of(self._sources, chunks), host)
        _clear(self._of(host, chunks).unfilled(found))
        for batch in batches(found):
            self._submit(partial(self._read_batch, batch))

    def _of(self, runs: Runs, chunks: list[int]) -> Runs:
        """The parts of runs that belong to these chunks."""
        if len(chunks) == len(self._chunks):
            return runs
        offsets, sizes = self._chunks.offsets, self._chunks.sizes
        return runs.only([offsets[i] for i in chunks], [sizes[i] for i in chunks])

    def _read_batch(self, batch: Batch) -> ReadDone:
        read(self._facts.location.pid, batch)
        return ReadDone(batch.nbytes)

    def _read_and_hash(self, chunk: int) -> ReadDone:
        """Some at a time: each piece is hashed where it has come to lie while it is in cache."""
        begin, size = self._chunks.offsets[chunk], self._chunks.sizes[chunk]
        found = moves(self._sources.only([begin], [size]), self._places.host)
        rolling = RollingDigest(begin)
        for batch in batches(found, piece=IN_CACHE):
            read(self._facts.location.pid, batch)
            rolling.add(batch.copies.positions.tolist(), batch.here.tolist())
        self._mine[chunk] = rolling.end(begin + size)
        return ReadDone(size)

    def _read_buffered(self, chunk: int) -> ReadDone:
        """By way of a buffer, for what does not land in host memory as it comes."""

        def fill(found: Moves) -> None:
            for batch in batches(found):
                read(self._facts.location.pid, batch)

        pinned = len(self._places.device.starts) > 0
        buffer = self._incoming.member.buffer(max(self._chunks.sizes), pinned=pinned)
        return self._read_and_land(chunk, self._sources, buffer, fill)

    # Through the ring

    def _ask(self, slots: Iterable[int]) -> None:
        """Ask for a chunk in each of these slots, which are free."""
        for slot in slots:
            if self._unfilled:
                chunk = self._requested[slot] = self._unfilled.pop(0)
                self._talk.send(m.RouteNote(m.write(Fill(chunk, slot))))

    def _handle_note(self, data: bytes) -> None:
        answer = m.read_by(_to_receiver, data)
        if isinstance(answer, Ring):
            self._map_ring(answer)
        elif self._ring is None or self._requested.pop(answer.slot, None) != answer.chunk:
            text = f"slot {answer.slot} with chunk {answer.chunk}, which was not asked for"
            raise self._wrong(text)
        else:
            self._submit(partial(self._take_slot, answer), counted=True)

    def _map_ring(self, record: Ring) -> None:
        largest = max(self._chunks.sizes, default=0)
        fits = record.slots >= self._slots and record.slot_bytes >= largest
        if self._ring is not None or not self._requested or not fits:
            raise self._wrong("a second ring, or one that does not hold the chunks")
        claimant = self._facts.claimant
        try:
            self._ring = self._rings.take(self._talk.process, claimant, record, pinned=in_use())
        except OSError as fault:
            raise PeerLostError(
                f"the sender's buffers cannot be mapped: {fault}", rank=self._talk.sender
            ) from fault

    def _take_slot(self, answer: Fill) -> ReadDone:
        assert self._ring is not None
        size = self._chunks.sizes[answer.chunk]
        self._land(answer.chunk, self._ring.record.slot(self._ring.tensor, answer.slot, size))
        return ReadDone(size, then=partial(self._ask, [answer.slot]))


def _fetch(facts: bytes, incoming: r.Incoming) -> MemoryFetch | r.Unavailable:
    found = reach(read_facts(facts), incoming)
    return found if isinstance(found, r.Unavailable) else MemoryFetch(incoming, found)


ROUTE = r.Route(
    "memory",
    MemoryService,
    _fetch,
    reads=True,
    in_offer=True,
    comparison=r.DigestComparison.BY_REQUEST,
)
