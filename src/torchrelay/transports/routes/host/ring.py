"""Buffers that a sender and a receiver on one machine both map.

They carry bytes that the receiver cannot read where they lie: on a GPU, strided, or in memory that
the kernel does not let it read. The receiver asks for a chunk in a slot, the sender puts it there,
the receiver takes it out and asks for the next. Where there is a GPU the memory is pinned on both
sides, and copies to and from the device go straight through it.
"""

from __future__ import annotations

import itertools
import mmap
import os
import threading
from collections.abc import Callable, Sequence
from typing import Annotated

import msgspec
import torch
from msgspec import Meta

from torchrelay.describing.snapshot import Sendable
from torchrelay.errors import RemoteProtocolError
from torchrelay.geometry.chunks import MAX_CHUNK_BYTES
from torchrelay.memory import vectors
from torchrelay.memory.arena import Arena, register, unregister
from torchrelay.memory.gpu.side import in_use, on_side_stream
from torchrelay.memory.idle import idle_memory
from torchrelay.memory.pages import paged
from torchrelay.memory.pool import cores
from torchrelay.memory.sealed import keeps_size
from torchrelay.transports.resources import Resource
from torchrelay.transports.routes.host.claims import Claimant, open_memfd
from torchrelay.transports.streams.workers import Workers
from torchrelay.transports.wire.messages import Chunk, Descriptor, Serial

RING_BYTES = 512 << 20  # of one ring, at most, unless two slots take more
MOST_SLOTS = 8
FILLERS = 8  # threads that fill slots, at most
_ids = itertools.count(1)


class Ring(msgspec.Struct, array_like=True, frozen=True, tag="ring"):
    """Buffers in memory that both map: file `fd` of the sender's process."""

    id: Serial  # never used again by the process
    fd: Descriptor
    slots: Annotated[int, Meta(ge=1, le=MOST_SLOTS)]
    slot_bytes: Annotated[int, Meta(ge=1, le=MAX_CHUNK_BYTES)]  # a multiple of a page

    def slot(self, memory: torch.Tensor, index: int, nbytes: int) -> torch.Tensor:
        """The first bytes of a slot of the mapped memory."""
        at = index * self.slot_bytes
        return memory[at : at + nbytes]


class Fill(msgspec.Struct, array_like=True, frozen=True, tag="fill"):
    """The receiver asks for this chunk in this slot; the sender repeats it when it is there."""

    chunk: Chunk
    slot: Annotated[int, Meta(ge=0, le=MOST_SLOTS - 1)]


