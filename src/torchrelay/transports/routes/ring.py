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
from typing import Any

import torch

from torchrelay.memory.arena import Arena, register, unregister
from torchrelay.transports.protocol import wire
from torchrelay.transports.routes.place import Process, open_memfd

RING_BYTES = 512 << 20  # of one ring, at most, unless two slots take more
MOST_SLOTS = wire.MAX_SLOTS
_ids = itertools.count(1)


class SharedRing:
    """The sender's end."""

    def __init__(self, slots: int, slot_bytes: int, *, pinned: bool) -> None:
        self._arena = Arena(slots * slot_bytes, pinned=pinned)
        self.record = wire.Ring(next(_ids), self._arena.fd, slots, slot_bytes)
        self.pinned = pinned

    def slot(self, index: int, nbytes: int) -> torch.Tensor:
        at = index * self.record.slot_bytes
        return self._arena.tensor[at : at + nbytes]

    def close(self) -> None:
        self._arena.close()


class Rings:
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


class MappedRing:
    """The receiver's end; `OSError` if the file cannot be mapped."""

    def __init__(self, process: Process, record: wire.Ring, *, pinned: bool) -> None:
        self.record = record
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


class MappedRings:
    """One mapping for each sender, kept until the sender makes another ring."""

    def __init__(self) -> None:
        self._open: dict[int, MappedRing] = {}  # by rank
        self._lock = threading.Lock()

    def take(self, sender: int, process: Process, record: wire.Ring, *, pinned: bool) -> MappedRing:
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
