"""A puller that serves what it has of a step while the rest arrives, and after.

It runs the step server over a partial snapshot, on threads of the puller: to start a process for it
would take longer than its share of the bytes takes to arrive.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any

from torchrelay.endpoint.address import Address
from torchrelay.endpoint.server.messages import Listen, Show, StepRecord, laid_out
from torchrelay.endpoint.server.snapshots import Arrivals
from torchrelay.endpoint.server.step_server import StepServer
from torchrelay.memory.arena import Arena
from torchrelay.memory.free import check_free
from torchrelay.memory.pages import PAGE
from torchrelay.owner import Owner
from torchrelay.record.schema import VolumeRecord
from torchrelay.sources.access import Access
from torchrelay.sources.connection import READ_BYTES
from torchrelay.sources.lent_memory import MappedReader

STEP_BYTES = 2 << 20  # of memory that is taken at once


class ArrivingBytes:
    """A range of an arena that gets its pages as bytes come for it: a record may announce more than
    anybody sends."""

    def __init__(self, arena: Arena, start: int, view: memoryview) -> None:
        self.view = view
        self._arena, self._start = arena, start
        self._has = 0

    def reach(self, done: int) -> None:
        """So many bytes have come: have pages for the next ones. `MemoryError` where the system has
        no more."""
        if done + READ_BYTES > self._has < len(self.view):
            size = min(max(done + READ_BYTES - self._has, STEP_BYTES), len(self.view) - self._has)
            self._arena.reserve(self._start + self._has, size)
            self._has += size


class Seed:
    """The volumes of a step in memory, served by threads of this process until `close`.

    Chunks that were added are sent, and no others. `expects`: whether a chunk is on its way;
    `met`: called with the URL of another puller that announces itself here.
    """

    def __init__(
        self,
        host: str,
        access: Access,
        files: Sequence[VolumeRecord],
        expects: Callable[[int], bool] = lambda chunk: False,
        met: Callable[[str], None] = lambda url: None,
    ) -> None:
        Address(host, 0).check(access.secret())
        self._host, self._access, self._met = host, access, met
        self._owner = Owner("Seed")
        self.closed = threading.Event()
        self._volumes, nbytes = laid_out(files)
        check_free(nbytes)
        self._by_name = {volume.name: volume for volume in self._volumes}
        self._arrivals = Arrivals(sum(one.chunks for one in self._volumes), expects)
        self._arena = Arena(nbytes, populate=False)
        # Views of it keep it: bytes that are on their way when the seed is closed have a place.
        memory: Any = self._arena.tensor.numpy()
        self._memory = memoryview(memory)
        self._server: StepServer | None = None

    @property
    def url(self) -> str:
        """Where it serves, once it does."""
        return "" if self._server is None else self._server.service.url

    def show(self, step: int, snapshot: str, record: bytes) -> None:
        """Serve what is here of a step, from now on."""
        self._server = StepServer(Listen.at(self._host, 0, self._access), lends=False)
        service = self._server.service
        whole = StepRecord(record, self._volumes, 0, [""], [0] * len(self._volumes))
        service.seed_announced = self._met
        service.snapshots.attach(0, os.dup(self._arena.fd), self._arena.nbytes)
        service.show(Show(0, step, snapshot, self._volumes, whole), self._arrivals)

    # Its memory.

    def space(self, name: str, start: int, stop: int) -> ArrivingBytes:
        """Memory for bytes that arrive."""
        at = self._by_name[name].start
        return ArrivingBytes(self._arena, at + start, self._memory[at + start : at + stop])

    def add(self, first: int, count: int) -> None:
        """Chunks have arrived, by their numbers among those of all volumes."""
        self._arrivals.add(first, count)

    def lend(self, name: str, start: int, nbytes: int) -> memoryview:
        """Bytes of a volume, for a tensor that may write to them: others read the original."""
        at = self._by_name[name].start + start
        first, last = at // PAGE * PAGE, at + nbytes
        private = mmap.mmap(
            self._arena.fd,
            last - first,
            flags=mmap.MAP_PRIVATE,
            prot=mmap.PROT_READ | mmap.PROT_WRITE,
            offset=first,
        )
        return memoryview(private)[at - first :]

    def reader(self, name: str) -> MappedReader:
        """A volume that has arrived, to be read here."""
        volume = self._by_name[name]
        return MappedReader(self._arena.fd, volume.start, volume.nbytes)

    def close(self) -> None:
        """Stop serving, and free the memory, or have it freed with the last tensor in it."""
        if self.closed.is_set() or not self._owner.here:
            return
        self.closed.set()
        self._memory = memoryview(b"")
        if self._server is not None:
            service = self._server.service
            snapshot = service.snapshots.in_slot(0)
            if snapshot is not None:
                service.hide(snapshot, 0)
            self._server.close()
            service.snapshots.detach(0)
        self._arena.close()

    def __enter__(self) -> Seed:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
