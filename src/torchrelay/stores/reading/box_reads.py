"""From stored tensors and their destinations to byte ranges of files and the memory they go to.

A box of a shard that is one run of bytes goes straight to its place. Any other box, and one whose
destination has another dtype, takes a detour: the rows it lies in are read to a buffer, and the
box is copied out of it. Detours are taken in waves, so that their buffers stay small.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from math import prod
from operator import itemgetter
from typing import NamedTuple, Protocol

import torch

from torchrelay.errors import MismatchError
from torchrelay.geometry.strides import contiguous_strides, packed
from torchrelay.memory.host import host_block
from torchrelay.plan.reads import BoxRead
from torchrelay.plan.region import Region
from torchrelay.state import tensors as t
from torchrelay.stores.reading.fetch import Placed

WAVE_BYTES = 256 << 20


class ShardRead(NamedTuple):
    """A run of a file, as it is, to a run of memory."""

    file: int
    start: int
    region: Region


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

    wanted: dict[int, list[Placed]] = field(default_factory=dict)
    after: list[Callable[[], None]] = field(default_factory=list)
    device: int | None = None  # the GPU that all of its places are on
    fetch: WaveFetch | None = None  # what reads it, from its check on
    ends: dict[int, int] = field(default_factory=dict)  # of the last range of each file
    detours: int = 0  # bytes of buffers

    def finish(self) -> None:
        """Everything has arrived: take it where it belongs."""
        for copy in self.after:
            copy()


def waves(reads: Iterable[BoxRead], shards: Iterable[ShardRead] = ()) -> list[Wave]:
    """Plan the reads. `MismatchError` for a destination that cannot be written to."""
    direct = list(shards)
    detours: list[BoxRead] = []
    for read in reads:
        if not prod(read.sizes):
            continue
        if read.destination.dtype == t.dtype_named(read.tensor.dtype) and is_run(read):
            direct.append(ShardRead(read.shard.file, first_byte(read), _region(read.destination)))
        else:
            detours.append(read)
    planned: list[Wave] = []
    for file, start, region in sorted(direct, key=itemgetter(0, 1)):
        _wave_for(planned, file, start, region)
    for read in sorted(detours, key=lambda read: (read.shard.file, first_byte(read))):
        region, copy = _detour(read)
        wave = _wave_for(planned, read.shard.file, first_byte(read), region, region.nbytes)
        wave.after.append(copy)
    return planned


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
    wave.wanted.setdefault(file, []).append((start, region))
    return wave


def is_run(read: BoxRead) -> bool:
    """Whether a box is one run of its shard's elements."""
    if read.sizes == read.shard.sizes:
        return True
    inner = False
    for size, whole in zip(read.sizes, read.shard.sizes, strict=True):
        if inner and size != whole:
            return False
        inner = inner or size > 1
    return True


def first_byte(read: BoxRead) -> int:
    """Where in the file the first element of the box lies."""
    if not any(read.offsets):
        return read.shard.start
    strides = contiguous_strides(read.shard.sizes)
    first = sum(offset * stride for offset, stride in zip(read.offsets, strides, strict=True))
    return read.shard.start + first * t.dtype_named(read.tensor.dtype).itemsize


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
    dtype = t.dtype_named(read.tensor.dtype)
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
