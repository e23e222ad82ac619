"""Route "host": the receiver reads the sender's host memory, on the same machine.

What lies in host memory is read from there straight to where it belongs, by a few threads and
without the sender's help. What the receiver cannot read where it lies comes through a ring of
shared buffers, a chunk at a time, as the receiver asks for it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from functools import partial
from typing import Annotated, NamedTuple

import msgspec
import numpy as np
from msgspec import Meta

from torchrelay.deadlines import Deadline
from torchrelay.errors import PeerLostError, RemoteProtocolError
from torchrelay.geometry.runs import Moves, Runs, moves
from torchrelay.landing.places import Places
from torchrelay.memory.gpu.side import in_use
from torchrelay.memory.vectors import Batch, OtherMemoryError, batches, copy, read
from torchrelay.record.digest import RollingDigest
from torchrelay.record.pause import gc_paused
from torchrelay.transports.protocol import wire
from torchrelay.transports.routes.nearby import place
from torchrelay.transports.routes.nearby.chunk_ways import (
    SenderMemory,
    Shares,
    chunks_in,
    share,
    stretches,
)
from torchrelay.transports.routes.nearby.place import Process
from torchrelay.transports.routes.nearby.ring import (
    Fill,
    MappedRing,
    MappedRings,
    Ring,
    Rings,
    RingServer,
)
from torchrelay.transports.routes.seam import (
    Incoming,
    Line,
    Mover,
    Outgoing,
    Route,
    Server,
    Unavailable,
)
from torchrelay.transports.transfer.pull import Did, Pull

IN_CACHE = 1 << 20  # bytes that are read and then hashed
NEEDS_RING = b"ring"  # the answer of a receiver that cannot read everything where it lies
_ZEROS = np.zeros(64 << 10, np.uint8)


class Memory(msgspec.Struct, array_like=True, frozen=True):
    """Where the bytes of a state lie in the sender's memory.

    The sender's claim to the process (`place.claim`) stands at address `beacon` and in file `fd` of
    it: a receiver that reads it there reads the process of the rank that it talks to.
    """

    place: wire.Place
    beacon: Annotated[int, Meta(ge=0, le=(1 << 63) - 1)] = 0
    fd: wire.Descriptor = -1
    host: wire.Blob = b""  # `geometry.runs.Runs.pack`; the fixed part of the offer
    apart: wire.Stretches = ()  # chunks that have bytes elsewhere: on a device, or strided
    verify: bool = False  # digests come with the trailer

    @property
    def process(self) -> Process:
        return Process(self.place.pid, self.fd, self.beacon)


class HostServer(Server):
    """Says where the bytes lie, and keeps them there."""

    name = "host"

    def __init__(self, outgoing: Outgoing) -> None:
        self._layout = outgoing.layout
        self._stream_bytes = outgoing.snapshot.chunks.stream_bytes
        self.hashes = outgoing.options.verify is True
        self._here = place.here()
        self._proofs: list[place.Proof] = []
        self._ringed: set[int] = set()
        self._ring = RingServer(outgoing.snapshot, outgoing.resources.of(Rings))

    @property
    def copied_bytes(self) -> int:  # type: ignore[override]
        return self._ring.filled_bytes

    def get_ready(self) -> None:
        self._layout.host, self._layout.apart  # noqa: B018

    def offer(self, join: wire.Join, line: Line) -> wire.RouteOffer | Unavailable:
        memory = self.memory(join, line)
        fresh = msgspec.structs.replace(memory, host=b"")
        return wire.RouteOffer(msgspec.msgpack.encode(fresh), memory.host)

    def memory(self, join: wire.Join, line: Line) -> Memory:
        """Where the bytes lie, for a receiver that has joined; the least where it is elsewhere."""
        elsewhere = Memory(self._here)
        if place.apart(self._here, join.place) or not join.nonce:
            return elsewhere
        claim = place.claim(join.nonce, line.group.rank(), line.peer, line.transfer)
        try:
            proof = place.Proof(claim)
        except OSError:
            return elsewhere
        self._proofs.append(proof)
        process, layout = proof.process, self._layout
        return Memory(
            self._here,
            process.beacon,
            process.fd,
            layout.host,
            stretches(layout.apart),
            self.hashes,
        )

    def answer(self, rank: int, taken: str, word: bytes, deadline: Deadline) -> None:
        if taken == self.name and word == NEEDS_RING:
            self._ringed.add(rank)

    def begin(self, rank: int) -> bytes | Unavailable:
        if rank not in self._ringed:
            return b""
        try:
            return msgspec.msgpack.encode(self._ring.lend(rank))
        except MemoryError as fault:
            return Unavailable(str(fault))

    def hear(self, line: Line, word: bytes) -> str:
        if self._ring.fill(line, wire.read_as(Fill, word)):
            return ""
        return "asked for a chunk or slot that does not exist, or is not free"

    def close(self) -> None:
        self._ring.close()
        for proof in self._proofs:
            proof.close()


class Ways(NamedTuple):
    """Where bytes come from and go to, and which way each chunk takes."""

    sources: Runs  # of the sender's host memory
    places: Places
    shares: Shares

    @property
    def hashed(self) -> tuple[int, ...]:
        """The chunks whose digests count, where digests do: device memory has its own."""
        return (*self.straight_and_hashed, *self.shares.buffered, *self.shares.ringed)

    @property
    def straight_and_hashed(self) -> list[int]:
        return [chunk for chunk in self.shares.straight if chunk not in self.shares.opened]


def find_ways(
    incoming: Incoming,
    memory: Memory,
    *,
    reads: bool,
    exported: Runs | None = None,
    strays: wire.Stretches = (),
) -> Ways:
    """`exported`: bytes in device memory that is open here; `strays`: chunks that have others too.

    `RemoteProtocolError` where what the sender says of its memory cannot be.
    """
    chunks, places = incoming.landing.chunks, incoming.landing.places()
    try:
        sources = Runs.unpack(memory.host, chunks.stream_bytes)
        apart, beyond = (chunks_in(some, len(chunks)) for some in (memory.apart, strays))
        theirs = SenderMemory(sources, apart, reads, exported, beyond)
        shares = share(chunks, places, theirs, verify=memory.verify)
    except ValueError as fault:
        rank = incoming.line.peer
        raise RemoteProtocolError(str(fault), rank=rank, phase="join") from None
    return Ways(sources, places, shares)


class Reachable(NamedTuple):
    """The sender's process, which is on this machine and has shown that it is the right one."""

    memory: Memory
    reads: bool  # its memory can be read where it lies


