"""Reads and digests: the files of a step into live memory, on a few threads.

What is wanted is cut into the chunks that digests were made of. `check` reads and hashes them and
keeps nothing; `land` reads them into their places. After a `check`, bytes that come out of the page
cache again are not hashed twice. Doing both means that nothing is written anywhere before all of it
was seen to hold.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
import xxhash

from torchrelay.errors import CheckpointError, DamagedError, RelayError
from torchrelay.memory.crew import share_out
from torchrelay.plan.region import Region
from torchrelay.plan.stream import Stream
from torchrelay.record.checkpoint.schema import Checkpoint, DataFile
from torchrelay.stores.local.reader import PAGE
from torchrelay.stores.retry import is_wrong
from torchrelay.stores.seam import (
    DataReader,
    KeepableReader,
    MappableReader,
    MendableStep,
    OpenStep,
)
from torchrelay.stores.writer.ranges import WORKERS, host_view

PIECE = 1 << 18  # bytes read and hashed at once: they stay in the processor's cache
COLD_PIECE = 1 << 20  # the same where the medium is what takes time
TASK_BYTES = 8 << 20  # what a thread takes on at once
UNVERIFIED_BYTES = 1 << 22  # read at once where no digest is asked for
BATCH_BYTES = 16 << 20  # read at once where each request, or each copy to a device, has its price
COSTLY_WORKERS = 8
COLD_WORKERS = 4  # some wait for the medium while others hash
_FEW = 8

Placed = tuple[int, Region]


class Task(NamedTuple):
    """Bytes [start, stop) of a file."""

    file: int
    start: int
    stop: int


class Fetch:
    """Ranges of the files of one step, and where their bytes go."""

    def __init__(
        self,
        store: OpenStep,
        checkpoint: Checkpoint,
        wanted: Mapping[int, Iterable[Placed]],
        *,
        workers: int = WORKERS,
        progress: Callable[[int], None] | None = None,
    ) -> None:
        self._store = store
        self._checkpoint = checkpoint
        self._workers = workers
        self._progress = progress or (lambda nbytes: None)
        self._streams: dict[int, Stream] = {}
        self._spans: dict[int, list[tuple[int, int]]] = {}
        for file, placed in wanted.items():
            ordered = sorted(placed, key=lambda piece: piece[0])
            self._streams[file] = Stream.of(ordered, checkpoint.files[file].nbytes)
            self._spans[file] = merged([(at, at + region.nbytes) for at, region in ordered])
        self._pinned = any(
            region.keep.is_cuda
            for stream in self._streams.values()
            for _, region in stream.elsewhere
        )
        self._batched = store.costly_reads or self._pinned
        self._mapped: dict[int, MappableReader] = {}
        self.begun = False  # whether files were opened, so that bytes may have come

    def check(self) -> None:
        """Raise `DamagedError` unless every chunk that is wanted has its digest."""
        self._run(self._check_chunks, self._chunks, once=False)

    def land(self, *, verify: bool = True, checked: bool = False) -> None:
        """Fill the places. With `verify`, `DamagedError` where a chunk is not what was written.

        After `check` (`checked`), bytes that come out of the same memory again are not hashed a
        second time; those that the medium gives anew are.
        """
        if verify and not self._store.trusted:
            act = self._land_checked if checked else self._land_chunks
            self._run(act, self._chunks, once=not checked)
        else:
            self._run(self._land_unverified, self._pieces, once=True)

    def _chunks(self, file: int, batched: bool) -> Iterable[Task]:
        """Ranges of whole chunks, of a size that is worth a task or a request."""
        most = BATCH_BYTES if batched else TASK_BYTES
        for start, stop in whole_chunks(self._checkpoint.files[file], self._spans[file], most):
            yield Task(file, start, stop)

    def _pieces(self, file: int, batched: bool) -> Iterable[Task]:
        """What is wanted and no more, where reads need no alignment."""
        if batched:
            yield from self._chunks(file, batched)
            return
        for start, stop in self._spans[file]:
            for at in range(start, stop, UNVERIFIED_BYTES):
                yield Task(file, at, min(stop, at + UNVERIFIED_BYTES))

    def _is_batched(self, reader: DataReader) -> bool:
        return self._batched or reader.batched

    def _each_chunk(self, task: Task) -> Iterator[Task]:
        size = self._checkpoint.files[task.file].chunk_bytes
        for start in range(task.start, task.stop, size):
            yield Task(task.file, start, min(start + size, task.stop))

    def _run(
        self,
        act: Callable[[Task, DataReader, _Buffer], None],
        cut: Callable[[int, bool], Iterable[Task]],
        once: bool,
    ) -> None:
        readers = {
            file: opened(self._store, self._checkpoint, file, once=once) for file in self._streams
        }
        # Asked once: whether an object is of a protocol takes Python longer than a small read.
        kept = {file: one for file, one in readers.items() if isinstance(one, KeepableReader)}
        self._mapped = {
            file: one for file, one in readers.items() if isinstance(one, MappableReader)
        }
        workers = self._workers
        if self._store.costly_reads:
            workers = max(workers, COSTLY_WORKERS)
        elif any(reader.cold for reader in readers.values()):
            workers = max(workers, COLD_WORKERS)
        tasks = [
            task for file, reader in readers.items() for task in cut(file, self._is_batched(reader))
        ]

        def hand() -> Callable[[Task], None]:
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
            share_out(tasks, hand, workers)
        finally:
            for reader in readers.values():
                reader.close()

    def _mended(self, task: Task, fault: RelayError) -> bool:
        """Whether a range that was read in vain can be had from elsewhere."""
        if not isinstance(self._store, MendableStep):
            return False
        name = self._checkpoint.files[task.file].name
        return self._store.mend(name, task.start, task.stop, fault.message)

    def _check_chunks(self, task: Task, reader: DataReader, buffer: _Buffer) -> None:
        memory = self._memory(task)
        if memory is not None:
            self._compare_all(task, memory)
            return
        if self._is_batched(reader):
            self._read_checked(task, reader, buffer)
            return
        size = COLD_PIECE if reader.cold else PIECE
        view = buffer.view(size)
        for chunk in self._each_chunk(task):
            hasher = xxhash.xxh3_128()
            for at in range(chunk.start, chunk.stop, size):
                piece = view[: min(size, chunk.stop - at)]
                self._read(chunk, reader, at, [piece])
                hasher.update(piece)
            self._compare(chunk, hasher.digest())

    def _read_checked(self, task: Task, reader: DataReader, buffer: _Buffer) -> None:
        """A range of whole chunks into the buffer, each with its digest."""
        view = buffer.view(task.stop - task.start)
        self._read(task, reader, task.start, [view])
        self._compare_all(task, view)

    def _memory(self, task: Task) -> memoryview | None:
        """A range as it lies in memory, if it does."""
        reader = self._mapped.get(task.file)
        if reader is None:
            return None
        try:
            return reader.memory(task.start, task.stop - task.start)
        except (OSError, EOFError) as fault:
            raise unread(self._store, self._checkpoint, task, fault) from fault

    def _land_chunks(self, task: Task, reader: DataReader, buffer: _Buffer) -> None:
        stream = self._streams[task.file]
        memory = None if self._pinned else self._memory(task)
        if memory is not None:
            self._compare_all(task, memory)
            stream.write(task.start, task.stop, torch.frombuffer(memory, dtype=torch.uint8))
            return
        if self._is_batched(reader):
            self._read_checked(task, reader, buffer)
            stream.write(task.start, task.stop, buffer.tensor)
            return
        for chunk in self._each_chunk(task):
            direct = self._direct(stream, chunk)
            if not direct:
                self._read_checked(chunk, reader, buffer)
                stream.write(chunk.start, chunk.stop, buffer.tensor)
                continue
            hasher = xxhash.xxh3_128()
            for at, address, nbytes in direct:
                whole = host_view(address, nbytes)
                for skip in range(0, nbytes, PIECE):
                    piece = whole[skip : skip + PIECE]
                    self._read(chunk, reader, at + skip, [piece])
                    hasher.update(piece)
            self._compare(chunk, hasher.digest())

    def _land_checked(self, task: Task, reader: DataReader, buffer: _Buffer) -> None:
        memory = None if self._pinned else self._memory(task)
        if memory is not None:
            data = torch.frombuffer(memory, dtype=torch.uint8)
            self._streams[task.file].write(task.start, task.stop, data)
            return
        direct = self._direct(self._streams[task.file], task)
        if direct and not self._batched:
            views = [host_view(address, nbytes) for _, address, nbytes in direct]
            if reader.read_cached(task.start, views):
                if not reader.unchanged():
                    raise self._damaged(task, "was written to after it was checked")
                return
        self._land_chunks(task, reader, buffer)

    def _land_unverified(self, task: Task, reader: DataReader, buffer: _Buffer) -> None:
        stream = self._streams[task.file]
        direct = [] if self._pinned or reader.batched else self._direct(stream, task)
        if direct:
            views = [host_view(address, nbytes) for _, address, nbytes in direct]
            self._read(task, reader, task.start, views)
            return
        self._read(task, reader, task.start, [buffer.view(task.stop - task.start)])
        stream.write(task.start, task.stop, buffer.tensor)

    @staticmethod
    def _direct(stream: Stream, task: Task) -> list[tuple[int, int, int]]:
        """The runs of host memory that are all of a range, if they are few."""
        runs = list(stream.host.within(task.start, task.stop))
        whole = sum(nbytes for _, _, nbytes in runs) == task.stop - task.start
        return runs if whole and len(runs) <= _FEW else []

    def _read(self, task: Task, reader: DataReader, at: int, views: list[memoryview]) -> None:
        try:
            reader.read_into(at, views)
        except (OSError, EOFError) as fault:
            raise unread(self._store, self._checkpoint, task, fault) from fault

    def _compare_all(self, task: Task, data: memoryview) -> None:
        """Compare each chunk of a range with its digest."""
        for chunk in self._each_chunk(task):
            piece = data[chunk.start - task.start : chunk.stop - task.start]
            self._compare(chunk, xxhash.xxh3_128_digest(piece))

    def _compare(self, task: Task, digest: bytes) -> None:
        record = self._checkpoint.files[task.file]
        at = task.start // record.chunk_bytes * 16
        if digest != record.digests[at : at + 16]:
            raise self._damaged(task, f"bytes {task.start} to {task.stop} are not those written")

    def _damaged(self, task: Task, problem: str) -> DamagedError:
        return damaged(self._store, self._checkpoint, task, problem)


def opened(store: OpenStep, checkpoint: Checkpoint, file: int, *, once: bool = False) -> DataReader:
    """A file of a step; `DamagedError` unless it is there and as large as it was."""
    record = checkpoint.files[file]
    whole = Task(file, 0, record.nbytes)
    try:
        reader = store.reader(record.name, once=once)
    except OSError as fault:
        raise unread(store, checkpoint, whole, fault) from fault
    if reader.nbytes != record.nbytes:
        reader.close()
        problem = f"has {reader.nbytes} bytes, {record.nbytes} were written"
        lost = whole._replace(start=min(reader.nbytes, record.nbytes))
        raise damaged(store, checkpoint, lost, problem)
    return reader


def unread(
    store: OpenStep, checkpoint: Checkpoint, task: Task, fault: OSError | EOFError
) -> CheckpointError:
    """Damage is what was found to be wrong; a medium that does not give its bytes is none."""
    if isinstance(fault, EOFError) or is_wrong(fault):
        return damaged(store, checkpoint, task, f"cannot be read: {fault}")
    return CheckpointError(
        f"cannot be read: {fault.strerror or fault}; its bytes may be whole",
        step=checkpoint.step,
        phase="read",
        file=f"{store.url}/{checkpoint.files[task.file].name}",
    )


def damaged(store: OpenStep, checkpoint: Checkpoint, task: Task, problem: str) -> DamagedError:
    record = checkpoint.files[task.file]
    names = leaves_in(checkpoint, task.file, task.start, task.stop)
    shown = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
    return DamagedError(
        f"{record.name} {problem}",
        file=f"{store.url}/{record.name}",
        step=checkpoint.step,
        phase="verify",
        path=shown or None,
        offset=task.start,
    )


class _Buffer:
    """Scratch memory of one thread, at a page's start and as large as was ever asked for."""

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


