"""Digests and writes: ranges of memory into the files of a draft, on a few threads.

A file is cut into chunks. A chunk is hashed, unless its digest is known already, and, while it is
in the processor's cache, written.
HostRuns that others may change meanwhile is copied first, a piece at a time, so that the bytes that
are written are those that were hashed. Hashing, copying and the system calls all let other threads
run. No torch here: the writer process does with it.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple, Protocol

import xxhash

from torchrelay.errors import CheckpointError
from torchrelay.memory.crew import share_out
from torchrelay.stores.seam import DataFiles, Sink

# Bytes of live memory that are copied, hashed and written at once: in a cache still, and few enough
# that threads do not wait for the interpreter between them.
PIECE = 1 << 20
KNOWN_BYTES = 8 << 20  # written at once where digests are known already
FINISHERS = 32  # files that are made durable at once
WORKERS = max(2, min(8, (os.cpu_count() or 2) // 2))


class HostRuns(Protocol):
    """Bytes of a file by their position in it, in host memory; `state.runs.Runs` is one."""

    def gather(self, start: int, stop: int, buffer: int) -> None:
        """Copy [start, stop) to an address."""


class Staged(NamedTuple):
    """A copy in one piece that nobody changes until it is written: `address` has byte `start`."""

    start: int
    address: int

    def view(self, start: int, stop: int) -> memoryview:
        return host_view(self.address + start - self.start, stop - start)


class FileSpec(NamedTuple):
    """A file to be. `digests`: those of its chunks that are known, zeros for others, or none."""

    name: str
    nbytes: int
    chunk_bytes: int
    digests: bytes = b""


class Range(NamedTuple):
    """Bytes [start, stop) of a file; `start` is a multiple of its chunk size.

    `memory` has them by their position in the file. What is not `Staged` may change at any time.
    """

    file: int
    start: int
    stop: int
    memory: HostRuns | Staged


class Writing:
    """The files of one rank's draft. `write` as often as there are ranges, then `finish`."""

    def __init__(
        self, draft: DataFiles, files: Sequence[FileSpec], *, workers: int = WORKERS
    ) -> None:
        self._files = files
        self._workers = workers
        self._sinks: list[Sink] = []
        self._digests = [
            bytearray(file.digests or 16 * -(-file.nbytes // file.chunk_bytes)) for file in files
        ]
        self._failure: BaseException | None = None
        self.current: str | None = None  # the file that was last turned to
        try:
            for file in files:
                self._at(file.name, lambda f=file: self._sinks.append(draft.open(f.name, f.nbytes)))  # type: ignore[misc]
        except BaseException:
            self.abort()
            raise

    def write(self, ranges: Sequence[Range]) -> None:
        """Hash and write all of the ranges; `CheckpointError` names the file that failed."""
        queue = _Queue(ranges, self._files, [sink.ordered for sink in self._sinks])
        threads = min(self._workers, queue.parallel)
        share_out([queue] * threads, lambda: self._work, threads)
        if self._failure is not None:  # of an earlier call
            raise self._failure

    def _work(self, queue: _Queue) -> None:
        own = ctypes.create_string_buffer(PIECE)
        try:
            while self._failure is None and (task := queue.take()) is not None:
                place, start, stop = task
                try:
                    self._chunks(queue.ranges[place], start, stop, own)
                finally:
                    queue.done(place)
        except BaseException as fault:
            self._failure = self._failure or fault
            raise

    def _chunks(self, part: Range, start: int, stop: int, own: ctypes.Array[ctypes.c_char]) -> None:
        file = self._files[part.file]
        if _is_known(file, start, stop):
            self._write(part, start, stop, own)
            return
        for at in range(start, stop, file.chunk_bytes):
            end = min(at + file.chunk_bytes, stop)
            if _is_known(file, at, end):
                self._write(part, at, end, own)
                continue
            hasher = xxhash.xxh3_128()
            self._write(part, at, end, own, hasher.update)
            place = at // file.chunk_bytes * 16
            self._digests[part.file][place : place + 16] = hasher.digest()

    def _write(
        self,
        part: Range,
        start: int,
        stop: int,
        own: ctypes.Array[ctypes.c_char],
        look: Callable[[memoryview], None] | None = None,
    ) -> None:
        for at, view in _still(part.memory, start, stop, own):
            if look is not None:
                look(view)
            self._at(self._files[part.file].name, partial(self._sinks[part.file].write, at, [view]))

    def finish(self) -> list[bytes]:
        """Make the files durable; the digests of each file's chunks."""
        pairs = list(zip(self._files, self._sinks, strict=True))
        share_out(pairs, lambda: self._finish, FINISHERS)
        return [bytes(digests) for digests in self._digests]

    def _finish(self, pair: tuple[FileSpec, Sink]) -> None:
        file, sink = pair
        self._at(file.name, sink.finish)

    def abort(self) -> None:
        for sink in self._sinks:
            sink.abort()

    def _at(self, name: str, act: Callable[[], object]) -> None:
        self.current = name
        try:
            act()
        except OSError as fault:
            raise CheckpointError(
                f"cannot write: {fault.strerror or fault}", phase="write", file=name
            ) from fault


def _several(file: FileSpec) -> int:
    """Bytes that a thread takes at once: a chunk, or several where there is nothing to hash."""
    return file.chunk_bytes * (max(1, KNOWN_BYTES // file.chunk_bytes) if file.digests else 1)


def _is_known(file: FileSpec, start: int, stop: int) -> bool:
    """Whether the digests of all chunks of a range are known."""
    first, last = start // file.chunk_bytes, -(-stop // file.chunk_bytes)
    known = file.digests[16 * first : 16 * last]
    return bool(known) and all(any(known[at : at + 16]) for at in range(0, len(known), 16))


class _Queue:
    """Chunks of ranges, handed out so that threads are on different files while they can."""

    def __init__(
        self, ranges: Sequence[Range], files: Sequence[FileSpec], ordered: Sequence[bool]
    ) -> None:
        self.ranges = ranges
        self._chunks = [_several(files[part.file]) for part in ranges]
        self._ordered = [ordered[part.file] for part in ranges]
        self._next = [part.start for part in ranges]
        self._active = [0] * len(ranges)
        self._lock = threading.Condition()
        whole = sum(part.stop - part.start for part in ranges)
        self.parallel = max(1, whole // (1 << 20))

    def take(self) -> tuple[int, int, int] | None:
        with self._lock:
            while True:
                left = [i for i, part in enumerate(self.ranges) if self._next[i] < part.stop]
                if not left:
                    return None
                free = [i for i in left if not (self._ordered[i] and self._busy(i))]
                if free:
                    place = min(free, key=lambda i: (self._active[i], i))
                    start = self._next[place]
                    stop = min(start + self._chunks[place], self.ranges[place].stop)
                    self._next[place] = stop
                    self._active[place] += 1
                    return place, start, stop
                self._lock.wait()

    def _busy(self, place: int) -> bool:
        """Whether an ordered file has a chunk under way, or earlier ranges to come."""
        file = self.ranges[place].file
        return any(
            self._active[i] or (i < place and self._next[i] < part.stop)
            for i, part in enumerate(self.ranges)
            if part.file == file
        )

    def done(self, place: int) -> None:
        with self._lock:
            self._active[place] -= 1
            self._lock.notify_all()


def _still(
    memory: HostRuns | Staged, start: int, stop: int, own: ctypes.Array[ctypes.c_char]
) -> Iterator[tuple[int, memoryview]]:
    """The bytes [start, stop) by their positions, where nobody else can change them: in one piece,
    or one after the other in a buffer of the caller's own."""
    if isinstance(memory, Staged):
        yield start, memory.view(start, stop)
        return
    whole = memoryview(own).cast("B")
    for at in range(start, stop, len(own)):
        end = min(at + len(own), stop)
        memory.gather(at, end, ctypes.addressof(own))
        yield at, whole[: end - at]


def host_view(address: int, nbytes: int) -> memoryview:
    """Host memory as a buffer. The caller keeps it alive."""
    return memoryview((ctypes.c_char * nbytes).from_address(address)).cast("B")
