"""Ranges of a step's files, read on a few threads and compared with the digests of their chunks.

Files are read in pieces that stay in the processor's cache from the read to the hash. No torch: a
command that only looks at a step starts without it.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

from torchrelay.errors import CheckpointError, DamagedError, RelayError
from torchrelay.geometry import DIGEST_BYTES
from torchrelay.memory.digest import RunningDigest
from torchrelay.memory.free import check_free
from torchrelay.memory.thread_pool import run_on_threads
from torchrelay.planning.stored import Names, images_in
from torchrelay.record.schema import Record, VolumeRecord
from torchrelay.shortage import raise_shortage
from torchrelay.stores.retry import is_wrong
from torchrelay.stores.step_files import DataReader, StepFiles
from torchrelay.stores.writer.file_writer import WORKERS

TASK_BYTES = 8 << 20  # what a thread takes on, or asks a service for, at once
PIECE_BYTES = 1 << 20  # read and hashed at once
COSTLY_WORKERS = 8  # most of them wait for an answer
COLD_WORKERS = 4  # some wait for the medium while others hash

Spans = list[tuple[int, int]]
Views = Iterable[tuple[int, memoryview]]
Act = Callable[["Task", DataReader, "Scratch"], None]


class Task(NamedTuple):
    """Bytes [start, stop) of a file."""

    file: int
    start: int
    stop: int


def opened(step: StepFiles, record: Record, file: int, *, once: bool = False) -> DataReader:
    """A file of a step; `DamagedError` unless it exists and has its recorded size."""
    expected = record.volumes[file]
    whole = Task(file, 0, expected.nbytes)
    with reading(step, record, whole):
        reader = step.reader(expected.name, once=once)
    if reader.nbytes != expected.nbytes:
        problem = f"has {reader.nbytes} bytes, {expected.nbytes} were written"
        lost = whole._replace(start=min(reader.nbytes, expected.nbytes))
        raise damaged(step, record, lost, problem)
    return reader


@contextmanager
def reading(step: StepFiles, record: Record, task: Task) -> Iterator[None]:
    """Within: a read that fails names its file. It is damage only if the file itself is found
    wrong; a medium that does not give its bytes may give them later."""
    try:
        yield
    except (OSError, EOFError) as fault:
        raise_shortage(fault, f"read {step.url}/{record.volumes[task.file].name}")
        if isinstance(fault, EOFError) or is_wrong(fault):
            raise damaged(step, record, task, f"cannot be read: {fault}") from fault
        raise CheckpointError(
            f"cannot be read: {fault.strerror or fault}; its bytes may be intact, so try again "
            "when the storage works",
            step=record.step,
            phase="read",
            file=f"{step.url}/{record.volumes[task.file].name}",
        ) from fault


def damaged(step: StepFiles, record: Record, task: Task, problem: str) -> DamagedError:
    """The error of a range that is not what was written; it names the tensors in it."""
    file = record.volumes[task.file]
    images, names = images_in(record, *task), Names(record)
    shown = ", ".join(names[image] for image in images[:8])
    shown += f" and {len(images) - 8} more" if len(images) > 8 else ""
    return DamagedError(
        f"{file.name} {problem}",
        file=f"{step.url}/{file.name}",
        step=record.step,
        phase="verify",
        path=shown or None,
        offset=task.start,
    )


def whole_chunks(
    file: VolumeRecord, spans: Iterable[tuple[int, int]], most: int
) -> Iterator[tuple[int, int]]:
    """The chunks of a file that spans of it touch, each once, in ranges of about `most` bytes."""
    size = file.chunk_bytes
    several = max(1, most // size)
    last = 0
    for start, stop in spans:
        first, end = max(start // size, last), -(-stop // size)
        for chunk in range(first, end, several):
            yield chunk * size, min(min(chunk + several, end) * size, file.nbytes)
        last = max(last, end)


def merged(spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Spans in ascending order, those that touch each other as one."""
    found: list[tuple[int, int]] = []
    for start, stop in spans:
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(stop, found[-1][1]))
        elif stop > start:
            found.append((start, stop))
    return found


