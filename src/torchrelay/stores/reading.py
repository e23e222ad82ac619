"""Reads and digests: the files of a step into live memory, on a few threads.

What is wanted is cut into the chunks that digests were made of. `check` reads and hashes them and
keeps nothing; `land` reads them into their places and, unless told otherwise, hashes them there
again. Doing both costs little where the bytes come from the page cache the second time, and means
that nothing is written anywhere before all of it was seen to hold.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
import xxhash

from torchrelay.errors import DamagedError
from torchrelay.state.memory import Region
from torchrelay.state.stream import Stream
from torchrelay.stores.records import Checkpoint, DataFile
from torchrelay.stores.seam import DataReader, Store
from torchrelay.stores.writing import WORKERS, host_view

PIECE = 1 << 18  # bytes read and hashed at once: they stay in the processor's cache
UNVERIFIED_BYTES = 1 << 22  # read at once where no digest is asked for
BATCH_BYTES = 16 << 20  # read at once where each request, or each copy to a device, has its price
COSTLY_WORKERS = 8
_FEW = 8

Placed = tuple[int, Region]


class _Task(NamedTuple):
    file: int
    start: int
    stop: int


class Fetch:
    """Ranges of the files of one step, and where their bytes go."""

    def __init__(
        self,
        store: Store,
        checkpoint: Checkpoint,
        wanted: Mapping[int, Iterable[Placed]],
        *,
        workers: int = WORKERS,
        progress: Callable[[int], None] | None = None,
    ) -> None:
        self._store = store
        self._checkpoint = checkpoint
        self._workers = max(workers, COSTLY_WORKERS) if store.costly_reads else workers
        self._progress = progress or (lambda nbytes: None)
        self._streams: dict[int, Stream] = {}
        self._spans: dict[int, list[tuple[int, int]]] = {}
        for file, placed in wanted.items():
            ordered = sorted(placed, key=lambda piece: piece[0])
            self._streams[file] = Stream.of(ordered, checkpoint.files[file].nbytes)
            self._spans[file] = _merged([(at, at + region.nbytes) for at, region in ordered])
        self._pinned = any(
            region.keep.is_cuda
            for stream in self._streams.values()
            for _, region in stream.elsewhere
        )

        self._batched = store.costly_reads or self._pinned

    @property
    def nbytes(self) -> int:
        return sum(stop - start for spans in self._spans.values() for start, stop in spans)

    def check(self) -> None:
        """Raise `DamagedError` unless every chunk that is wanted has its digest."""
        self._run(self._check_chunk, list(self._chunks()))

    def land(self, *, verify: bool = True) -> None:
        """Fill the places. With `verify`, `DamagedError` where a chunk is not what was written."""
        if verify:
            self._run(self._land_chunk, list(self._chunks()))
        else:
            self._run(self._land_unverified, list(self._pieces()))

    def _chunks(self) -> Iterable[_Task]:
        """Ranges of whole chunks: one by one, or as many as are worth a request."""
        for file, spans in self._spans.items():
            record = self._checkpoint.files[file]
            size = record.chunk_bytes
            batch = max(1, BATCH_BYTES // size) if self._batched else 1
            last = 0
            for start, stop in spans:
                first, end = max(start // size, last), -(-stop // size)
                for chunk in range(first, end, batch):
                    upto = min(chunk + batch, end) * size
                    yield _Task(file, chunk * size, min(upto, record.nbytes))
                last = max(last, end)

    def _pieces(self) -> Iterable[_Task]:
        for file, spans in self._spans.items():
            for start, stop in spans:
                for at in range(start, stop, UNVERIFIED_BYTES):
                    yield _Task(file, at, min(stop, at + UNVERIFIED_BYTES))

    def _run(self, act: Callable[[_Task, DataReader, _Buffer], None], tasks: list[_Task]) -> None:
        readers = {file: opened(self._store, self._checkpoint, file) for file in self._streams}
        upcoming = iter(tasks)
        lock = threading.Lock()
        failures: list[BaseException] = []

        def work() -> None:
            buffer = _Buffer(self._pinned)
            try:
                while not failures:
                    with lock:
                        task = next(upcoming, None)
                    if task is None:
                        return
                    act(task, readers[task.file], buffer)
                    self._progress(task.stop - task.start)
            except BaseException as fault:
                failures.append(fault)

        threads = [
            threading.Thread(target=work, name="torchrelay-read", daemon=True)
            for _ in range(min(self._workers, len(tasks)) - 1)
        ]
        try:
            for thread in threads:
                thread.start()
            work()
            for thread in threads:
                thread.join()
        finally:
            for reader in readers.values():
                reader.close()
        if failures:
            raise failures[0]

    def _check_chunk(self, task: _Task, reader: DataReader, buffer: _Buffer) -> None:
        if self._batched:
            self._read_checked(task, reader, buffer)
            return
        hasher = xxhash.xxh3_128()
        view = buffer.view(PIECE)
        for at in range(task.start, task.stop, PIECE):
            piece = view[: min(PIECE, task.stop - at)]
            self._read(task, reader, at, [piece])
            hasher.update(piece)
        self._compare(task, hasher.digest())

    def _read_checked(self, task: _Task, reader: DataReader, buffer: _Buffer) -> None:
        """A range of whole chunks into the buffer, each with its digest."""
        view = buffer.view(task.stop - task.start)
        self._read(task, reader, task.start, [view])
        size = self._checkpoint.files[task.file].chunk_bytes
        for start in range(task.start, task.stop, size):
            chunk = _Task(task.file, start, min(start + size, task.stop))
            piece = view[start - task.start : chunk.stop - task.start]
            self._compare(chunk, xxhash.xxh3_128_digest(piece))

    def _land_chunk(self, task: _Task, reader: DataReader, buffer: _Buffer) -> None:
        stream = self._streams[task.file]
        direct = [] if self._batched else self._direct(stream, task)
        if not direct:
            self._read_checked(task, reader, buffer)
            stream.write(task.start, task.stop, buffer.tensor)
            return
        hasher = xxhash.xxh3_128()
        for at, address, nbytes in direct:
            for skip in range(0, nbytes, PIECE):
                piece = host_view(address + skip, min(PIECE, nbytes - skip))
                self._read(task, reader, at + skip, [piece])
                hasher.update(piece)
        self._compare(task, hasher.digest())

    def _land_unverified(self, task: _Task, reader: DataReader, buffer: _Buffer) -> None:
        stream = self._streams[task.file]
        direct = self._direct(stream, task)
        if direct:
            views = [host_view(address, nbytes) for _, address, nbytes in direct]
            self._read(task, reader, task.start, views)
            return
        self._read(task, reader, task.start, [buffer.view(task.stop - task.start)])
        stream.write(task.start, task.stop, buffer.tensor)

    @staticmethod
    def _direct(stream: Stream, task: _Task) -> list[tuple[int, int, int]]:
        """The runs of host memory that are all of a range, if they are few."""
        runs = list(stream.host.within(task.start, task.stop))
        whole = sum(nbytes for _, _, nbytes in runs) == task.stop - task.start
        return runs if whole and len(runs) <= _FEW else []

    def _read(self, task: _Task, reader: DataReader, at: int, views: list[memoryview]) -> None:
        try:
            reader.read_into(at, views)
        except (OSError, EOFError) as fault:
            raise self._damaged(task, f"cannot be read: {fault}") from fault

    def _compare(self, task: _Task, digest: bytes) -> None:
        record = self._checkpoint.files[task.file]
        at = task.start // record.chunk_bytes * 16
        if digest != record.digests[at : at + 16]:
            raise self._damaged(task, f"bytes {task.start} to {task.stop} are not those written")

    def _damaged(self, task: _Task, problem: str) -> DamagedError:
        return _damaged(self._store, self._checkpoint, task, problem)


def opened(store: Store, checkpoint: Checkpoint, file: int) -> DataReader:
    """A file of a step; `DamagedError` unless it is there and as large as it was."""
    record = checkpoint.files[file]
    whole = _Task(file, 0, record.nbytes)
    try:
        reader = store.reader(checkpoint.step, record.name)
    except OSError as fault:
        raise _damaged(store, checkpoint, whole, f"cannot be opened: {fault}") from fault
    if reader.nbytes != record.nbytes:
        reader.close()
        problem = f"has {reader.nbytes} bytes, {record.nbytes} were written"
        lost = whole._replace(start=min(reader.nbytes, record.nbytes))
        raise _damaged(store, checkpoint, lost, problem)
    return reader


def _damaged(store: Store, checkpoint: Checkpoint, task: _Task, problem: str) -> DamagedError:
    record = checkpoint.files[task.file]
    names = leaves_in(checkpoint, task.file, task.start, task.stop)
    shown = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
    return DamagedError(
        f"{record.name} {problem}",
        file=f"{store.url}/step-{checkpoint.step}/{record.name}",
        step=checkpoint.step,
        phase="verify",
        path=shown or None,
        offset=task.start,
    )


class _Buffer:
    """Scratch memory of one thread, as large as was ever asked for."""

    def __init__(self, pinned: bool) -> None:
        self._pinned = pinned
        self.tensor = torch.empty(0, dtype=torch.uint8)
        self._whole: Any = memoryview(b"")

    def view(self, nbytes: int) -> memoryview:
        if self.tensor.numel() < nbytes:
            self.tensor = torch.empty(nbytes, dtype=torch.uint8, pin_memory=self._pinned)
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
    keep = torch.empty(0)

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


def _merged(spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    merged: list[tuple[int, int]] = []
    for start, stop in spans:
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
        elif stop > start:
            merged.append((start, stop))
    return merged
