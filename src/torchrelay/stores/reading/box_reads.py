"""From boxes of stored tensors and their destinations to byte ranges of files and memory.

A box of a shard that is one run of bytes goes straight to its place. Any other box, and one whose
destination has another dtype, takes a detour: the rows it lies in are read to a buffer, and the
box is copied out of it. Detours are taken in waves, so that their buffers stay small.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from heapq import heappush, heapreplace
from math import prod
from operator import mul
from typing import NamedTuple, Protocol

import numpy as np
import torch

from torchrelay.describing.region import Region, Stream
from torchrelay.errors import MismatchError
from torchrelay.geometry.boxes import Numbers, run_of
from torchrelay.geometry.runs import Column, Runs
from torchrelay.geometry.strides import contiguous_strides, packed
from torchrelay.memory.host import host_block
from torchrelay.planning.stored import Shard
from torchrelay.state import tensors as t
from torchrelay.stores.reading.fetch import Placed

WAVE_BYTES = 256 << 20


class BoxRead(NamedTuple):
    """A box of a stored shard, and the tensor of its shape that wants it."""

    dtype: str
    shard: Shard
    offsets: tuple[int, ...]  # in the shard
    sizes: tuple[int, ...]
    destination: torch.Tensor

    @property
    def is_run(self) -> bool:
        """Whether the box is one run of its shard's elements."""
        return run_of((self.offsets, self.sizes), self.shard.sizes) is not None

    @property
    def first_byte(self) -> int:
        """Where in the file the first element of the box lies."""
        strides = contiguous_strides(self.shard.sizes)
        first: int = sum(map(mul, self.offsets, strides))
        return self.shard.start + first * t.dtype_named(self.dtype).itemsize


class DirectReads(NamedTuple):
    """Runs of files that go to runs of host memory as they are, in columns."""

    files: Numbers
    starts: Numbers
    addresses: Column
    nbytes: Numbers


class WaveFetch(Protocol):
    """Brings what a wave reads to its places: `Fetch`, `DeviceFetch` or `DeviceCopies`."""

    @property
    def begun(self) -> bool:
        """Whether a place may have been written to."""

    def check(self) -> None: ...
    def land(self, *, verify: bool = True) -> None: ...


@dataclass
class Wave:
    """Reads that are done together: places by file, and what is left to do once they hold."""

    runs: dict[int, Runs] = field(default_factory=dict)
    placed: dict[int, list[Placed]] = field(default_factory=dict)
    after: list[Callable[[], None]] = field(default_factory=list)
    device: int | None = None  # the GPU that all of its places are on
    fetch: WaveFetch | None = None  # what reads it, from its check on
    ends: dict[int, int] = field(default_factory=dict)  # of the last range of each file
    detours: int = 0  # bytes of buffers

    @property
    def wanted(self) -> dict[int, Stream]:
        """The memory that bytes of each file go to."""
        none = Runs([], [], [])
        return {
            file: Stream.of(self.placed.get(file, ()), end, self.runs.get(file, none))
            for file, end in self.ends.items()
        }

    def finish(self) -> None:
        """Everything has arrived: take it where it belongs."""
        for copy in self.after:
            copy()


def waves(reads: Iterable[BoxRead], direct: DirectReads | None = None) -> list[Wave]:
    """Plan the reads. `MismatchError` for a destination that cannot be written to."""
    planned = [] if direct is None else _waves_of(direct)
    whole: list[BoxRead] = []
    detours: list[BoxRead] = []
    for read in reads:
        if prod(read.sizes):
            as_is = read.destination.dtype == t.dtype_named(read.dtype) and read.is_run
            (whole if as_is else detours).append(read)
    for read in sorted(whole, key=_place):
        _wave_for(planned, *_place(read), _region(read.destination))
    for read in sorted(detours, key=_place):
        region, copy = _detour(read)
        wave = _wave_for(planned, *_place(read), region, region.nbytes)
        wave.after.append(copy)
    return planned


def _place(read: BoxRead) -> tuple[int, int]:
    return read.shard.file, read.first_byte


def _waves_of(direct: DirectReads) -> list[Wave]:
    """Waves of direct reads: of those of one byte, each is in another wave."""
    planned: list[Wave] = []
    for file in np.unique(direct.files).tolist():
        rows = np.flatnonzero(direct.files == file)
        rows = rows[np.argsort(direct.starts[rows], kind="stable")]
        starts, nbytes = direct.starts[rows], direct.nbytes[rows]
        numbers = _separate(starts, starts + nbytes)
        for number in range(int(numbers.max()) + 1):
            if number == len(planned):
                planned.append(Wave())
            now, wave = rows[numbers == number], planned[number]
            columns = (direct.starts[now], direct.addresses[now], direct.nbytes[now])
            wave.runs[file] = Runs(*(column.astype(np.uint64) for column in columns))
            wave.ends[file] = int(wave.runs[file].stops[-1])
    return planned


def _separate(starts: Numbers, ends: Numbers) -> Numbers:
    """Numbers for stretches in the order of their starts: those of one number do not overlap, and
    the numbers are as few as can be."""
    found: Numbers = np.zeros(len(starts), np.int64)
    if (starts[1:] < ends[:-1]).any():  # seldom: a record may say so, no save writes it
        free: list[tuple[int, int]] = []  # by number, the last end
        for row, (start, end) in enumerate(zip(starts.tolist(), ends.tolist(), strict=True)):
            number = free[0][1] if free and free[0][0] <= start else len(free)
            (heapreplace if number < len(free) else heappush)(free, (end, number))
            found[row] = number
    return found


def _wave_for(planned: list[Wave], file: int, start: int, region: Region, buffer: int = 0) -> Wave:
    """Add a read to the first wave that can take it, and its buffer. Reads come in the order of
    their files: no byte of a file is wanted twice in one wave."""
    device = region.keep.get_device() if region.keep.is_cuda else None
    for wave in planned:
        full = buffer and wave.detours and wave.detours + buffer > WAVE_BYTES
        if wave.device == device and wave.ends.get(file, 0) <= start and not full:
            break
    else:
        planned.append(wave := Wave(device=device))
    wave.ends[file] = start + region.nbytes
    wave.detours += buffer
    wave.placed.setdefault(file, []).append((start, region))
    return wave


def _region(destination: torch.Tensor) -> Region:
    if not destination.is_contiguous():
        shape, strides = tuple(destination.shape), tuple(destination.stride())
        layout = packed(shape, strides)
        if layout is None or layout.numel != prod(shape):
            raise MismatchError("the destination's elements overlap each other")
    return Region.row_major(destination)


def _detour(read: BoxRead) -> tuple[Region, Callable[[], None]]:
    """Room for the rows that the box lies in, and how the box is copied out of it.

    The room is memory that nothing has touched, so it costs nothing before its wave is read.
    """
    dtype = t.dtype_named(read.dtype)
    strides = contiguous_strides(read.shard.sizes)
    reach = sum((size - 1) * stride for size, stride in zip(read.sizes, strides, strict=True)) + 1
    rows = host_block(reach * dtype.itemsize)
    box = t.raw(rows.untyped_storage(), 0, dtype.itemsize, read.sizes, strides)

    def copy() -> None:
        if read.destination.dtype == dtype:
            t.raw_of(read.destination).copy_(box)
        else:
            read.destination.copy_(rows.view(dtype).as_strided(read.sizes, strides))

    return Region.row_major(rows), copy