class ChunkReads:
    """Spans of the files of one step, by the number of the file, in ascending order."""

    def __init__(
        self,
        step: StepFiles,
        record: Record,
        spans: Mapping[int, Spans],
        progress: Callable[[int], None] | None = None,
    ) -> None:
        self._step, self._record, self._spans = step, record, spans
        self._progress = progress or (lambda nbytes: None)
        self._batched = step.costly_reads
        self.begun = False  # whether files were opened, so that bytes may have come
        self._checked = False

    def check(self) -> None:
        """Raise `DamagedError` unless every chunk that has wanted bytes has its digest."""
        self._run(self._check, once=False)
        self._checked = True

    def _check(self, task: Task, reader: DataReader, scratch: Scratch) -> None:
        verifier, memory = Verifier(self._step, self._record, task), self._memory(task, reader)
        if memory is not None:
            verifier.update(memory)
            return
        for at, view in self._in_scratch(task, reader, scratch):
            self._read(task, reader, at, view)
            verifier.update(view)

    def _run(self, act: Act, *, once: bool, exact: bool = False) -> None:
        """Have all spans done. `once`: they are not read again. `exact`: the wanted bytes and no
        others, unless reads need alignment; otherwise chunks are whole."""
        readers = {file: opened(self._step, self._record, file, once=once) for file in self._spans}
        tasks = [
            Task(file, *span)
            for file, reader in readers.items()
            for span in self._cut(file, exact and not self._is_batched(reader))
        ]
        workers = WORKERS  # more where some of them wait
        if self._step.costly_reads:
            workers = max(WORKERS, COSTLY_WORKERS)
        elif any(reader.cold for reader in readers.values()):
            workers = max(WORKERS, COLD_WORKERS)

        def work() -> Callable[[Task], None]:
            scratch = Scratch()

            def do(task: Task) -> None:
                try:
                    act(task, readers[task.file], scratch)
                except RelayError as fault:
                    step, name = self._step, self._record.volumes[task.file].name
                    if not step.mend(name, task.start, task.stop, fault.message):
                        raise
                    act(task, readers[task.file], scratch)
                self._progress(task.stop - task.start)

            return do

        self.begun = True
        run_on_threads(tasks, work, workers)

    def _is_batched(self, reader: DataReader) -> bool:
        return self._batched or reader.batched

    def _cut(self, file: int, exact: bool) -> Iterable[tuple[int, int]]:
        """The spans of a file in ranges of a size that is worth a task or a request."""
        spans, size = self._spans[file], TASK_BYTES
        if not exact:
            return whole_chunks(self._record.volumes[file], spans, size)
        return ((at, min(stop, at + size)) for low, stop in spans for at in range(low, stop, size))

    def _in_scratch(self, task: Task, reader: DataReader, scratch: Scratch) -> Views:
        """Positions of the pieces of a range, each in the same memory."""
        size = task.stop - task.start if self._is_batched(reader) else PIECE_BYTES
        whole = scratch.view(min(size, task.stop - task.start))
        for at in range(task.start, task.stop, size):
            yield at, whole[: task.stop - at]

    def _memory(self, task: Task, reader: DataReader) -> memoryview | None:
        """A range in the memory of its source, if this process has it mapped."""
        with reading(self._step, self._record, task):
            return reader.memory(task.start, task.stop - task.start)

    def _read(self, task: Task, reader: DataReader, at: int, view: memoryview) -> None:
        with reading(self._step, self._record, task):
            reader.read_into(at, view)


class Verifier:
    """Compares the chunks of a range with their digests while its bytes come, in order."""

    def __init__(self, step: StepFiles, record: Record, task: Task) -> None:
        self._step, self._record, self._task = step, record, task
        self._file = record.volumes[task.file]
        self._start = self._at = task.start
        self._hasher = RunningDigest()

    def update(self, view: memoryview) -> None:
        """`DamagedError` where a chunk ends that is not what was written."""
        while len(view):
            end = min(self._start + self._file.chunk_bytes, self._task.stop)
            part = view[: end - self._at]
            self._hasher.update(part)
            self._at += len(part)
            if self._at < end:
                return
            place = self._start // self._file.chunk_bytes * DIGEST_BYTES
            if self._hasher.digest() != self._file.digests[place : place + DIGEST_BYTES]:
                raise not_as_written(self._step, self._record, self._task.file, self._start, end)
            self._start = self._at
            self._hasher.reset()
            view = view[len(part) :]


class Scratch:
    """Memory of one thread, page-aligned and as large as was ever needed."""

    def __init__(self) -> None:
        self._whole: Any = memoryview(b"")

    def view(self, nbytes: int) -> memoryview:
        if len(self._whole) < nbytes:
            check_free(nbytes)
            try:
                self._whole = memoryview(mmap.mmap(-1, nbytes))
            except (OSError, ValueError, OverflowError) as fault:
                raise MemoryError(f"no {nbytes} bytes of memory: {fault}") from None
        piece: memoryview = self._whole[:nbytes]
        return piece


def not_as_written(
    step: StepFiles, record: Record, file: int, start: int, stop: int
) -> DamagedError:
    """The error of a chunk whose digest is another one."""
    problem = f"bytes {start} to {stop} are not those written"
    return damaged(step, record, Task(file, start, stop), problem)


VerifiedFiles = set[tuple[object, bytes]]  # by their identity, with the digests that they have


def check_chunks(
    step: StepFiles,
    record: Record,
    progress: Callable[[int], None] | None = None,
    known: VerifiedFiles | None = None,
) -> None:
    """Read every byte of a step; `DamagedError` unless every chunk has its digest. Files in `known`
    are not read again; those that were are added to it."""
    known = set() if known is None else known
    spans, read = {}, []
    for index, file in enumerate(record.volumes):
        identity = opened(step, record, index, once=True).identity if file.nbytes else None
        if identity is not None and (identity, file.digests) in known:
            (progress or _nothing)(file.nbytes)
            continue
        spans[index] = [(0, file.nbytes)]
        read += [] if identity is None else [(identity, file.digests)]
    ChunkReads(step, record, spans, progress).check()
    known.update(read)


def _nothing(nbytes: int) -> None:
    pass


def read_chunks(step: StepFiles, record: Record, task: Task) -> memoryview:
    """Read a range of whole chunks; `DamagedError` unless each has its digest."""
    check_free(task.stop - task.start)
    data = memoryview(bytearray(task.stop - task.start))
    reader = opened(step, record, task.file)
    with reading(step, record, task):
        reader.read_into(task.start, data)
    Verifier(step, record, task).update(data)
    return data
