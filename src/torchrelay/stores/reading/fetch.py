"""Reads and digests: the files of a step into live memory, on a few threads.

The wanted bytes are cut into the chunks that digests were made of. `check` reads and hashes them
and keeps nothing; `land` reads them into their destinations. After a `check`, bytes that come out
of memory again are not hashed twice. So nothing is written anywhere before all of it was verified.
Both go through files in pieces that stay in the processor's cache from the read to the hash.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import xxhash

from torchrelay.errors import RelayError
from torchrelay.memory.crew import share_out
from torchrelay.plan.region import Region
from torchrelay.plan.stream import Stream
from torchrelay.record.schema import Record, VolumeRecord
from torchrelay.stores.local.step import PAGE
from torchrelay.stores.reading.ranges import (
    PIECE_BYTES,
    TASK_BYTES,
    Task,
    damaged,
    merged,
    opened,
    unread,
    whole_chunks,
    workers_for,
)
from torchrelay.stores.seam import (
    DataReader,
    KeepableReader,
    MappableReader,
    MendableStep,
    OpenStep,
)
from torchrelay.stores.writer.file_writer import WORKERS, host_view

COLD_PIECE = 1 << 20  # as `PIECE_BYTES`, where the medium is the bottleneck
BATCH_BYTES = 16 << 20  # read at once where each request, or each copy to a device, has its price
_RUN_BYTES = 128 << 10  # on average, of runs of memory that are read into without a detour

Placed = tuple[int, Region]
Views = Iterable[tuple[int, memoryview]]


class Fetch:
    """Ranges of the files of one step, and their destinations."""

    def __init__(
        self,
        step: OpenStep,
        record: Record,
        wanted: Mapping[int, Iterable[Placed]],
        *,
        workers: int = WORKERS,
        progress: Callable[[int], None] | None = None,
    ) -> None:
        self._step = step
        self._record = record
        self._workers = workers
        self._progress = progress or (lambda nbytes: None)
        self._streams: dict[int, Stream] = {}
        self._spans: dict[int, list[tuple[int, int]]] = {}
        for file, placed in wanted.items():
            ordered = sorted(placed, key=lambda piece: piece[0])
            self._streams[file] = Stream.of(ordered, record.volumes[file].nbytes)
            self._spans[file] = merged([(at, at + region.nbytes) for at, region in ordered])
        self._pinned = any(
            region.keep.is_cuda
            for stream in self._streams.values()
            for _, region in stream.elsewhere
        )
        self._batched = step.costly_reads or self._pinned
        self._mapped: dict[int, MappableReader] = {}
        self.begun = False  # whether files were opened, so that bytes may have come

    def check(self) -> None:
        """Raise `DamagedError` unless every wanted chunk has its digest."""
        self._run(self._check, self._chunks, once=False)

    def land(self, *, verify: bool = True, checked: bool = False) -> None:
        """Fill the destinations. With `verify`, `DamagedError` if a chunk is not what was written.

        After `check` (`checked`), bytes that come out of the same memory again are not hashed a
        second time; bytes that the medium has to supply again are.
        """
        if verify and not self._step.trusted:
            self._run(self._land_again if checked else self._land, self._chunks, once=not checked)
        else:
            self._run(self._land_unverified, self._exactly, once=True)

    # Tasks.

    def _chunks(self, file: int, batched: bool) -> Iterator[Task]:
        """Ranges of whole chunks, of a size that is worth a task or a request."""
        most = BATCH_BYTES if batched else TASK_BYTES
        for start, stop in whole_chunks(self._record.volumes[file], self._spans[file], most):
            yield Task(file, start, stop)

    def _exactly(self, file: int, batched: bool) -> Iterator[Task]:
        """The wanted bytes and no others, unless reads need alignment."""
        if batched:
            yield from self._chunks(file, batched)
            return
        for start, stop in self._spans[file]:
            for at in range(start, stop, TASK_BYTES):
                yield Task(file, at, min(stop, at + TASK_BYTES))

    def _is_batched(self, reader: DataReader) -> bool:
        return self._batched or reader.batched

    def _run(
        self,
        act: Callable[[Task, DataReader, _Buffer], None],
        cut: Callable[[int, bool], Iterable[Task]],
        once: bool,
    ) -> None:
        readers = {
            file: opened(self._step, self._record, file, once=once) for file in self._streams
        }
        # Asked once: whether an object is of a protocol takes Python longer than a small read.
        kept = {file: one for file, one in readers.items() if isinstance(one, KeepableReader)}
        self._mapped = {
            file: one for file, one in readers.items() if isinstance(one, MappableReader)
        }
        workers = workers_for(self._step, readers.values(), self._workers)
        tasks = [
            task for file, reader in readers.items() for task in cut(file, self._is_batched(reader))
        ]

        def work() -> Callable[[Task], None]:
            buffer = _Buffer(self._pinned)

            def do(task: Task) -> None:
                reader, keep = readers[task.file], kept.get(task.file)
                with nullcontext() if keep is None else keep.kept():
                    try:
                        act(task, reader, buffer)
                    except RelayError as fault:
                        if not self._mended(task, fault):
                            raise
                        act(task, reader, buffer)
                self._progress(task.stop - task.start)

            return do

        self.begun = True
        try:
            share_out(tasks, work, workers)
        finally:
            for reader in readers.values():
                reader.close()

    def _mended(self, task: Task, fault: RelayError) -> bool:
        """Whether another source supplied a range that could not be read."""
        if not isinstance(self._step, MendableStep):
            return False
        name = self._record.volumes[task.file].name
        return self._step.mend(name, task.start, task.stop, fault.message)

    # Acts: what is done with the bytes of a task.

    def _check(self, task: Task, reader: DataReader, buffer: _Buffer) -> None:
        memory = self._memory(task)
        if memory is not None:
            self._verifier(task).update(memory)
        elif self._is_batched(reader):
            self._read_verified(task, reader, buffer)
        else:
            verifier = self._verifier(task)
            for at, view in _in_buffer(task, buffer, COLD_PIECE if reader.cold else PIECE_BYTES):
                self._read(task, reader, at, [view])
                verifier.update(view)

    def _land(self, task: Task, reader: DataReader, buffer: _Buffer) -> None:
        stream = self._streams[task.file]
        memory = None if self._pinned else self._memory(task)
        if memory is not None:
            self._verifier(task).update(memory)
            stream.write(task.start, task.stop, torch.frombuffer(memory, dtype=torch.uint8))
        elif self._is_batched(reader):
            self._read_verified(task, reader, buffer)
            stream.write(task.start, task.stop, buffer.tensor)
        else:
            self._into_place(
                task,
                buffer,
                lambda at, view: self._read(task, reader, at, [view]),
                self._verifier(task),
            )

    def _land_again(self, task: Task, reader: DataReader, buffer: _Buffer) -> None:
        """Land what `check` has verified."""
        memory = None if self._pinned else self._memory(task)
        if memory is not None:
            data = torch.frombuffer(memory, dtype=torch.uint8)
            self._streams[task.file].write(task.start, task.stop, data)
            return
        if self._batched or not self._into_place(
            task, buffer, lambda at, view: reader.read_cached(at, [view])
        ):
            self._land(task, reader, buffer)
        elif not reader.unchanged():
            raise self._damaged(task, "was written to after it was checked")

    def _land_unverified(self, task: Task, reader: DataReader, buffer: _Buffer) -> None:
        if self._is_batched(reader):
            self._read(task, reader, task.start, [buffer.view(task.stop - task.start)])
            self._streams[task.file].write(task.start, task.stop, buffer.tensor)
        else:
            self._into_place(task, buffer, lambda at, view: self._read(task, reader, at, [view]))

    def _into_place(
        self,
        task: Task,
        buffer: _Buffer,
        read: Callable[[int, memoryview], bool | None],
        verifier: _Verifier | None = None,
    ) -> bool:
        """Read a range into its destinations, piece by piece; False as soon as `read` returns
        False. Runs of host memory are read into directly unless they are many."""
        stream = self._streams[task.file]
        runs = _long_runs(stream, task)
        for at, view in _in_runs(runs) if runs else _in_buffer(task, buffer, PIECE_BYTES):
            if read(at, view) is False:
                return False
            if verifier is not None:
                verifier.update(view)
            if not runs:
                stream.write(at, at + len(view), buffer.tensor)
        return True

    def _read_verified(self, task: Task, reader: DataReader, buffer: _Buffer) -> None:
        """A range of whole chunks into the buffer by one read, each with its digest."""
        view = buffer.view(task.stop - task.start)
        self._read(task, reader, task.start, [view])
        self._verifier(task).update(view)

    def _memory(self, task: Task) -> memoryview | None:
        """A range in the memory of its source, if this process has it mapped."""
        reader = self._mapped.get(task.file)
        if reader is None:
            return None
        try:
            return reader.memory(task.start, task.stop - task.start)
        except (OSError, EOFError) as fault:
            raise unread(self._step, self._record, task, fault) from fault

    def _read(self, task: Task, reader: DataReader, at: int, views: list[memoryview]) -> None:
        try:
            reader.read_into(at, views)
        except (OSError, EOFError) as fault:
            raise unread(self._step, self._record, task, fault) from fault

    def _verifier(self, task: Task) -> _Verifier:
        return _Verifier(self, task, self._record.volumes[task.file])

    def _damaged(self, task: Task, problem: str) -> RelayError:
        return damaged(self._step, self._record, task, problem)


class _Verifier:
    """Compares the chunks of a range with their digests while its bytes come, in order."""

    def __init__(self, fetch: Fetch, task: Task, file: VolumeRecord) -> None:
        self._fetch, self._task, self._file = fetch, task, file
        self._start = self._at = task.start
        self._hasher = xxhash.xxh3_128()

    def update(self, view: memoryview) -> None:
        while len(view):
            end = min(self._start + self._file.chunk_bytes, self._task.stop)
            part = view[: end - self._at]
            self._hasher.update(part)
            self._at += len(part)
            if self._at < end:
                return
            self._compare(end)
            view = view[len(part) :]

    def _compare(self, end: int) -> None:
        place = self._start // self._file.chunk_bytes * 16
        if self._hasher.digest() != self._file.digests[place : place + 16]:
            problem = f"bytes {self._start} to {end} are not those written"
            raise self._fetch._damaged(Task(self._task.file, self._start, end), problem)
        self._start = self._at
        self._hasher.reset()


class _Buffer:
    """Scratch memory of one thread, page-aligned and as large as was ever needed."""

    def __init__(self, pinned: bool) -> None:
        self._pinned = pinned
        self.tensor = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._whole: Any = memoryview(b"")

    def view(self, nbytes: int) -> memoryview:
        if self.tensor.numel() < nbytes:
            room = torch.empty(
                nbytes + PAGE, dtype=torch.uint8, device="cpu", pin_memory=self._pinned
            )
            skip = -room.data_ptr() % PAGE
            self.tensor = room[skip : skip + nbytes]
            memory: Any = self.tensor.numpy()
            self._whole = memoryview(memory)
        piece: memoryview = self._whole[:nbytes]
        return piece


def _long_runs(stream: Stream, task: Task) -> Sequence[tuple[int, int, int]]:
    """The runs of host memory that are all of a range, unless they are short on average."""
    runs = list(stream.host.within(task.start, task.stop))
    nbytes = task.stop - task.start
    whole = sum(size for _, _, size in runs) == nbytes
    return runs if whole and (len(runs) == 1 or len(runs) * _RUN_BYTES <= nbytes) else ()


def _in_runs(runs: Iterable[tuple[int, int, int]]) -> Views:
    """Positions and memory of the pieces of runs."""
    for at, address, nbytes in runs:
        whole = host_view(address, nbytes)
        for skip in range(0, nbytes, PIECE_BYTES):
            yield at + skip, whole[skip : skip + PIECE_BYTES]


def _in_buffer(task: Task, buffer: _Buffer, size: int) -> Views:
    """Positions of the pieces of a range, each in the same memory."""
    whole = buffer.view(min(size, task.stop - task.start))
    for at in range(task.start, task.stop, size):
        yield at, whole[: min(size, task.stop - at)]
