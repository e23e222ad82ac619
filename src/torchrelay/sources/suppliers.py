"""The endpoints that have the volumes of one step: each chunk comes from one that is free.

One that breaks off is asked again, and others meanwhile; one that cannot be reached for long, or
that gives bytes which are not those of the record, is dropped. The report names it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator, Sequence

from torchrelay.deadlines import Deadline
from torchrelay.errors import EndpointError, PeerLostError, TransferTimeoutError
from torchrelay.sources.connection import Host
from torchrelay.sources.mapped_step import LentMemory, MappedReader, VolumePlace

TRIES = 3  # without a byte, where others have the same
LAST_TRIES = 7  # where nobody else has it
NEAR_BYTES = 1 << 18  # copied from memory at once: they stay in the processor's cache
PAUSES = (0.1, 2.0)  # seconds before another try: first, and at most


class Supplier:
    """An endpoint that has some of the volumes."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self.active = 0  # requests under way
        self.failures = 0  # in a row
        self.fault = ""  # the last of them
        self.bytes = 0
        self.rested = 0.0  # until when it is left alone
        self.dropped = ""  # why it is asked no more
        self.near: dict[str, MappedReader] = {}  # volumes that are read from memory of this host
        self._lent: list[LentMemory] = []

    def lend(self, memories: list[LentMemory]) -> None:
        """Memory of it that can be read here, until it is closed."""
        self._lent += memories
        for memory in memories:
            for name, (start, nbytes) in memory.volumes.items():
                self.near[name] = MappedReader(VolumePlace(memory, start, nbytes))

    def read(
        self, volume: str, path: str, start: int, views: Sequence[memoryview], *, seconds: float
    ) -> Iterator[int]:
        """Fill views from bytes of a volume; yields how many have come, piece by piece."""
        near = self.near.get(volume)
        if near is None:
            yield from self.host.read(path, start, views, seconds=seconds)
            return
        for view in views:
            for low in range(0, len(view), NEAR_BYTES):
                piece = view[low : low + NEAR_BYTES]
                near.read_into(start, [piece])
                start += len(piece)
                yield len(piece)

    def close(self) -> None:
        self.host.close()
        for memory in self._lent:
            memory.close()


class Suppliers:
    """Who has which volume. Safe to use from several threads."""

    def __init__(self, volumes: dict[str, list[Supplier]], deadline: Deadline, what: str) -> None:
        self._volumes = volumes
        self._deadline = deadline
        self._what = what
        self._lock = threading.Lock()
        self.gone = False  # whether the step is there no more
        self.stopped = threading.Event()

    @property
    def all(self) -> Iterable[Supplier]:
        return {id(one): one for some in self._volumes.values() for one in some}.values()

    def take(self, volume: str) -> Supplier:
        """One that is to be asked for bytes of a volume; `release` it afterwards."""
        while True:
            if self.stopped.is_set():
                raise PeerLostError(f"{self._what} was given up")
            if self._deadline.passed:
                raise TransferTimeoutError(f"no time is left to read {self._what}", phase="data")
            with self._lock:
                left = [one for one in self._volumes[volume] if not one.dropped]
                if not left:
                    raise self._lost(volume)
                now = time.monotonic()
                ready = [one for one in left if one.rested <= now]
                if ready:
                    found = min(ready, key=lambda one: (volume not in one.near, one.active))
                    found.active += 1
                    return found
                pause = min(one.rested for one in left) - now
            self.stopped.wait(min(max(pause, 0.001), self._deadline.left()))

    def near(self, volume: str) -> MappedReader | None:
        """A volume in memory of this host that nothing was found wrong with."""
        for one in self._volumes[volume]:
            if volume in one.near and not one.dropped:
                return one.near[volume]
        return None

    @property
    def all_near(self) -> bool:
        return all(self.near(volume) for volume in self._volumes)

    def release(self, supplier: Supplier, nbytes: int) -> None:
        with self._lock:
            supplier.active -= 1
            supplier.bytes += nbytes
            if nbytes:
                supplier.failures = 0

    def failed(self, volume: str, supplier: Supplier, why: str) -> None:
        """It broke off: it rests, and after some times is asked no more."""
        with self._lock:
            supplier.failures += 1
            supplier.fault = why
            first, most = PAUSES
            supplier.rested = time.monotonic() + min(first * 2 ** (supplier.failures - 1), most)
            alone = all(one is supplier or one.dropped for one in self._volumes[volume])
            if supplier.failures >= (LAST_TRIES if alone else TRIES):
                supplier.dropped = supplier.dropped or why

    def drop(self, supplier: Supplier, why: str) -> None:
        with self._lock:
            supplier.dropped = supplier.dropped or why

    def _lost(self, volume: str) -> EndpointError | PeerLostError | FileNotFoundError:
        told = "; ".join(f"{one.host.url}: {one.dropped}" for one in self._volumes[volume])
        if self.gone:
            return FileNotFoundError(2, f"{self._what} is there no more ({told})")
        return PeerLostError(f"{self._what} cannot be read on: {told}", phase="data")

    @property
    def faulty(self) -> dict[str, str]:
        """What is wrong with those that were dropped or that did not come back, by URL."""
        return {
            one.host.url: one.dropped or one.fault
            for one in self.all
            if one.dropped or one.failures
        }

    @property
    def bytes(self) -> dict[str, int]:
        """What came from each, by URL."""
        return {one.host.url: one.bytes for one in self.all if one.bytes}

    def close(self) -> None:
        for one in self.all:
            one.close()
