"""A step of an endpoint on this host: its memory is shared, and read as a file in memory is.

The connection over which the descriptor came stays open while the step is read. So long the memory
is not written to, whatever is published: what is read is of one step, and needs no digests.
"""

from __future__ import annotations

import fcntl
import os
import socket
import threading
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple, Protocol

import msgspec

from torchrelay.machine import machine
from torchrelay.memory.mapped_range import MappedRange
from torchrelay.sources.lease import LocalFacts, MemoryLease, Wish
from torchrelay.sources.seam import Absent
from torchrelay.stores.local.files import through
from torchrelay.stores.writer.frames import receive_frame, send_frame

if TYPE_CHECKING:
    from torchrelay.record.checkpoint.schema import Checkpoint

ASK_SECONDS = 5.0
_LONG = 64 << 10  # bytes from which a memcpy of its own is faster than the kernel's copy of many

_lease = msgspec.msgpack.Decoder(MemoryLease)


class LentMemory:
    """Memory that an endpoint has lent: a descriptor, and the connection that keeps it so."""

    @classmethod
    def all(cls, facts: LocalFacts, snapshot: str, reader: str) -> list[LentMemory]:
        """All that an endpoint has of a step; `OSError` where it is not lent."""
        found = [cls(facts, snapshot, reader)]
        try:
            found += [cls(facts, snapshot, reader, part) for part in range(1, found[0].parts)]
        except BaseException:
            for memory in found:
                memory.close()
            raise
        return found

    def __init__(self, facts: LocalFacts, snapshot: str, reader: str, part: int = 0) -> None:
        """`OSError` where it is not lent."""
        if facts.machine != machine() or not facts.machine:
            raise OSError("the endpoint is on another machine")
        self.fd = -1
        self._line = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._line.settimeout(ASK_SECONDS)
            self._line.connect(f"\0{facts.socket}")
            with suppress(BrokenPipeError):  # it may refuse, and say why, before it is asked
                send_frame(self._line, msgspec.msgpack.encode(Wish(snapshot, reader, part)))
            lease = _lease.decode(receive_frame(self._line))
            if lease.why:
                raise OSError(lease.why)
            _, descriptors, _, _ = socket.recv_fds(self._line, 1, 1)
            if not descriptors:
                raise OSError("no descriptor came")
            self.fd = descriptors[0]
            self._check(lease)
        except BaseException as fault:
            self.close()
            if isinstance(fault, (EOFError, msgspec.MsgspecError)):
                raise OSError(f"the endpoint's socket answers otherwise: {fault}") from None
            raise
        self.volumes, self.parts = lease.volumes, lease.parts

    def _check(self, lease: MemoryLease) -> None:
        """The memory is as large as was said, and stays so."""
        sealed = fcntl.fcntl(self.fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
        if not sealed or os.fstat(self.fd).st_size < lease.nbytes:
            raise OSError("what came is no sealed memory of that size")
        for start, nbytes in lease.volumes.values():
            if not 0 <= start <= start + nbytes <= lease.nbytes:
                raise OSError("a volume reaches out of the memory")

    def close(self) -> None:
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)
        self._line.close()


class MemoryFile(Protocol):
    """A descriptor of memory that is read from."""

    fd: int

    def close(self) -> None: ...


class VolumePlace(NamedTuple):
    """Where a volume lies."""

    memory: MemoryFile
    start: int
    nbytes: int


class MappedStep:
    """See `seam.OpenStep`."""

    costly_reads = False

    def __init__(
        self, url: str, data: bytes, places: dict[str, VolumePlace], *, trusted: bool
    ) -> None:
        self.url = url
        self.trusted = trusted  # whether digests are left out
        self._data = data
        self._places = places
        self._readers = {name: MappedReader(place) for name, place in places.items()}

    @classmethod
    def of(
        cls,
        url: str,
        data: bytes,
        record: Checkpoint,
        memories: Iterable[LentMemory],
        *,
        trusted: bool,
    ) -> MappedStep | Absent:
        """A step whose volumes are all in memory that was lent."""
        places: dict[str, VolumePlace] = {}
        for memory in memories:
            for name, (start, nbytes) in memory.volumes.items():
                places.setdefault(name, VolumePlace(memory, start, nbytes))
        for file in record.files:
            if file.name not in places or places[file.name].nbytes != file.nbytes:
                return Absent(f"{file.name} is not in the memory that was lent")
        return cls(url, data, places, trusted=trusted)

    def manifest(self) -> bytes:
        return self._data

    def sizes(self) -> dict[str, int]:
        return {name: place.nbytes for name, place in self._places.items()}

    def reader(self, name: str, *, once: bool = True) -> MappedReader:
        return self._readers[name]

    def close(self) -> None:
        self._readers.clear()
        for place in self._places.values():
            place.memory.close()


class MappedReader:
    """A volume in memory that was lent. Copies let other threads run."""

    cold = False
    batched = False

    def __init__(self, place: VolumePlace) -> None:
        self._place = place
        self.nbytes = place.nbytes
        self._lock = threading.Lock()
        self._range: MappedRange | None = None

    def memory(self, position: int, nbytes: int) -> memoryview | None:
        """See `stores.seam.MappableReader`."""
        return self._mapped.view(position, nbytes)

    @property
    def _mapped(self) -> MappedRange:
        with self._lock:
            if self._range is None:
                self._range = MappedRange(self._place.memory.fd, self._place.start, self.nbytes)
            return self._range

    def read_into(self, position: int, buffers: Sequence[memoryview]) -> None:
        views = [view for view in buffers if len(view)]
        if views and sum(map(len, views)) >= len(views) * _LONG:
            self._mapped.copy_to(position, views)
            return
        if not through(os.preadv, self._place.memory.fd, views, self._place.start + position):
            raise EOFError(f"the memory ends before byte {position + sum(map(len, views))}")

    def read_cached(self, position: int, buffers: Sequence[memoryview]) -> bool:
        with suppress(OSError, EOFError):
            self.read_into(position, buffers)
            return True
        return False

    def unchanged(self) -> bool:
        return True  # nobody writes to it while it is lent

    def close(self) -> None:
        """Nothing: its step gives the memory back."""
