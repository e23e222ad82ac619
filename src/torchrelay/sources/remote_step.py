"""A step that one or several suppliers have, as a step that can be read.

Bytes come straight to their destination, and each chunk is hashed as it arrives. A chunk with a
wrong digest is fetched again from another supplier. So readers return verified bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Protocol

import xxhash

from torchrelay.deadlines import Deadline
from torchrelay.geometry import DIGEST_BYTES
from torchrelay.sources.suppliers import SUPPLY_FAULTS, Suppliers
from torchrelay.stores.seam import DataReader

if TYPE_CHECKING:  # a keeper reads from others too, and has no torch
    from torchrelay.record.schema import Record


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


class RemoteStep:
    """See `seam.Opened` and `stores.seam.OpenStep`.

    `verify`: whether digests of memory that is mapped on this host are compared, too.
    """

    def __init__(
        self,
        url: str,
        data: bytes,
        record: Record,
        snapshot: str,
        suppliers: Suppliers,
        deadline: Deadline,
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
        self._data, self._deadline, self._verify = data, deadline, verify or not self.mapped
        self._files = {file.name: file for file in record.volumes}

    @property
    def files(self) -> RemoteStep:
        return self

    def manifest(self) -> bytes:
        return self._data

    def reader(self, name: str, *, once: bool = True) -> RemoteReader:
        how = {"mapped": self.mapped, "verify": self._verify}
        return RemoteReader(self._files[name], self.suppliers, self._deadline, **how)

    def close(self) -> None:
        self.suppliers.close()


class RemoteReader(DataReader):
    """A volume of the step. Ranges of whole chunks have their digests, or come from elsewhere.

    `mapped`: all of the step is in memory of this host. With `verify`, parts of chunks are copied
    from there unverified: the caller compares digests, and reads whole chunks where one is wrong.
    """

    def __init__(
        self,
        file: ChunkedVolume,
        suppliers: Suppliers,
        deadline: Deadline,
        *,
        mapped: bool = False,
        verify: bool = True,
    ) -> None:
        self._file, self.nbytes = file, file.nbytes
        self._suppliers, self._deadline = suppliers, deadline
        self._mapped, self._verify = mapped, verify

    def read_into(self, position: int, buffers: Sequence[memoryview]) -> None:
        views = [memoryview(buffer).cast("B") for buffer in buffers]
        stop = position + sum(map(len, views))
        size = self._file.chunk_bytes
        parts = position % size or (stop % size and stop != self.nbytes)
        if (parts or not self._verify) and self.read_cached(position, views):
            return
        if parts:
            self._read_around(position, stop, views)
            return
        at = position
        while at < stop:
            at = self._some(at, list(_from(views, at - position)))

    def _read_around(self, start: int, stop: int, views: list[memoryview]) -> None:
        size = self._file.chunk_bytes
        first = start // size * size
        last = min(-(-stop // size) * size, self.nbytes)
        whole = memoryview(bytearray(last - first))
        self.read_into(first, [whole])
        at = start - first
        for view in views:
            view[:] = whole[at : at + len(view)]
            at += len(view)

    def _some(self, start: int, views: list[memoryview]) -> int:
        """Read what one supplier gives of a range; returns up to where all digests match."""
        name, suppliers = self._file.name, self._suppliers
        supplier = suppliers.take(name)
        chunks = ArrivingChunks(self._file, start, views)
        try:
            try:
                seconds = max(self._deadline.left(), 0.01)
                for nbytes in supplier.read(name, start, views, seconds=seconds):
                    if suppliers.stopped.is_set():
                        break
                    if not chunks.add(nbytes):
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

    def read_cached(self, position: int, buffers: Sequence[memoryview]) -> bool:
        mapped = self._suppliers.mapped(self._file.name) if self._mapped else None
        return mapped is not None and mapped.read_cached(position, buffers)

    def memory(self, position: int, nbytes: int) -> memoryview | None:
        mapped = self._suppliers.mapped(self._file.name) if self._mapped else None
        return None if mapped is None else mapped.memory(position, nbytes)


class ArrivingChunks:
    """Hashes bytes as they arrive. `at`: up to where the digests of whole chunks match."""

    def __init__(self, file: ChunkedVolume, start: int, views: list[memoryview]) -> None:
        self._file, self.at = file, start
        self._views = list(views)
        self._hasher = xxhash.xxh3_128()
        self._hashed = start

    def add(self, nbytes: int) -> bool:
        """That many more bytes have come; whether every chunk that they complete is right."""
        while nbytes:
            view = self._views[0]
            end = min(self.at + self._file.chunk_bytes, self._file.nbytes)
            some = min(nbytes, len(view), end - self._hashed)
            self._hasher.update(view[:some])
            self._hashed += some
            nbytes -= some
            self._views[0] = view[some:]
            if some == len(view):
                self._views.pop(0)
            if self._hashed == end:
                if self._hasher.digest() != digest_of(self._file, self.at):
                    return False
                self._hasher.reset()
                self.at = end
        return True


def digest_of(file: ChunkedVolume, start: int) -> bytes:
    """The recorded digest of the chunk that begins at a byte."""
    place = start // file.chunk_bytes * DIGEST_BYTES
    return file.digests[place : place + DIGEST_BYTES]


def _from(views: list[memoryview], skip: int) -> Iterator[memoryview]:
    """The views without their first bytes."""
    for view in views:
        if skip < len(view):
            yield view[skip:]
        skip = max(0, skip - len(view))