def everything(checkpoint: Checkpoint) -> dict[int, list[Placed]]:
    """What `Fetch.check` needs to look at every byte of a step."""
    whole: dict[int, list[Placed]] = {}
    for index, file in enumerate(checkpoint.files):
        whole[index] = [(0, _Nowhere(file))]  # type: ignore[list-item]
    return whole


class _Nowhere:
    """The place of bytes that are looked at and not kept."""

    address = 0
    keep = torch.empty(0, device="cpu")

    def __init__(self, file: DataFile) -> None:
        self.nbytes = file.nbytes


def leaves_in(checkpoint: Checkpoint, file: int, start: int, stop: int) -> list[str]:
    """Names of the tensors that have bytes in a range of a file."""
    placed = sorted(
        (shard.start, tensor.name)
        for tensor in checkpoint.tensors
        for shard in tensor.shards
        if shard.file == file
    )
    starts = [at for at, _ in placed]
    first = max(0, bisect_left(starts, start + 1) - 1)
    return [name for at, name in placed[first:] if at < max(stop, start + 1)]


def whole_chunks(
    file: DataFile, spans: Iterable[tuple[int, int]], most: int
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


def merged(spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    merged: list[tuple[int, int]] = []
    for start, stop in spans:
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
        elif stop > start:
            merged.append((start, stop))
    return merged
