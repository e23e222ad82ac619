"""Digests and writes: ranges of memory into the files of a draft, on a few threads.

A file is cut into chunks. A chunk is hashed, unless its digest is known already, and written while
it is in the processor's cache. Memory that others may change meanwhile is copied first, a piece at
a time, so that the bytes that are written are those that were hashed. Hashing, copying and the
system calls let other threads run. No torch here: the writer process runs without it.
"""

from __future__ import annotations

import ctypes
import errno
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import zip_longest
from typing import TYPE_CHECKING, NamedTuple

from torchrelay.errors import CheckpointError
from torchrelay.memory.digest import ChunkDigests
from torchrelay.memory.pages import host_view
from torchrelay.memory.thread_pool import run_on_threads
from torchrelay.shortage import raise_shortage
from torchrelay.stores.draft import CommittedFile, DataFiles, ReuseRefusedError, Sink

if TYPE_CHECKING:
    from torchrelay.geometry.runs import Runs  # numpy, which the writer process does not load

PIECE = 1 << 20  # bytes of live memory that are copied, hashed and written at once, in the cache
TASK_BYTES = 4 << 20  # that a thread takes at once
FINISHERS = 32  # files that are made durable at once
WORKERS = max(2, min(8, (os.cpu_count() or 2) // 2))


class FileSpec(NamedTuple):
    """A file to write. `digests`: those of its chunks that are known, zeros for others, or none.
    `source`: a committed file with the same bytes, all of whose digests are known; then nothing of
    it is written from memory."""

    name: str
    nbytes: int
    chunk_bytes: int
    digests: bytes = b""
    source: CommittedFile | None = None


class Written(NamedTuple):
    """The digests of each file's chunks. `copied`: files that have a source, whose bytes had to be
    copied all the same, and why."""

    digests: list[bytes]
    copied: dict[str, str]


class Range(NamedTuple):
    """Bytes [start, stop) of a file; `start` is a multiple of its chunk size.

    `memory` has them by their position in the file, and may change at any time. Or they are a copy
    in one piece that does not change until it is written: then `memory` is the address at which
    byte 0 of the file would be.
    """

    file: int
    start: int
    stop: int
    memory: Runs | int


_Task = list[Range]
Placed = tuple[int, int, int, int]  # file, start and stop in it, position in the arena


class FileWriter:
    """The files of one rank's draft: `write` for each set of ranges, then `finish`; a block that
    fails gives them up. `base`: the address of the arena that `write_staged` takes bytes from."""

    def __init__(
        self,
        draft: DataFiles,
        files: Sequence[FileSpec],
        progress: Callable[[int], None] = lambda nbytes: None,
        base: int = 0,
    ) -> None:
        self._draft, self._files, self._progress, self._base = draft, files, progress, base
        self._copied: dict[str, str] = {}
        self._sinks: list[Sink] = []
        self._digests = [
            bytearray(file.digests or 16 * -(-file.nbytes // file.chunk_bytes)) for file in files
        ]
        self.current: str | None = None  # the file that was last used
        self._lock = threading.Lock()
        self._writes = 0  # that are in progress
        self._aborted = False
        try:
            for file in files:
                with self._named(file):
                    self._sinks.append(self._opened(file))
        except BaseException:
            self.abort()
            raise

    def _opened(self, file: FileSpec) -> Sink:
        if file.source is None:
            return self._draft.open(file.name, file.nbytes)
        return self._draft.reuse(file.name, file.nbytes, file.source)

    def __enter__(self) -> FileWriter:
        return self

    def __exit__(self, kind: object, fault: object, trace: object) -> None:
        if fault is not None:
            self.abort()

    def write(self, ranges: Sequence[Range]) -> None:
        """Hash and write all of the ranges; `CheckpointError` names the file that failed."""
        nbytes = sum(part.stop - part.start for part in ranges)
        threads = max(1, min(WORKERS, nbytes >> 20))

        def worker() -> Callable[[_Task], None]:
            buffer = ctypes.create_string_buffer(PIECE)

            def do(task: _Task) -> None:
                for part in task:
                    with self._named(self._files[part.file]):
                        self._write(part, buffer)
                    self._progress(part.stop - part.start)

            return do

        with self._lock:
            if self._aborted:
                raise CheckpointError("the save was given up", phase="write")
            self._writes += 1
        try:
            run_on_threads(self._tasks(ranges), worker, threads)
        finally:
            with self._lock:
                self._writes -= 1
            self._close_aborted()

    def write_staged(self, placed: Sequence[Placed]) -> None:
        """The same, of copies in the arena."""
        base = self._base
        self.write([Range(n, low, high, base + at - low) for n, low, high, at in placed])

    def _tasks(self, ranges: Sequence[Range]) -> list[_Task]:
        """The tasks of the threads. Files alternate, so that threads work on different ones. An
        ordered file is one task."""
        by_file: dict[int, list[Range]] = {}
        for part in ranges:
            chunk = self._files[part.file].chunk_bytes
            size = chunk * max(1, TASK_BYTES // chunk)
            by_file.setdefault(part.file, []).extend(
                part._replace(start=at, stop=min(at + size, part.stop))
                for at in range(part.start, part.stop, size)
            )
        queues: list[list[_Task]] = [
            [cuts] if self._sinks[file].ordered else [[cut] for cut in cuts]
            for file, cuts in by_file.items()
        ]
        return [task for turn in zip_longest(*queues) for task in turn if task is not None]

    def _write(self, part: Range, buffer: ctypes.Array[ctypes.c_char]) -> None:
        file, sink = self._files[part.file], self._sinks[part.file]
        found = self._digests[part.file]
        digests = ChunkDigests(file.nbytes, file.chunk_bytes, found, file.digests)
        for position, view in _pieces(part.memory, part.start, part.stop, buffer):
            digests.add(position, view)
            sink.write(position, view)

    def finish(self) -> Written:
        """Make the files durable."""

        def finish(number: int) -> None:
            file = self._files[number]
            with self._named(file):
                try:
                    self._sinks[number].finish()
                except ReuseRefusedError as fault:
                    self._copied[file.name] = fault.strerror or str(fault)
                    self._copy(number, file)

        run_on_threads(range(len(self._files)), lambda: finish, FINISHERS)
        return Written([bytes(digests) for digests in self._digests], self._copied)

    def _copy(self, number: int, file: FileSpec) -> None:
        """Write a file from its source, which is read for it, and compared."""
        assert file.source is not None
        self._sinks[number] = sink = self._draft.open(file.name, file.nbytes)
        buffer = memoryview(bytearray(min(PIECE, file.nbytes)))
        found = bytearray(len(file.digests))
        digests = ChunkDigests(file.nbytes, file.chunk_bytes, found)
        for at in range(0, file.nbytes, PIECE):
            view = buffer[: min(PIECE, file.nbytes - at)]
            self._draft.read(file.source, at, view)
            digests.add(at, view)
            sink.write(at, view)
        if found != file.digests:
            why = f"{file.source.name} is damaged in step {file.source.step}"
            raise OSError(errno.EIO, why)
        sink.finish()

    def abort(self) -> None:
        """Give the files up, as soon as no other thread writes to them: a descriptor that is closed
        before may be another file's by the time that the thread uses it."""
        self._aborted = True
        self._close_aborted()

    def _close_aborted(self) -> None:
        with self._lock:
            if self._aborted and not self._writes:
                for sink in self._sinks:
                    sink.abort()

    @contextmanager
    def _named(self, file: FileSpec) -> Iterator[None]:
        """Within: a failure of the medium is one of this file. In the phase "reuse" it may be one
        of its source, which cannot be taken the next time either."""
        self.current = name = file.name
        try:
            yield
        except OSError as fault:
            raise_shortage(fault, f"write {name}")
            raise CheckpointError(
                f"cannot write: {fault.strerror or fault}",
                phase="write" if file.source is None else "reuse",
                file=name,
            ) from fault


def _pieces(
    memory: Runs | int, start: int, stop: int, buffer: ctypes.Array[ctypes.c_char]
) -> Iterator[tuple[int, memoryview]]:
    """The bytes [start, stop) by their positions, a piece after the other, where no one else can
    change them: where they are, or in the caller's buffer."""
    whole = memoryview(buffer).cast("B")
    for at in range(start, stop, PIECE):
        end = min(at + PIECE, stop)
        if isinstance(memory, int):
            yield at, host_view(memory + at, end - at)
            continue
        memory.gather(at, end, ctypes.addressof(buffer))
        yield at, whole[: end - at]