def reach(memory: Memory, incoming: Incoming) -> Reachable | Unavailable:
    """Look whether the sender's process is near, and is who it says."""
    line = incoming.line
    claim = place.claim(incoming.nonce, line.peer, line.group.rank(), line.transfer)
    why = place.apart(place.here(), memory.place) or place.cannot_open(memory.process, claim)
    if why:
        return Unavailable(why)
    return Reachable(memory, not place.cannot_read(memory.process, claim))


def _clear(gaps: Runs) -> None:
    """Write zeros where the sender's memory leads nowhere: what the memory here was used for before
    is no part of the state."""
    if not len(gaps.starts):
        return
    whole = Moves(gaps.starts, gaps.starts, gaps.addresses, gaps.stops - gaps.starts)
    cut = whole.cut(len(_ZEROS))
    copy(cut._replace(sources=np.full(len(cut.nbytes), _ZEROS.ctypes.data, np.uint64)))


class HostPull(Pull):
    """Reads the sender's memory, or has chunks put into the ring."""

    def __init__(self, incoming: Incoming, memory: Memory, ways: Ways) -> None:
        super().__init__(incoming, verify=memory.verify)
        self._memory, self._ways, self._pid = memory, ways, memory.place.pid
        self._ring: MappedRing | None = None
        self._unfilled: list[int] = []  # chunks to ask for
        self._asked: dict[int, int] = {}  # the chunk that each slot was asked for
        self._rings = incoming.resources.of(MappedRings)
        self.answer = NEEDS_RING if ways.shares.ringed else b""
        self.hashed = ways.hashed if memory.verify else ()

    def _threads(self, most: int) -> int:
        if self._ways.places.making:
            most = max(1, most - 1)
        if self._ways.shares.buffered:
            # Each thread has a buffer of its own.
            most = min(most, max(1, self._buffers.limit // max(self._chunks.sizes)))
        return most

    def _begin(self, go: wire.Go) -> None:
        shares, places = self._ways.shares, self._ways.places
        if go.word:
            self._map_ring(wire.read_as(Ring, go.word))
        if places.live:
            self._landing.torn = True
        if self._verify or shares.buffered or shares.ringed:
            places.host  # noqa: B018  # made here, not by the threads that write to it
        self._read_straight(places, shares)
        self._read_buffered(shares.buffered)
        self._ask_for(shares.ringed)

    def _read_again(self, chunks: Iterable[int]) -> None:
        shares = self._ways.shares
        self._ask_for([chunk for chunk in chunks if chunk in shares.ringed])
        self._read_buffered([chunk for chunk in chunks if chunk in shares.buffered])
        for chunk in set(chunks) & set(self._ways.straight_and_hashed):
            self._submit(partial(self._read_and_hash, chunk))

    def _lost(self, fault: Exception) -> Exception:
        if not isinstance(fault, OtherMemoryError):
            return fault
        return PeerLostError(
            f"the sender's memory is gone: {fault.strerror}; {self.done}",
            rank=self._sender,
            step=self._incoming.step,
            phase="data",
        )

    def close(self, *, keep: bool) -> None:
        super().close(keep=keep)
        ring, self._ring = self._ring, None
        if ring is not None and keep:
            self._rings.give(self._sender, ring)
        elif ring is not None:
            ring.close()

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
                found = moves(sources.facing(part), part)
                _clear(self._of(part, straight).unfilled(found))
                for batch in batches(found, bridge=True):
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
        rolling = RollingDigest(begin, cells=self._cells)
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

    # Through the ring

    def _map_ring(self, record: Ring) -> None:
        try:
            self._ring = self._rings.take(
                self._sender, self._memory.process, record, pinned=in_use()
            )
        except OSError as fault:
            raise PeerLostError(
                f"the sender's buffers cannot be mapped: {fault}", rank=self._sender
            ) from fault

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
            self._line.send(wire.Word(msgspec.msgpack.encode(Fill(chunk, slot))))

    def _hear(self, word: bytes) -> None:
        filled = wire.read_as(Fill, word)
        if self._asked.pop(filled.slot, None) != filled.chunk:
            raise RemoteProtocolError(
                f"slot {filled.slot} with chunk {filled.chunk}, which was not asked for",
                rank=self._sender,
                phase="data",
            )
        self._submit(partial(self._take_slot, filled), counted=True)

    def _take_slot(self, filled: Fill) -> Did:
        assert self._ring is not None
        size = self._chunks.sizes[filled.chunk]
        self._land(filled.chunk, self._ring.slot(filled.slot, size))
        return Did(size, free_slot=filled.slot)

    def _did(self, event: Did) -> None:
        if event.free_slot is not None:
            self._fill(event.free_slot)


class HostRoute(Route):
    name = "host"
    pulls = True

    def compares(self, verify: bool | None) -> bool:
        return verify is True  # what the kernel copies is compared by choice alone

    def server(self, outgoing: Outgoing) -> Server:
        return HostServer(outgoing)

    def accept(self, offer: wire.RouteOffer | None, incoming: Incoming) -> Mover | Unavailable:
        if offer is None:
            return Unavailable("the sender does not say where its memory is")
        memory = msgspec.structs.replace(wire.read_as(Memory, offer.fresh), host=offer.fixed)
        found = reach(memory, incoming)
        if isinstance(found, Unavailable):
            return found
        ways = find_ways(incoming, found.memory, reads=found.reads)
        return HostPull(incoming, found.memory, ways)


ROUTE = HostRoute()
