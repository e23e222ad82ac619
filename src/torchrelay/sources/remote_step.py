"""A step at one or several endpoints, as a step that can be read.

Bytes come straight to the memory that they are for, and each chunk is hashed as it arrives. A
chunk that is not what the record says is fetched again from elsewhere. So what a reader returns
has been verified.
"""

from __future__ import annotations

import http.client
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Protocol
from urllib.parse import quote

import xxhash

from torchrelay.deadlines import Deadline
from torchrelay.errors import EndpointError
from torchrelay.geometry import DIGEST_BYTES
from torchrelay.sources.connection import Answered
from torchrelay.sources.suppliers import Supplier, Suppliers

if TYPE_CHECKING:  # a keeper reads from others too, and has no torch
    from torchrelay.record.checkpoint.schema import Checkpoint

_PASSING = (408, 425, 429, 500, 502, 503, 504)  # answers that may be others later


class ChunkedVolume(Protocol):
    """A volume, and the digests of its chunks: a `DataFile` of a record, or what stands for it."""

    @property
    def name(self) -> str: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def chunk_bytes(self) -> int: ...
    @property
    def digests(self) -> bytes: ...


class RemoteStep:
    """See `seam.OpenStep`."""

    def __init__(
        self,
        url: str,
        data: bytes,
        record: Checkpoint,
        snapshot: str,
        suppliers: Suppliers,
        deadline: Deadline,
    ) -> None:
        self.url = url
        self.suppliers = suppliers
        self.costly_reads = self.trusted = True
        self._data, self._snapshot, self._deadline = data, snapshot, deadline
        self._files = {file.name: file for file in record.files}

    def look_near(self) -> None:
        """Suppliers have memory on this host: where all of the step is in it, it is read twice, to
        be checked and to be landed, which needs no memory of its own."""
        self.costly_reads = self.trusted = not self.suppliers.all_near

    def manifest(self) -> bytes:
        return self._data

    def sizes(self) -> dict[str, int]:
        return {name: file.nbytes for name, file in self._files.items()}

    def reader(self, name: str, *, once: bool = True) -> RemoteReader:
        return RemoteReader(self._files[name], self._snapshot, self.suppliers, self._deadline)

    def close(self) -> None:
        self.suppliers.stopped.set()
        self.suppliers.close()


class RemoteReader:
    """A volume of the step. Ranges of whole chunks have their digests, or come from elsewhere."""

    cold = False
    batched = False

    def __init__(
        self, file: ChunkedVolume, snapshot: str, suppliers: Suppliers, deadline: Deadline
    ) -> None:
        self._file = file
        self.nbytes = file.nbytes
        self._path = f"/volumes/{snapshot}/{quote(file.name)}"
        self._suppliers = suppliers
        self._deadline = deadline

    def read_into(self, position: int, buffers: Sequence[memoryview]) -> None:
        views = [memoryview(buffer).cast("B") for buffer in buffers]
        stop = position + sum(map(len, views))
        size = self._file.chunk_bytes
        if position % size or (stop % size and stop != self.nbytes):
            # Of memory that is near, parts of chunks are read as they are: whoever reads them has
            # the digests to compare with, and reads whole chunks where one does not hold.
            if not self.read_cached(position, views):
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
        """Read what one supplier gives of a range; up to where all chunks hold."""
        name = self._file.name
        supplier = self._suppliers.take(name)
        chunks = ArrivingChunks(self._file, start, views)
        fault: Exception | None = None
        try:
            self._stream(supplier, start, views, chunks)
        except (OSError, http.client.HTTPException, EndpointError, Answered) as found:
            fault = found
        finally:
            self._suppliers.release(supplier, chunks.at - start)
        if isinstance(fault, Answered):
            self._refused(supplier, fault)
        elif isinstance(fault, EndpointError):
            self._suppliers.drop(supplier, fault.message)
        elif fault is not None:
            self._suppliers.failed(name, supplier, _words(fault))
        return chunks.at

    def _stream(
        self, supplier: Supplier, start: int, views: list[memoryview], chunks: ArrivingChunks
    ) -> None:
        seconds, name = max(self._deadline.left(), 0.01), self._file.name
        for nbytes in supplier.read(name, self._path, start, views, seconds=seconds):
            if self._suppliers.stopped.is_set():
                return
            if not chunks.add(nbytes):
                self._suppliers.drop(supplier, self._wrong(supplier, chunks.at))
                return

    def _wrong(self, supplier: Supplier, at: int) -> str:
        """What is wrong with an endpoint that gave other bytes: it may have the step no more."""
        probe = self._path.split("/")[2]
        try:
            answer = supplier.host.get(f"/places.json?snapshot={probe}", seconds=5.0)
            if answer.status == 410:
                self._suppliers.gone = True
                return "the step was replaced while it was read"
        except (OSError, http.client.HTTPException, EndpointError):
            pass
        return f"wrong digest of {self._file.name} at byte {at}"

    def _refused(self, supplier: Supplier, answer: Answered) -> None:
        status = answer.reply.status
        if status in _PASSING:
            self._suppliers.failed(self._file.name, supplier, str(answer))
            return
        if status == 410:
            self._suppliers.gone = True
        self._suppliers.drop(supplier, str(answer))

    def read_cached(self, position: int, buffers: Sequence[memoryview]) -> bool:
        near = self._suppliers.near(self._file.name)
        return near is not None and near.read_cached(position, buffers)

    def memory(self, position: int, nbytes: int) -> memoryview | None:
        """See `stores.seam.MappableReader`."""
        near = self._suppliers.near(self._file.name)
        return None if near is None else near.memory(position, nbytes)

    def unchanged(self) -> bool:
        return True

    def close(self) -> None:
        """Nothing: its step closes the connections."""


class ArrivingChunks:
    """Hashes bytes as they come to their places. `at`: up to where whole chunks hold."""

    def __init__(self, file: ChunkedVolume, start: int, views: list[memoryview]) -> None:
        self._file, self.at = file, start
        self._views = list(views)
        self._hasher = xxhash.xxh3_128()
        self._hashed = start

    def add(self, nbytes: int) -> bool:
        """So many bytes have come; whether every chunk that they complete has its digest."""
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
                place = self.at // self._file.chunk_bytes * DIGEST_BYTES
                if self._hasher.digest() != self._file.digests[place : place + DIGEST_BYTES]:
                    return False
                self._hasher.reset()
                self.at = end
        return True


def _from(views: list[memoryview], skip: int) -> Iterator[memoryview]:
    """The views without their first bytes."""
    for view in views:
        if skip < len(view):
            yield view[skip:]
        skip = max(0, skip - len(view))


def _words(fault: BaseException) -> str:
    if isinstance(fault, OSError) and fault.strerror:
        return fault.strerror
    return str(fault) or type(fault).__name__
