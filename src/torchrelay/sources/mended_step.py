"""A step that several sources have: read from the first, and what that lacks from the others.

Sources with the same content have the same chunks. So what has come and holds stays, whichever
source fails, and the others are asked for the chunks that are missing.
"""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Iterator, Sequence

import xxhash

from torchrelay.errors import RelayError
from torchrelay.geometry import DIGEST_BYTES
from torchrelay.record.checkpoint.commit import content_digest
from torchrelay.record.checkpoint.schema import Checkpoint, DataFile
from torchrelay.sources.seam import Opened
from torchrelay.stores.seam import DataReader, MappableReader


class Successor:
    """Another source of the step. It is opened when the first chunk is asked of it."""

    def __init__(self, name: str, open_step: Callable[[], Opened]) -> None:
        self.name = name
        self._open = open_step
        self._opened: Opened | None = None
        self._readers: dict[str, DataReader] = {}
        self._lock = threading.Lock()
        self.bytes = 0  # that it gave
        self.failed = ""  # why it is asked no more

    def read(self, file: DataFile, start: int, content: str) -> bytearray | None:
        """A chunk that has its digest; None where it cannot be had here."""
        try:
            reader = self._reader(file, content)
            if reader is None:
                return None
            data = bytearray(min(file.chunk_bytes, file.nbytes - start))
            reader.read_into(start, [memoryview(data)])
        except (RelayError, OSError, EOFError) as fault:
            with self._lock:
                self.failed = self.failed or getattr(fault, "message", str(fault))
            return None
        if not _holds(file, start, data):
            return None
        with self._lock:
            self.bytes += len(data)
        return data

    def _reader(self, file: DataFile, content: str) -> DataReader | None:
        with self._lock:
            if self.failed:
                return None
            if self._opened is None:
                self._opened = self._open()
                if content_digest(self._opened.record) != content:
                    self.failed = "it has other bytes of the step"
                    return None
            if file.name not in self._readers:
                self._readers[file.name] = self._opened.files.reader(file.name)
            return self._readers[file.name]

    def close(self) -> None:
        for reader in self._readers.values():
            reader.close()
        if self._opened is not None:
            self._opened.close()


class MendedStep:
    """See `seam.Opened` and `stores.seam.MendableStep`: a step of one source, whose chunks come
    from its successors where that source does not give them right."""

    def __init__(self, first: Opened, successors: Sequence[Successor]) -> None:
        self._first, self._successors = first, successors
        self.record: Checkpoint = first.record
        self._content = content_digest(self.record)
        self.digest = bytes.fromhex(self._content)
        self.url = first.files.url
        self.costly_reads = first.files.costly_reads
        self.trusted = first.files.trusted
        self._files = {file.name: file for file in self.record.files}
        self.patches: dict[tuple[str, int], bytearray] = {}  # by volume and where a chunk begins
        self.lost = ""  # what was first found wrong

    @property
    def files(self) -> MendedStep:
        return self

    def manifest(self) -> bytes:
        return self._first.files.manifest()

    def sizes(self) -> dict[str, int]:
        return {name: file.nbytes for name, file in self._files.items()}

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
        """Have the chunks of a range from others, where the first source does not give them.
        Whether all of them are here."""
        file = self._files[name]
        self.lost = self.lost or why
        size = file.chunk_bytes
        missing = [
            at
            for at in range(start // size * size, stop, size)
            if (name, at) not in self.patches and not self._first_holds(file, at)
        ]
        for successor in self._successors:
            left = []
            for at in missing:
                data = successor.read(file, at, self._content)
                if data is None:
                    left.append(at)
                else:
                    self.patches[name, at] = data
            missing = left
        return not missing

    def _first_holds(self, file: DataFile, start: int) -> bool:
        """Whether a chunk of the first source has its digest. One whose source compared it already,
        and failed, is not asked for again."""
        if self.trusted:
            return False
        data = bytearray(min(file.chunk_bytes, file.nbytes - start))
        try:
            reader = self._first.files.reader(file.name)
            try:
                reader.read_into(start, [memoryview(data)])
            finally:
                reader.close()
        except (RelayError, OSError, EOFError):
            return False
        return _holds(file, start, data)

    @property
    def mended(self) -> dict[str, int]:
        """Bytes that came from others, by their names."""
        return {one.name: one.bytes for one in self._successors if one.bytes}

    @property
    def failed(self) -> dict[str, str]:
        """Why others could not help, by their names."""
        return {one.name: one.failed for one in self._successors if one.failed}

    def close(self) -> None:
        self._first.close()
        for one in self._successors:
            one.close()


class MendedReader:
    """A volume of the first source, but for the chunks that came from others."""

    def __init__(self, step: MendedStep, file: DataFile, first: DataReader | None) -> None:
        self._step, self._file, self._first = step, file, first
        self.nbytes = file.nbytes
        self.cold = first is not None and first.cold
        self.batched = first is not None and first.batched

    def read_into(self, position: int, buffers: Sequence[memoryview]) -> None:
        views = [memoryview(buffer).cast("B") for buffer in buffers]
        if not self._patched(position, sum(map(len, views))):
            self._read(position, views)
            return
        size = self._file.chunk_bytes
        for at, view in _by_chunk(position, views, size):
            patch = self._step.patches.get((self._file.name, at // size * size))
            if patch is None:
                self._read(at, [view])
                continue
            skip = at % size
            view[:] = patch[skip : skip + len(view)]
            if self._step.costly_reads and skip + len(view) == len(patch):
                del self._step.patches[self._file.name, at - skip]  # it is read once

    def _read(self, position: int, views: list[memoryview]) -> None:
        if self._first is None:
            raise OSError(errno.EIO, f"{self._file.name} is not there as it was written")
        self._first.read_into(position, views)

    def _patched(self, position: int, nbytes: int) -> bool:
        size = self._file.chunk_bytes
        return bool(self._step.patches) and any(
            (self._file.name, at) in self._step.patches
            for at in range(position // size * size, position + nbytes, size)
        )

    def read_cached(self, position: int, buffers: Sequence[memoryview]) -> bool:
        if self._first is None or self._patched(position, sum(map(len, buffers))):
            return False
        return self._first.read_cached(position, buffers)

    def memory(self, position: int, nbytes: int) -> memoryview | None:
        """See `stores.seam.MappableReader`."""
        if not isinstance(self._first, MappableReader) or self._patched(position, nbytes):
            return None
        return self._first.memory(position, nbytes)

    def unchanged(self) -> bool:
        return self._first is None or self._first.unchanged()

    def close(self) -> None:
        if self._first is not None:
            self._first.close()


def _holds(file: DataFile, start: int, data: bytearray) -> bool:
    place = start // file.chunk_bytes * DIGEST_BYTES
    return xxhash.xxh3_128_digest(data) == file.digests[place : place + DIGEST_BYTES]


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