def slots_for(sizes: Sequence[int]) -> tuple[int, int]:
    """How many slots chunks of these sizes need, and the bytes of each."""
    slot_bytes = paged(max([1, *sizes]))
    most = max(min(RING_BYTES // slot_bytes, MOST_SLOTS), 2)
    return max(1, min(most, len(sizes))), slot_bytes


class SharedRings(Resource):
    """Rings that outlive a transfer: making one takes longer than most transfers."""

    def __init__(self) -> None:
        self._idle: list[tuple[Arena, Ring]] = []
        self._lock = threading.Lock()
        idle_memory.add(self)

    @property
    def kept_bytes(self) -> int:
        return sum([arena.nbytes for arena, _ in self._idle])

    def take(self, sizes: Sequence[int], *, pinned: bool) -> tuple[Arena, Ring]:
        """A ring for chunks of these sizes. Raises `MemoryError` if memory runs out."""
        slots, slot_bytes = slots_for(sizes)
        with self._lock:
            for index, (arena, ring) in enumerate(self._idle):
                same = ring.slots >= slots and ring.slot_bytes == slot_bytes
                if same and arena.pinned >= pinned:
                    return self._idle.pop(index)
        self.close()  # one kind is kept, not one of every kind
        arena = Arena(slots * slot_bytes, pinned=pinned)
        return arena, Ring(next(_ids), arena.fd, slots, slot_bytes)

    def give(self, arena: Arena, ring: Ring) -> None:
        """Take back a ring that no receiver uses any more. It is kept if it may be."""
        with self._lock:
            kept = self.kept_bytes + arena.nbytes <= idle_memory.left_for(self)
            if kept:
                self._idle.append((arena, ring))
        if not kept:
            arena.close()

    def close(self) -> None:
        with self._lock:
            while self._idle:
                self._idle.pop()[0].close()


class RingFiller:
    """A ring that is lent to one receiver and filled as it asks. `MemoryError` if there is no
    memory for it. Workers call `on_ready`, or `failed` with the fault if the state cannot be
    read."""

    def __init__(
        self,
        snapshot: Sendable,
        rings: SharedRings,
        on_ready: Callable[[Fill], None],
        failed: Callable[[object], None],
    ) -> None:
        self._snapshot, self._rings, self._on_ready = snapshot, rings, on_ready
        self._sizes = snapshot.chunks.sizes
        self._arena, self.record = rings.take(self._sizes, pinned=in_use())
        self._filling: set[int] = set()
        self._workers = Workers(min(cores(), FILLERS), failed)
        self.sent_bytes = self.fills = 0

    def fill(self, wanted: Fill) -> None:
        """Put a chunk into a slot."""
        exists = wanted.slot < self.record.slots and wanted.chunk < len(self._sizes)
        if not exists or wanted.slot in self._filling:
            raise RemoteProtocolError(
                "asked for a chunk or slot that does not exist, or is not free"
            )
        self._filling.add(wanted.slot)
        size = self._sizes[wanted.chunk]
        slot = self.record.slot(self._arena.tensor, wanted.slot, size)
        self.sent_bytes += size
        self.fills += 1

        def put() -> None:
            with on_side_stream():
                self._snapshot.read(wanted.chunk, slot, vectors.copy)
            self._filling.discard(wanted.slot)
            self._on_ready(wanted)

        self._workers.submit(put)

    def close(self) -> None:
        self._workers.stop()
        self._rings.give(self._arena, self.record)


class MappedRing:
    """The receiver's end; `OSError` if the file cannot be mapped."""

    def __init__(self, claimant: Claimant, record: Ring, *, pinned: bool) -> None:
        self.record = record
        self.pinned = False
        self.nbytes = nbytes = record.slots * record.slot_bytes
        fd = open_memfd(claimant, record.fd, os.O_RDWR)
        try:
            if os.fstat(fd).st_size < nbytes:
                raise OSError("the ring is smaller than it should be")
            if not keeps_size(fd):
                raise OSError("the ring may become smaller while it is in use")
            self.tensor = torch.frombuffer(mmap.mmap(fd, nbytes), dtype=torch.uint8)
        finally:
            os.close(fd)
        self.pinned = pinned and register(self.tensor.data_ptr(), nbytes) == 0

    def close(self) -> None:
        if self.pinned:
            unregister(self.tensor.data_ptr())
            self.pinned = False
        self.tensor = torch.empty(0, dtype=torch.uint8, device="cpu")  # unmaps it

    def __del__(self) -> None:
        # Memory that is unmapped while it is pinned cannot be pinned at the same address again.
        self.close()


class MappedRings(Resource):
    """The last mapping of each sender, kept until the sender makes another ring or ends: with a
    GPU, pinning it takes longer than most transfers."""

    def __init__(self) -> None:
        self._open: dict[bytes, MappedRing] = {}  # by the sender's process
        self._lock = threading.Lock()
        idle_memory.add(self)

    @property
    def kept_bytes(self) -> int:
        """A sender that frees its ring does not free memory that is mapped here."""
        return sum([ring.nbytes for ring in list(self._open.values())])

    def take(self, sender: bytes, claimant: Claimant, record: Ring, *, pinned: bool) -> MappedRing:
        with self._lock:
            known = self._open.pop(sender, None)
        if known is not None:
            if known.record == record and known.pinned >= pinned:
                return known
            known.close()
        return MappedRing(claimant, record, pinned=pinned)

    def give(self, sender: bytes, ring: MappedRing) -> None:
        with self._lock:
            over = [self._open.pop(sender, None)]
            if self.kept_bytes + ring.nbytes <= idle_memory.left_for(self):
                self._open[sender] = ring
            else:
                over.append(ring)
        for one in over:
            if one is not None:
                one.close()

    def forget(self, process: bytes) -> None:
        with self._lock:
            known = self._open.pop(process, None)
        if known is not None:
            known.close()

    def close(self) -> None:
        with self._lock:
            while self._open:
                self._open.popitem()[1].close()
