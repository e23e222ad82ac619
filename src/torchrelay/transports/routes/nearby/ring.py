"""Buffers that a sender and a receiver on one machine both map.

For bytes that the receiver cannot read where they lie: on a GPU, strided, or in memory that the
kernel does not let it read. The sender puts a chunk into a slot when the receiver asks for it, the
receiver takes it out and asks for the next. Where there is a GPU the memory is pinned on both
sides, and copies to and from the device go straight through it.
"""

from __future__ import annotations

import fcntl
import itertools
import mmap
import os
import threading
from typing import Annotated, Any

import msgspec
import torch
from msgspec import Meta

from torchrelay.geometry.chunks import MAX_CHUNK_BYTES
from torchrelay.memory import vectors
from torchrelay.memory.arena import Arena, register, unregister
from torchrelay.memory.gpu.side import in_use, on_side_stream
from torchrelay.memory.pool import cores
from torchrelay.plan.snapshot import Snapshot
from torchrelay.transports.protocol import wire
from torchrelay.transports.resources import Kept
from torchrelay.transports.routes.nearby.place import Process, open_memfd
from torchrelay.transports.routes.seam import Line
from torchrelay.transports.transfer.worker import Worker

RING_BYTES = 512 << 20  # of one ring, at most, unless two slots take more
MOST_SLOTS = 8
FILLERS = 8  # threads that fill slots, at most
_ids = itertools.count(1)

Slot = Annotated[int, Meta(ge=0, le=MOST_SLOTS - 1)]


class Ring(msgspec.Struct, array_like=True, frozen=True):
    """Buffers in memory that both map: file `fd` of the sender's process."""

    id: wire.Serial  # never given again by the process
    fd: wire.Descriptor
    slots: Annotated[int, Meta(ge=1, le=MOST_SLOTS)]
    slot_bytes: Annotated[int, Meta(ge=1, le=MAX_CHUNK_BYTES)]  # a multiple of a page


class Fill(msgspec.Struct, array_like=True, frozen=True):
    """The receiver asks for this chunk in this slot; the sender says the same when it is there."""

    chunk: wire.Chunk
    slot: Slot


class SharedRing:
    """The sender's end."""

    def __init__(self, slots: int, slot_bytes: int, *, pinned: bool) -> None:
        self._arena = Arena(slots * slot_bytes, pinned=pinned)
        self.record = Ring(next(_ids), self._arena.fd, slots, slot_bytes)
        self.pinned = pinned

    def slot(self, index: int, nbytes: int) -> torch.Tensor:
        at = index * self.record.slot_bytes
        return self._arena.tensor[at : at + nbytes]

    def close(self) -> None:
        self._arena.close()


