"""A step that one or several suppliers have, as a step that can be read.

Bytes come straight to their destination, and each chunk is hashed as it arrives. A chunk with a
wrong digest is fetched again from another supplier. So readers return verified bytes. A supplier
that breaks off is asked again, and others meanwhile. One that cannot be reached for long, or that
gives bytes with wrong digests, is dropped, and the report names it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Protocol
from urllib.parse import quote

from torchrelay.deadlines import Deadline
from torchrelay.errors import (
    EndpointError,
    PeerLostError,
    RelayError,
    ResourceError,
    TransferTimeoutError,
)
from torchrelay.geometry import DIGEST_BYTES
from torchrelay.memory.digest import RunningDigest
from torchrelay.memory.free import check_free
from torchrelay.shortage import shortage
from torchrelay.sources.connection import Answered, Host
from torchrelay.sources.lent_memory import LentMemory, MappedReader
from torchrelay.stores.step_files import DataReader, StepFiles

if TYPE_CHECKING:  # a keeper reads from others too, and has no torch
    from torchrelay.record.schema import Record

TRIES = 3  # without a byte, where others have the same
LAST_TRIES = 7  # where no other supplier has it
PAUSES = (0.1, 2.0)  # seconds before another try: first, and at most
SUPPLY_FAULTS = (Answered, EndpointError, OSError, EOFError)  # of a read
_PASSING = (408, 425, 429, 500, 502, 503, 504)  # answers that may be others later


class Supplier:
    """A server's volumes of a snapshot, by HTTP ranges or from memory that it lends, and how it has
    done so far. `wait`: seconds for bytes that are still arriving there."""

    def __init__(self, host: Host, snapshot: str, wait: float = 0.0) -> None:
        self.name, self.host, self._snapshot = host.url, host, snapshot
        self._query = f"?wait_ms={1000 * wait:.0f}" if wait else ""
        self._mapped: dict[str, MappedReader] = {}  # volumes in memory of this host
        self._lent: LentMemory | None = None
        self.active = 0  # requests under way
        self.failures = 0  # in a row
        self.fault = ""  # the last of them
        self.shortage: ResourceError | None = None  # if it was this process that lacked something
        self.bytes = 0
        self.rests_until = 0.0
        self.dropped = ""  # why it is asked no more

    @property
    def why(self) -> str:
        """Why it was dropped or did not come back, if it did not."""
        return self.dropped or (self.fault if self.failures else "")

    def take(self, lent: LentMemory, sizes: Mapping[str, int]) -> None:
        """Read volumes of the right size from this memory, until `close`."""
        right = {n: one for n, one in lent.readers.items() if sizes.get(n) == one.nbytes}
        self._lent, self._mapped = lent, right

    def mapped(self, volume: str) -> MappedReader | None:
        """A volume in memory of this host, unless something was found wrong with it."""
        return None if self.dropped else self._mapped.get(volume)

    def read(
        self, volume: str, start: int, views: Sequence[memoryview], *, seconds: float
    ) -> Iterator[memoryview]:
        """Fill views from bytes of a volume; yields the parts that have come."""
        if volume in self._mapped:
            return self._mapped[volume].pieces(start, views)
        path = f"/volumes/{self._snapshot}/{quote(volume)}{self._query}"
        return self.host.read(path, start, views, seconds=seconds)

    def is_gone(self) -> bool:
        """Whether the step was replaced there."""
        with suppress(OSError, EndpointError):
            path = f"/places.json?snapshot={self._snapshot}"
            return self.host.get(path, seconds=5.0).status == 410
        return False

    def close(self) -> None:
        self.host.close()
        if self._lent is not None:
            self._lent.close()


class Suppliers:
    """Which supplier has which volume. Safe to use from several threads."""

    def __init__(self, volumes: dict[str, list[Supplier]], deadline: Deadline, what: str) -> None:
        self._volumes, self.deadline, self._what = volumes, deadline, what
        self._lock = threading.Lock()
        self.gone = False  # whether the step was replaced
        self.stopped = threading.Event()

    @property
    def all(self) -> Iterable[Supplier]:
        return {id(one): one for some in self._volumes.values() for one in some}.values()

    def take(self, volume: str) -> Supplier:
        """A supplier to ask for bytes of a volume; `release` it afterwards."""
        while True:
            if self.stopped.is_set():
                raise PeerLostError(f"{self._what} was given up")
            if self.deadline.passed:
                faults = "".join(f"; {name}: {why}" for name, why in self.faulty.items())
                text = f"no time is left to read {self._what}{faults}"
                raise TransferTimeoutError(text, phase="data")
            with self._lock:
                able = [one for one in self._volumes[volume] if not one.dropped]
                if not able:
                    raise self._lost(volume)
                now = time.monotonic()
                ready = [one for one in able if one.rests_until <= now]
                if ready:
                    found = min(ready, key=lambda one: (one.mapped(volume) is None, one.active))
                    found.active += 1
                    return found
                pause = min(one.rests_until for one in able) - now
            self.stopped.wait(min(max(pause, 0.001), self.deadline.left()))

    def others(self, volume: str, than: Iterable[Supplier]) -> list[Supplier]:
        """The suppliers of a volume that can be asked, except for some."""
        left_out = list(than)
        with self._lock:
            able = [one for one in self._volumes[volume] if not one.dropped]
        return [one for one in able if all(one is not other for other in left_out)]

    def mapped(self, volume: str) -> MappedReader | None:
        return next(filter(None, (one.mapped(volume) for one in self._volumes[volume])), None)

    @property
    def all_mapped(self) -> bool:
        return all(self.mapped(volume) for volume in self._volumes)

    def release(self, supplier: Supplier, nbytes: int) -> None:
        with self._lock:
            supplier.active -= 1
            supplier.bytes += nbytes
            supplier.failures = 0 if nbytes else supplier.failures

    def note(self, volume: str, supplier: Supplier, fault: Exception) -> None:
        """A read failed by one of `SUPPLY_FAULTS`. A supplier that broke off rests, and after some
        failures it is dropped; one that refuses is dropped at once."""
        if isinstance(fault, Answered) and fault.reply.status not in _PASSING:
            self.gone = self.gone or fault.reply.status == 410
            self.drop(supplier, str(fault))
            return
        if isinstance(fault, EndpointError):
            self.drop(supplier, fault.message)
            return
        why = getattr(fault, "strerror", None) or str(fault) or type(fault).__name__
        with self._lock:
            supplier.failures += 1
            supplier.fault, supplier.shortage = why, shortage(fault)
            pause = min(PAUSES[0] * 2 ** (supplier.failures - 1), PAUSES[1])
            supplier.rests_until = time.monotonic() + pause
            alone = all(one is supplier or one.dropped for one in self._volumes[volume])
            if supplier.failures >= (LAST_TRIES if alone else TRIES):
                supplier.dropped = supplier.dropped or why

    def drop(self, supplier: Supplier, why: str) -> None:
        with self._lock:
            supplier.dropped = supplier.dropped or why

    def _lost(self, volume: str) -> RelayError | FileNotFoundError:
        for one in self._volumes[volume]:
            if one.shortage is not None:
                text = f"{self._what} cannot be read further: {one.shortage.message}"
                return ResourceError(text, phase="data")
        reasons = "; ".join(f"{one.name}: {one.dropped}" for one in self._volumes[volume])
        if self.gone:
            return FileNotFoundError(2, f"{self._what} was replaced ({reasons})")
        return PeerLostError(f"{self._what} cannot be read further: {reasons}", phase="data")

    @property
    def faulty(self) -> dict[str, str]:
        """Why suppliers were dropped or did not come back, by name."""
        return {one.name: one.why for one in self.all if one.why}

    def close(self) -> None:
        self.stopped.set()
        for one in self.all:
            one.close()


class ChunkedVolume(Protocol):
    """A volume and the digests of its chunks: of a record, or a server's `Volume`."""

    @property
    def name(self) -> str: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def chunk_bytes(self) -> int: ...
    @property
    def digests(self) -> bytes: ...


