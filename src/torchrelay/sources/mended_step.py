"""A step that several sources have: read from the first, and what that lacks from the others.

Sources with the same content have the same chunks. Chunks that have arrived and are right stay,
whichever source fails, and the others are asked for the chunks that are missing.
"""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence

from torchrelay.errors import RelayError
from torchrelay.memory.digest import digest
from torchrelay.memory.free import check_free
from torchrelay.record.encoding import content_digest
from torchrelay.record.schema import Record, VolumeRecord
from torchrelay.sources.remote_step import digest_of
from torchrelay.sources.source import Opened
from torchrelay.stores.step_files import DataReader, StepFiles, WantedBox

_FAULTS = (RelayError, OSError, EOFError)


class OtherSource:
    """Another source of a step, opened when it is first asked. `bytes`: how much it gave; `fault`:
    why it could not give a chunk, after which it is asked no more."""

    def __init__(self, name: str, open_step: Callable[[], Opened]) -> None:
        self.name, self._open = name, open_step
        self._opened: Opened | None = None
        self._lock = threading.Lock()
        self.bytes, self.fault = 0, ""

    def gives(self, file: VolumeRecord, start: int, chunk: bytearray, content: str) -> bool:
        """Whether it fills a chunk with the right bytes. `content`: the digest of its step."""
        if self.fault:
            return False
        try:
            self._step(content).files.reader(file.name).read_into(start, memoryview(chunk))
            if digest(chunk) != digest_of(file, start):
                raise OSError(f"wrong digest of {file.name} at byte {start}")
        except _FAULTS as fault:
            self.fault = getattr(fault, "message", "") or str(fault)
            return False
        with self._lock:  # the threads of a load mend at once
            self.bytes += len(chunk)
        return True

    def _step(self, content: str) -> Opened:
        with self._lock:
            if self._opened is None:
                self._opened = self._open()
                if content_digest(self._opened.record) != content:
                    raise OSError("it has other bytes of the step")
            return self._opened

    def close(self) -> None:
        if self._opened is not None:
            self._opened.close()


class MendedStep(StepFiles):
    """A step of one source, whose chunks come from other sources where that one does not give them
    right. See `Opened`. It can do what the step of the first source can, but for memory of
    GPUs, whose chunks could not be replaced."""

    def __init__(self, first: Opened, others: Sequence[OtherSource]) -> None:
        self._first, self.others = first, others
        self.record: Record = first.record
        self._content = content_digest(self.record)
        self.digest = bytes.fromhex(self._content)
        self.url = first.files.url
        self.costly_reads = first.files.costly_reads
        self.trusted = first.files.trusted
        self.compared = first.files.compared
        self.mapped = first.files.mapped
        self.fetches_ahead = first.files.fetches_ahead
        self.lends = first.files.lends
        self._files = {file.name: file for file in self.record.volumes}
        # By volume: chunks that were fetched again, by where they begin.
        self.patches: dict[str, dict[int, bytearray]] = {name: {} for name in self._files}
        self.lost = ""  # what was first found wrong

    @property
    def files(self) -> MendedStep:
        return self

    def reader(self, name: str, *, once: bool = True) -> MendedReader:
        """A volume, also where the first source has none of that size."""
        file = self._files[name]
        try:
            found = self._first.files.reader(name, once=once)
            if found.nbytes != file.nbytes:
                raise OSError(f"it has {found.nbytes} bytes, {file.nbytes} were written")
        except OSError as fault:
            found, self.lost = _NoReader(), self.lost or f"{name} cannot be read: {fault}"
        return MendedReader(self, file, found)

    def mend(self, name: str, start: int, stop: int, why: str) -> bool:
        """Get the chunks of a range from whichever source gives them right, the first one first.
        Whether all of them are here."""
        file = self._files[name]
        self.lost = self.lost or why
        for at in range(start // file.chunk_bytes * file.chunk_bytes, stop, file.chunk_bytes):
            if at in self.patches[name]:
                continue
            check_free(min(file.chunk_bytes, file.nbytes - at))
            chunk = bytearray(min(file.chunk_bytes, file.nbytes - at))
            sources = [OtherSource("", lambda: self._first), *self.others]
            if not any(one.gives(file, at, chunk, self._content) for one in sources):
                return False
            self.patches[name][at] = chunk
        return True

    def prepare(self, wanted: Iterable[WantedBox]) -> None:
        self._first.files.prepare(wanted)

    def lend(self, name: str, start: int, nbytes: int) -> memoryview:
        return self._first.files.lend(name, start, nbytes)

    def close(self) -> None:
        self._first.close()
        for one in self.others:
            one.close()


class _NoReader(DataReader):
    """A volume that a source does not have."""

    nbytes = 0

    def read_into(self, position: int, view: memoryview) -> None:
        raise OSError(errno.EIO, "it is not there as it was written")


class MendedReader:
    """A volume of the first source, except for the chunks that were fetched again."""

    identity: object = None  # it is of several files

    def __init__(self, step: MendedStep, file: VolumeRecord, first: DataReader) -> None:
        self._first, self._chunk_bytes = first, file.chunk_bytes
        self._patches, self._once = step.patches[file.name], step.costly_reads
        self.nbytes, self.cold, self.batched = file.nbytes, first.cold, first.batched
        self.unchanged = first.unchanged

    def read_into(self, position: int, view: memoryview) -> None:
        if not self._patches:
            self._first.read_into(position, view)
            return
        for at, part in _by_chunk(position, view, self._chunk_bytes):
            skip = at % self._chunk_bytes
            patch = self._patches.get(at - skip)
            if patch is None:
                self._first.read_into(at, part)
                continue
            part[:] = patch[skip : skip + len(part)]
            if self._once and skip + len(part) == len(patch):
                del self._patches[at - skip]

    def read_cached(self, position: int, view: memoryview) -> bool:
        return not self._patches and self._first.read_cached(position, view)

    def memory(self, position: int, nbytes: int) -> memoryview | None:
        return None if self._patches else self._first.memory(position, nbytes)


def _by_chunk(position: int, view: memoryview, size: int) -> Iterator[tuple[int, memoryview]]:
    """A view cut where chunks end, each part with the position that it is for."""
    while len(view):
        some = min(len(view), size - position % size)
        yield position, view[:some]
        position += some
        view = view[some:]
