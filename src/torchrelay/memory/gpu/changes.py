"""Which elements differ between two versions in memory of a GPU, and how many.

The bits are those of `parts.bitmaps`: the lowest bit of a byte is the first element. The kernels'
source is changes.cu.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
import torch

from torchrelay.memory.gpu.kernels import (
    BLOCKS_PER_PROCESSOR,
    CudaError,
    functions,
    launch,
    on_device,
)

SIZES = (1, 2, 4, 8, 16)  # bytes of an element
TILE = 1 << 20  # bytes of a version that one block compares at a time
SPAN = 1024  # bytes of bits that a warp counts
_ALIGN = 128  # bits of a field begin at a multiple of it
_THREADS = 512
_WARPS = 8  # of a block that counts

Field = tuple[int, int, int]  # bytes [start, stop) of memory, and the bytes of an element


class _ChangeKernels(NamedTuple):
    find: dict[int, ctypes.c_void_p]  # by the bytes of an element
    counts: ctypes.c_void_p
    processors: int


@cache
def _load(device: int) -> _ChangeKernels:
    names = [f"torchrelay_changes_{size}".encode() for size in SIZES]
    *find, count = functions("changes.ptx", [*names, b"torchrelay_count"], device)
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    return _ChangeKernels(dict(zip(SIZES, find, strict=True)), count, processors)


def can_find(device: int) -> bool:
    """Whether the kernels can be loaded there."""
    try:
        return bool(_load(device))
    except (CudaError, OSError):
        return False


class Changes(NamedTuple):
    """The bits of several fields in memory of a GPU; `places`: where those of each begin."""

    bits: torch.Tensor
    places: list[int]
    fields: list[Field]

    def of(self, index: int) -> torch.Tensor:
        """The bits of one field."""
        start, stop, size = self.fields[index]
        return self.bits[self.places[index] :][: -(-(stop - start) // size // 8)]

    def total(self) -> int:
        """How many elements differ."""
        device, spans = self.bits.get_device(), -(-len(self.bits) // SPAN)
        with torch.cuda.device(device):
            loaded = _load(device)
            counts = torch.zeros(spans, dtype=torch.int32, device="cuda")
            # Each warp takes a span at a time.
            blocks = min(-(-spans // _WARPS), loaded.processors * 8)
            numbers = [self.bits.data_ptr(), len(self.bits), counts.data_ptr()]
            launch(loaded.counts, blocks, 32 * _WARPS, numbers)
            return int(counts.sum())


def find(before: int, after: int, fields: Sequence[Field], device: int) -> Changes:
    """Ask a device, on its current stream, which elements differ between the memory at two
    addresses. Fields are of whole elements."""
    places, end = [], 0
    for start, stop, size in fields:
        places.append(end)
        end += -(-(stop - start) // size // 8 // _ALIGN) * _ALIGN
    with torch.cuda.device(device):
        loaded = _load(device)
        bits = torch.zeros(max(1, end), dtype=torch.uint8, device="cuda")
        for size in sorted({field[2] for field in fields}):
            rows = [
                _tiles(before, after, field, bits.data_ptr() + place)
                for field, place in zip(fields, places, strict=True)
                if field[2] == size
            ]
            table = np.concatenate(rows)
            if len(table):
                grid = min(loaded.processors * BLOCKS_PER_PROCESSOR, len(table))
                there = on_device(table, device)
                launch(loaded.find[size], grid, _THREADS, [there.data_ptr(), len(table)])
    return Changes(bits, places, list(fields))


def _tiles(
    before: int, after: int, field: Field, bits: int
) -> np.ndarray[tuple[int, ...], np.dtype[np.uint64]]:
    """A field in parts: rows of the addresses of both versions and of the bits, and elements."""
    start, stop, size = field
    at = np.arange(start, stop, TILE, dtype=np.uint64)
    counts = np.minimum(np.uint64(TILE), np.uint64(stop) - at) // np.uint64(size)
    skip = (at - np.uint64(start)) // np.uint64(8 * size)
    columns = (at + np.uint64(before), at + np.uint64(after), skip + np.uint64(bits), counts)
    return np.stack(columns, axis=1)
