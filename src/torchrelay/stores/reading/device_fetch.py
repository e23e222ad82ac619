"""The files of a step into the memory of a GPU, hashed there.

Threads read pieces of the files into pinned buffers and have them copied to a slab of device
memory, where chunks are hashed and then copied to their places. `check` keeps everything in the
slab, so `land` needs no second read. Without a `check` before it, `land` goes by rounds through a
slab of bounded size.

The digests are of what lies in device memory: they cover the medium, the buffers and the way there.
Threads do as little as they can in Python: while one of them holds the interpreter, the others
cannot begin to read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from itertools import count
from typing import NamedTuple

import numpy as np
import torch

from torchrelay.describing.region import Stream
from torchrelay.geometry import DIGEST_BYTES
from torchrelay.geometry.runs import Moves, Runs
from torchrelay.memory.digest import joined_each
from torchrelay.memory.gpu import kernels
from torchrelay.memory.gpu.chunk_table import ChunkTable
from torchrelay.memory.gpu.kernels import CudaError
from torchrelay.memory.gpu.pinned import MOST_THREADS, PIECE, Upload, pinned_buffers, room_on
from torchrelay.memory.gpu.side import on_side_stream
from torchrelay.memory.thread_pool import run_on_threads
from torchrelay.record.schema import Record
from torchrelay.stores.reading.chunks import (
    Task,
    not_as_written,
    opened,
    reading,
    whole_chunks,
)
from torchrelay.stores.reading.fetch import Fetch, Placed, spans_of
from torchrelay.stores.step_files import StepFiles

GROUP_BYTES = 256 << 20  # the least slab that is worth it
ROUND_BYTES = 4 << 30  # of device memory, where bytes are not held back in it
MARGIN = 512 << 20  # bytes of a device that are left free in addition to the slab
# Of a local disk past the page cache: what keeps it busiest. Larger reads by more threads wait for
# each other there.
DISK_PIECE, DISK_THREADS = 1 << 20, 8
_ALIGN = 512
_ITEM = 16  # bytes of the largest item


class _Group(NamedTuple):
    """Bytes [start, stop) of a file, whole chunks, and where in the slab they are put."""

    file: int
    start: int
    stop: int
    at: int = 0

    @property
    def nbytes(self) -> int:
        return self.stop - self.start

    @property
    def room(self) -> int:
        return -(-self.nbytes // _ALIGN) * _ALIGN


class NoRoom(Exception):
    """The device has no memory for it; the message says how much it has."""


class DeviceFetch:
    """As `reading.Fetch`, for places that are all on one GPU.

    A `Fetch` reads the parts that do not fit on the GPU; then `instead` says why.
    """

    def __init__(
        self,
        store: StepFiles,
        checkpoint: Record,
        wanted: Mapping[int, Stream],
        device: int,
        *,
        progress: Callable[[int], None] | None = None,
    ) -> None:
        self._store, self._checkpoint, self._device = store, checkpoint, device
        self._wanted = wanted
        self._progress = progress or (lambda nbytes: None)
        self._places = {file: _places(stream.elsewhere) for file, stream in wanted.items()}
        self._groups: list[_Group] = []
        for file, stream in wanted.items():
            chunks = whole_chunks(checkpoint.volumes[file], spans_of(stream), GROUP_BYTES)
            self._groups += [_Group(file, start, stop) for start, stop in chunks]
        self._slab: torch.Tensor | None = None
        self._begun = False
        self.instead = ""

    @cached_property
    def _plain(self) -> Fetch:
        return Fetch(self._store, self._checkpoint, self._wanted, progress=self._progress)

    @property
    def begun(self) -> bool:
        return self._begun or (bool(self.instead) and self._plain.begun)

    def check(self) -> None:
        """Raise `DamagedError` unless every chunk has its digest. The bytes stay on the device, if
        it has room for all of them."""
        whole = sum(group.room for group in self._groups)
        self._groups = next(_rounds(self._groups, whole), [])
        try:
            slab = self._allocate(whole)
            self._read(self._groups, slab, verify=True)
        except (NoRoom, CudaError, MemoryError) as fault:
            self.instead = f"{fault}: the files are read twice"
            self._plain.check()
            return
        self._slab = slab

    def land(self, *, verify: bool = True) -> None:
        """Fill the places; after a `check`, from where it has left the bytes."""
        if self._slab is not None:
            self._scatter(self._groups, self._slab)
            self._slab = None
            self._progress(sum(group.nbytes for group in self._groups))
        elif self.instead:  # it was checked by other means
            self._plain.land(verify=verify)
        else:
            self._land(verify)

    def _land(self, verify: bool) -> None:
        whole = sum(group.room for group in self._groups)
        least = max((group.room for group in self._groups), default=0)
        most = min(ROUND_BYTES, room_on(self._device) - MARGIN)
        try:
            slab = self._allocate(max(least, min(whole, most)))
            for groups in _rounds(self._groups, slab.numel()):
                self._read(groups, slab, verify=verify)
                self._scatter(groups, slab)
        except (NoRoom, CudaError, MemoryError) as fault:
            self.instead = str(fault)
            self._plain.land(verify=verify)

    def _allocate(self, nbytes: int) -> torch.Tensor:
        room = max(0, room_on(self._device) - MARGIN)
        if nbytes > room:
            raise NoRoom(f"cuda:{self._device} has room for {room} bytes, not for {nbytes}")
        try:
            slab = torch.empty(nbytes, dtype=torch.uint8, device=f"cuda:{self._device}")
        except torch.cuda.OutOfMemoryError:
            raise NoRoom(f"cuda:{self._device} has no {nbytes} bytes in one piece") from None
        torch.cuda.synchronize(self._device)  # other streams may use what was here before
        return slab

    def _read(self, groups: list[_Group], slab: torch.Tensor, *, verify: bool) -> None:
        """Have the bytes of groups in the slab; with `verify`, `DamagedError` unless they hold."""
        if verify:
            kernels.warm_up(self._device)
        base = slab.data_ptr()
        files = {group.file for group in groups}
        readers = {file: opened(self._store, self._checkpoint, file, once=True) for file in files}
        of_disk = not self._store.costly_reads and all(one.cold for one in readers.values())
        piece, most = (DISK_PIECE, DISK_THREADS) if of_disk else (PIECE, MOST_THREADS)
        tasks = [(group, at) for group in groups for at in range(group.start, group.stop, piece)]
        stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        uploads: list[Upload] = []
        numbers = count()
        with pinned_buffers() as buffers:

            def hand() -> Callable[[tuple[_Group, int]], None]:
                upload = Upload(buffers, next(numbers), self._device, stream)
                uploads.append(upload)

                def do(task: tuple[_Group, int]) -> None:
                    group, at = task
                    nbytes = min(piece, group.stop - at)
                    part = Task(group.file, at, at + nbytes)
                    with reading(self._store, self._checkpoint, part):
                        readers[group.file].read_into(at, upload.view(nbytes))
                    upload.send(base + group.at + at - group.start, nbytes)
                    self._progress(nbytes)

                return do

            try:
                run_on_threads(tasks, hand, min(most, buffers.threads))
                if verify:
                    with torch.cuda.device(self._device), torch.cuda.stream(stream):
                        self._compare(groups, slab)  # as soon as the last copy is over
            finally:
                stream.synchronize()  # nothing reads the buffers, and all of it has come
                for upload in uploads:
                    upload.close()

    def _compare(self, groups: list[_Group], slab: torch.Tensor) -> None:
        """`DamagedError` unless what the current stream leaves in the slab has its digests."""
        starts, stops, expected = [], [], []
        for group in groups:
            record = self._checkpoint.volumes[group.file]
            size = record.chunk_bytes
            chunks = np.arange(group.start, group.stop, size)
            starts.append(chunks - group.start + group.at)
            stops.append(np.minimum(chunks + size, group.stop) - group.start + group.at)
            place = group.start // size * DIGEST_BYTES
            expected.append(record.digests[place : place + len(chunks) * DIGEST_BYTES])
        first, last = np.concatenate(starts), np.concatenate(stops)
        begin, end, edges = kernels.cells_of(first, last - first)
        hashed = ChunkTable.of(Runs([0], [slab.data_ptr()], [slab.numel()]), begin, end)
        cells = kernels.digests(hashed, self._device).cpu().numpy().tobytes()
        found = np.frombuffer(b"".join(joined_each(cells, edges)), f"V{DIGEST_BYTES}")
        bad = np.flatnonzero(found != np.frombuffer(b"".join(expected), f"V{DIGEST_BYTES}"))
        if len(bad):
            at = int(first[bad[0]])  # in the slab
            group = next(group for group in reversed(groups) if group.at <= at)
            start = group.start + at - group.at
            stop = min(start + self._checkpoint.volumes[group.file].chunk_bytes, group.stop)
            raise not_as_written(self._store, self._checkpoint, group.file, start, stop)

    def _scatter(self, groups: list[_Group], slab: torch.Tensor) -> None:
        """Copy groups from the slab to their places."""
        self._begun = True
        torch.cuda.synchronize(self._device)  # other streams may use what is overwritten
        base = slab.data_ptr()
        with torch.cuda.device(self._device), on_side_stream():
            found: list[Moves] = []
            for group in groups:
                runs, others = self._places[group.file]
                positions, addresses, nbytes = runs.between(group.start, group.stop)
                sources = positions - np.uint64(group.start) + np.uint64(base + group.at)
                found.append(Moves(positions, sources, addresses, nbytes))
                for at, region in others:
                    low, high = max(at, group.start), min(at + region.nbytes, group.stop)
                    if low < high:
                        skip = group.at + low - group.start
                        data = slab[skip : skip + high - low]
                        data = data if skip % _ITEM == 0 else data.clone()
                        region.write(low - at, high - at, data)
            columns = (np.concatenate(column) for column in zip(*found, strict=True))
            kernels.copy(Moves(*columns), self._device)


def _rounds(groups: list[_Group], nbytes: int) -> Iterator[list[_Group]]:
    """As many groups at a time as a slab has room for, one behind the other in it."""
    some: list[_Group] = []
    at = 0
    for group in groups:
        if at + group.room > nbytes:
            yield some
            some, at = [], 0
        some.append(group._replace(at=at))
        at += group.room
    if some:
        yield some


def _places(placed: list[Placed]) -> tuple[Runs, list[Placed]]:
    """Where the bytes of one file go: memory by address, and regions that take more."""
    rows, others = [], []
    for at, region in placed:
        run = region.run(0, region.nbytes)
        if run is None:
            others.append((at, region))
        else:
            rows.append((at, run.data_ptr(), run.nbytes))
    return Runs.of(rows), others