class RemoteStep(StepFiles):
    """A step of a server. See `Opened`.

    `verify`: whether the caller compares digests of memory that is mapped on this host.
    """

    def __init__(
        self,
        url: str,
        data: bytes,
        record: Record,
        snapshot: str,
        suppliers: Suppliers,
        *,
        verify: bool = False,
    ) -> None:
        self.url, self.record, self.snapshot = url, record, snapshot
        self.digest = bytes.fromhex(snapshot)
        self.suppliers = suppliers
        # Mapped memory is cheap to read twice: to be checked, and to be landed.
        self.mapped = suppliers.all_mapped
        self.costly_reads = not self.mapped
        self.trusted = not (self.mapped and verify)
        self.compared = verify or not self.mapped
        self._data = data
        self._files = {file.name: file for file in record.volumes}

    @property
    def files(self) -> RemoteStep:
        return self

    def manifest(self) -> bytes:
        return self._data

    def reader(self, name: str, *, once: bool = True) -> DataReader:
        mapped = self.suppliers.mapped(name) if self.mapped else None
        return mapped or RemoteReader(self._files[name], self.suppliers)

    def close(self) -> None:
        self.suppliers.close()


class RemoteReader(DataReader):
    """A volume of the step. All that it returns has its digest, or comes from elsewhere. `reach` is
    called before the first byte comes, and with the number of those that have come."""

    def __init__(
        self,
        file: ChunkedVolume,
        suppliers: Suppliers,
        reach: Callable[[int], None] = lambda nbytes: None,
    ) -> None:
        self._file, self.nbytes, self._suppliers = file, file.nbytes, suppliers
        self._reach = reach

    def read_into(self, position: int, view: memoryview) -> None:
        stop, size = position + len(view), self._file.chunk_bytes
        if position % size or (stop % size and stop != self.nbytes):
            first = position // size * size
            last = min(-(-stop // size) * size, self.nbytes)
            check_free(last - first)
            whole = memoryview(bytearray(last - first))
            self.read_into(first, whole)
            view[:] = whole[position - first : stop - first]
            return
        at = position
        while at < stop:
            at = self._some(at, view[at - position :], at - position)

    def _some(self, start: int, view: memoryview, before: int) -> int:
        """Read what one supplier gives of a range; returns up to where all digests match."""
        name, suppliers = self._file.name, self._suppliers
        supplier = suppliers.take(name)
        chunks = ArrivingChunks(self._file, start)
        try:
            try:
                seconds = suppliers.deadline.left()
                self._reach(done := before)
                for part in supplier.read(name, start, [view], seconds=seconds):
                    self._reach(done := done + len(part))
                    if suppliers.stopped.is_set():
                        break
                    if not chunks.add(part):
                        why = f"wrong digest of {name} at byte {chunks.at}"
                        if supplier.is_gone():
                            suppliers.gone = True
                            why = "the step was replaced while it was read"
                        suppliers.drop(supplier, why)
                        break
            finally:
                suppliers.release(supplier, chunks.at - start)
        except SUPPLY_FAULTS as fault:
            suppliers.note(name, supplier, fault)
        return chunks.at


class ArrivingChunks:
    """Hashes bytes as they arrive. `at`: up to where the digests of whole chunks match."""

    def __init__(self, file: ChunkedVolume, start: int) -> None:
        self._file, self.at = file, start
        self._hasher = RunningDigest()
        self._hashed = start

    def add(self, view: memoryview) -> bool:
        """More bytes have come; whether every chunk that they complete is right."""
        while len(view):
            end = min(self.at + self._file.chunk_bytes, self._file.nbytes)
            part = view[: end - self._hashed]
            self._hasher.update(part)
            self._hashed += len(part)
            view = view[len(part) :]
            if self._hashed == end:
                if self._hasher.digest() != digest_of(self._file, self.at):
                    return False
                self._hasher.reset()
                self.at = end
        return True


def digest_of(file: ChunkedVolume, start: int) -> bytes:
    """The recorded digest of the chunk that begins at a byte."""
    at = start // file.chunk_bytes * DIGEST_BYTES
    return file.digests[at : at + DIGEST_BYTES]
