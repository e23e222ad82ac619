"""A step that several sources have: read from the first, and what that lacks from the others.

Sources with the same content have the same chunks. Chunks that have arrived and are right stay,
whichever source fails, and the others are asked for the chunks that are missing.
"""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing

import xxhash

from torchrelay.deadlines import Deadline
from torchrelay.errors import EndpointError, RelayError
from torchrelay.record.encoding import content_digest
from torchrelay.record.schema import Record, VolumeRecord
from torchrelay.sources.remote_step import RemoteReader, Supplier, Suppliers, digest_of
from torchrelay.sources.seam import Opened
from torchrelay.stores.seam import DataReader

_FAULTS = (RelayError, OSError, EOFError)


class StepSupplier(Supplier):
    """Another source of a step, opened when it is first asked."""

    def __init__(self, name: str, open_step: Callable[[], Opened]) -> None:
        super().__init__(name)
        self._open = open_step
        self.content = ""  # what it must have, as `content_digest` has it
        self._opened: Opened | None = None
        self._lock = threading.Lock()

    def read(
        self, volume: str, start: int, views: Sequence[memoryview], *, seconds: float
    ) -> Iterator[int]:
        try:
            with closing(self._reader(volume)) as reader:
                reader.read_into(start, views)
        except _FAULTS as fault:
            raise EndpointError(getattr(fault, "message", "") or str(fault)) from fault
        yield from map(len, views)

    def _reader(self, volume: str) -> DataReader:
        with self._lock:
            if self._opened is None:
                self._opened = self._open()
                if content_digest(self._opened.record) != self.content:
                    raise EndpointError("it has other bytes of the step")
            return self._opened.files.reader(volume)

    def close(self) -> None:
        if self._opened is not None:
            self._opened.close()


class MendedStep:
    """See `seam.Opened` and `stores.seam.MendableStep`: a step of one source, whose chunks come
    from other sources where that one does not give them right."""

    def __init__(self, first: Opened, others: Sequence[StepSupplier], deadline: Deadline) -> None:
        self._first = first
        self.record: Record = first.record
        content = content_digest(self.record)
        self.digest = bytes.fromhex(content)
        self.url = first.files.url
        self.costly_reads = first.files.costly_reads
        self.trusted = first.files.trusted
        self._files = {file.name: file for file in self.record.volumes}
        for one in others:
            one.content = content
        volumes: dict[str, list[Supplier]] = {name: [*others] for name in self._files}
        self.others = Suppliers(volumes, deadline, f"step {self.record.step}")
        self._deadline = deadline
        # By volume: chunks of others, by where they begin.
        self.patches: dict[str, dict[int, bytearray]] = {name: {} for name in self._files}
        self.lost = ""  # what was first found wrong

    @property
    def files(self) -> MendedStep:
        return self

    def reader(self, name: str, *, once: bool = True) -> MendedReader:
        """A volume, also where the first source has none of that size."""
        file = self._files[name]
        try:
            found: DataReader | None = self._first.files.reader(name, once=once)
        except OSError as fault:
            found, self.lost = None, self.lost or f"{name} cannot be read: {fault}"
        if found is not None and found.nbytes != file.nbytes:
            self.lost = self.lost or f"{name} has {found.nbytes} bytes, {file.nbytes} were written"
            found.close()
            found = None
        return MendedReader(self, file, found)

    def mend(self, name: str, start: int, stop: int, why: str) -> bool:
        """Get the chunks of a range from others, where the first source does not give them. Whether
        all of them are here."""
        file = self._files[name]
        self.lost = self.lost or why
        reader = RemoteReader(file, self.others, self._deadline)
        for at in range(start // file.chunk_bytes * file.chunk_bytes, stop, file.chunk_bytes):
            if at in self.patches[name] or self._first_has(file, at):
                continue
            data = bytearray(min(file.chunk_bytes, file.nbytes - at))
            try:
                reader.read_into(at, [memoryview(data)])
            except _FAULTS:
                return False
            self.patches[name][at] = data
        return True

    def _first_has(self, file: VolumeRecord, start: int) -> bool:
        """Whether a chunk of the first source is right. A source that compares digests itself has
        failed already, and is not asked again."""
        if self.trusted:
            return False
        data = bytearray(min(file.chunk_bytes, file.nbytes - start))
        try:
            with closing(self._first.files.reader(file.name)) as reader:
                reader.read_into(start, [memoryview(data)])
        except _FAULTS:
            return False
        return xxhash.xxh3_128_digest(data) == digest_of(file, start)

    def close(self) -> None:
        self._first.close()
        self.others.close()


class MendedReader:
    """A volume of the first source, except for the chunks that came from others."""

    def __init__(self, step: MendedStep, file: VolumeRecord, first: DataReader | None) -> None:
        self._file, self._first = file, first
        self._patches, self._once = step.patches[file.name], step.costly_reads
        self.nbytes = file.nbytes
        self.cold = first is not None and first.cold
        self.batched = first is not None and first.batched

    def read_into(self, position: int, buffers: Sequence[memoryview]) -> None:
        views = [memoryview(buffer).cast("B") for buffer in buffers]
        if not self._patches:
            self._read(position, views)
            return
        for at, view in _by_chunk(position, views, self._file.chunk_bytes):
            skip = at % self._file.chunk_bytes
            patch = self._patches.get(at - skip)
            if patch is None:
                self._read(at, [view])
                continue
            view[:] = patch[skip : skip + len(view)]
            if self._once and skip + len(view) == len(patch):
                del self._patches[at - skip]

    def _read(self, position: int, views: list[memoryview]) -> None:
        if self._first is None:
            raise OSError(errno.EIO, f"{self._file.name} is not there as it was written")
        self._first.read_into(position, views)

    def read_cached(self, position: int, buffers: Sequence[memoryview]) -> bool:
        if self._first is None or self._patches:
            return False
        return self._first.read_cached(position, buffers)

    def memory(self, position: int, nbytes: int) -> memoryview | None:
        if self._first is None or self._patches:
            return None
        return self._first.memory(position, nbytes)

    def unchanged(self) -> bool:
        return self._first is None or self._first.unchanged()

    def close(self) -> None:
        if self._first is not None:
            self._first.close()


def _by_chunk(
    position: int, views: Sequence[memoryview], size: int
) -> Iterator[tuple[int, memoryview]]:
    """The views cut where chunks end, each with the position that it is for."""
    for view in views:
        while len(view):
            some = min(len(view), size - position % size)
            yield position, view[:some]
            position += some
            view = view[some:]