class Rings(Kept):
    """Rings that outlive a transfer: making one costs more than most transfers."""

    def __init__(self) -> None:
        self._idle: list[SharedRing] = []
        self._lock = threading.Lock()

    def take(self, chunk_bytes: int, chunks: int, *, pinned: bool) -> SharedRing:
        """A ring for chunks of that size. `MemoryError` if there is no memory for it."""
        slot_bytes = -(-max(chunk_bytes, 1) // mmap.PAGESIZE) * mmap.PAGESIZE
        slots = max(min(RING_BYTES // slot_bytes, MOST_SLOTS, chunks), min(2, chunks), 1)
        with self._lock:
            for index, ring in enumerate(self._idle):
                same = ring.record.slots >= slots and ring.record.slot_bytes == slot_bytes
                if same and ring.pinned >= pinned:
                    return self._idle.pop(index)
            while self._idle:
                self._idle.pop().close()  # one kind is kept, not one of every kind
        return SharedRing(slots, slot_bytes, pinned=pinned)

    def give(self, ring: SharedRing) -> None:
        """Take a ring back that no receiver writes about any more."""
        with self._lock:
            self._idle.append(ring)

    def close(self) -> None:
        with self._lock:
            while self._idle:
                self._idle.pop().close()


class RingServer:
    """Rings that are lent to the receivers of one send, filled as they ask."""

    def __init__(self, snapshot: Snapshot, rings: Rings) -> None:
        self._snapshot, self._rings = snapshot, rings
        self._chunks = snapshot.chunks
        self._lent: dict[int, SharedRing] = {}  # by rank
        self._filling: set[tuple[int, int]] = set()  # rank and slot
        self._worker: Worker | None = None
        self.filled_bytes = 0

    def lend(self, rank: int) -> Ring:
        """A ring for one receiver. `MemoryError` if there is no memory for it."""
        ring = self._rings.take(max(self._chunks.sizes), len(self._chunks), pinned=in_use())
        self._lent[rank] = ring
        return ring.record

    def fill(self, line: Line, wanted: Fill) -> bool:
        """Put a chunk into a slot and say so; whether both exist and the slot is free."""
        ring, place_in_ring = self._lent.get(line.peer), (line.peer, wanted.slot)
        if ring is None or place_in_ring in self._filling:
            return False
        if wanted.slot >= ring.record.slots or wanted.chunk >= len(self._chunks):
            return False
        self._filling.add(place_in_ring)
        if self._worker is None:
            self._worker = Worker(min(cores(), FILLERS), niceness=0)
        size = self._chunks.sizes[wanted.chunk]
        slot = ring.slot(wanted.slot, size)

        def put() -> None:
            try:
                with on_side_stream():
                    self._snapshot.read(wanted.chunk, slot, vectors.copy)
            except Exception as fault:
                line.send(wire.Abort(wire.text(f"a chunk could not be read: {fault}")))
            else:
                self._filling.discard(place_in_ring)
                line.send(wire.Word(msgspec.msgpack.encode(wanted)))

        self.filled_bytes += size
        self._worker.submit(put)
        return True

    def close(self) -> None:
        if self._worker is not None:
            self._worker.stop()
        for ring in self._lent.values():
            self._rings.give(ring)
        self._lent.clear()


class MappedRing:
    """The receiver's end; `OSError` if the file cannot be mapped."""

    def __init__(self, process: Process, record: Ring, *, pinned: bool) -> None:
        self.record = record
        self.pinned = False
        if record.slots < 1 or record.slot_bytes < 1:
            raise OSError("a ring without slots")
        nbytes = record.slots * record.slot_bytes
        fd = open_memfd(process, record.fd, os.O_RDWR)
        try:
            if os.fstat(fd).st_size < nbytes:
                raise OSError("the ring is smaller than was said")
            if not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
                raise OSError("the ring may become smaller while it is in use")
            self._map: Any = mmap.mmap(fd, nbytes)
        finally:
            os.close(fd)
        self._tensor = torch.frombuffer(self._map, dtype=torch.uint8)
        self.pinned = pinned and register(self._tensor.data_ptr(), nbytes) == 0

    def slot(self, index: int, nbytes: int) -> torch.Tensor:
        at = index * self.record.slot_bytes
        return self._tensor[at : at + nbytes]

    def close(self) -> None:
        if self.pinned:
            unregister(self._tensor.data_ptr())
            self.pinned = False
        self._tensor, self._map = torch.empty(0, dtype=torch.uint8, device="cpu"), None

    def __del__(self) -> None:
        # Memory that is unmapped and still pinned cannot be pinned when its address is used again.
        self.close()


class MappedRings(Kept):
    """One mapping for each sender, kept until the sender makes another ring."""

    def __init__(self) -> None:
        self._open: dict[int, MappedRing] = {}  # by rank
        self._lock = threading.Lock()

    def take(self, sender: int, process: Process, record: Ring, *, pinned: bool) -> MappedRing:
        with self._lock:
            known = self._open.pop(sender, None)
        if known is not None:
            if known.record == record and known.pinned >= pinned:
                return known
            known.close()
        return MappedRing(process, record, pinned=pinned)

    def give(self, sender: int, ring: MappedRing) -> None:
        with self._lock:
            before = self._open.pop(sender, None)
            self._open[sender] = ring
        if before is not None:
            before.close()

    def close(self) -> None:
        with self._lock:
            while self._open:
                self._open.popitem()[1].close()
