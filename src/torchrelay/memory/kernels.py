"""One kernel: many pieces of GPU memory copied in a single launch, and summed up on the way.

Hundreds of copies and sums take the host longer to ask for than the device to do. The kernel's
source is copy_and_sum.cu; what the driver loads is copy_and_sum.ptx beside it, which every GPU from
compute capability 7.0 on can run. Where it cannot be loaded, torch does the same piece by piece.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

TILE = 512 << 10  # bytes that one block takes at a time; a multiple of 16
THREADS = 512
BLOCKS_PER_PROCESSOR = 4
_NAME = b"torchrelay_copy_and_sum"


class CudaError(Exception):
    """The CUDA driver refused; the message says what."""


Part = tuple[int, int]  # the first tile, and every how many from there
WHOLE: Part = (0, 1)


COPY, SUM_SOURCE, SUM_DESTINATION = 0, 1, 2  # what is done with pieces


class Piece(NamedTuple):
    """Bytes at `source` that go to `destination`, both addresses on one device."""

    source: int
    destination: int
    nbytes: int


@cache
def driver() -> Any:
    """The CUDA driver's library; `CudaError` where there is none."""
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as fault:
        raise CudaError(f"the CUDA driver cannot be called: {fault}") from None


def check(code: int, what: str) -> None:
    if code:
        raise CudaError(f"CUDA cannot {what} (error {code})")


_loading = threading.Lock()


@cache
def _load(device: int) -> tuple[ctypes.c_void_p, int]:
    """The kernel on a device, and how many blocks it is run with."""
    text = (Path(__file__).parent / "copy_and_sum.ptx").read_bytes()
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    with torch.cuda.device(device):
        torch.cuda.current_stream().query()  # makes the device's context this thread's
        check(driver().cuModuleLoadData(ctypes.byref(module), text), "load a kernel")
        check(driver().cuModuleGetFunction(ctypes.byref(function), module, _NAME), "find a kernel")
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    return function, processors * BLOCKS_PER_PROCESSOR


def kernel(device: int) -> tuple[ctypes.c_void_p, int] | None:
    """The kernel, loaded once (which takes a tenth of a second); None where it cannot be."""
    with _loading:
        try:
            return _load(device)
        except (CudaError, OSError):
            return None


_warm: set[int] = set()


def warm_up(device: int) -> None:
    """Begin to load the kernel, while there are other things to wait for."""
    if device not in _warm:
        _warm.add(device)
        threading.Thread(target=kernel, args=(device,), daemon=True).start()


class Tables:
    """Pieces cut into tiles, as the kernel takes them. The last few tables are kept on the device;
    they hold addresses, and keep no memory alive."""

    def __init__(self, most: int = 4) -> None:
        self._kept: dict[tuple[object, ...], torch.Tensor] = {}
        self._most = most
        self._lock = threading.Lock()

    def of(self, pieces: Sequence[Piece], device: int) -> torch.Tensor:
        key = (device, *pieces)
        with self._lock:
            known = self._kept.pop(key, None)
            if known is None:
                known = torch.from_numpy(tiles(pieces)).to(f"cuda:{device}")
                torch.cuda.current_stream(device).synchronize()
            self._kept[key] = known
            while len(self._kept) > self._most:
                del self._kept[next(iter(self._kept))]
            return known

    def clear(self) -> None:
        with self._lock:
            self._kept.clear()


def tiles(pieces: Sequence[Piece]) -> np.ndarray[Any, np.dtype[np.int64]]:
    """A row for each tile: source, destination, bytes, piece."""
    table = np.array(pieces, np.int64).reshape(-1, 3)
    source, destination, nbytes = table.T
    counts = -(-nbytes // TILE)
    piece = np.repeat(np.arange(len(table)), counts)
    skip = (np.arange(len(piece)) - np.repeat(np.cumsum(counts) - counts, counts)) * TILE
    size = np.minimum(nbytes[piece] - skip, TILE)
    return np.stack([source[piece] + skip, destination[piece] + skip, size, piece], axis=1)


def copy_and_sum(
    pieces: Sequence[Piece],
    device: int,
    tables: Tables,
    *,
    what: int = COPY,
    sums: bool = True,
    part: Part = WHOLE,
) -> torch.Tensor | None:
    """Ask the device, on its current stream, to copy the pieces or to read one of their ends; with
    `sums`, the sum of what was read of each.

    A sum is that of 64-bit words modulo 2**64, with bytes behind the last whole word as numbers of
    their own. Any flipped bit changes it. `part` takes some of the tiles alone (not where torch
    does the work: all of them then).
    """
    with torch.cuda.device(device):
        loaded = kernel(device)
        if loaded is None:
            return _piece_by_piece(pieces, device, what, sums=sums)
        totals = torch.zeros(len(pieces), dtype=torch.int64, device="cuda") if sums else None
        _launch(*loaded, tables.of(pieces, device), totals, (*part, what))
        return totals


def _launch(
    function: ctypes.c_void_p,
    blocks: int,
    table: torch.Tensor,
    totals: torch.Tensor | None,
    how: tuple[int, int, int],
) -> None:
    count = len(table)
    if not count:
        return
    numbers = (table.data_ptr(), count, 0 if totals is None else totals.data_ptr(), *how)
    values = [ctypes.c_uint64(number) for number in numbers]
    pointers = (ctypes.c_void_p * len(values))(*map(ctypes.addressof, values))
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    grid = min(blocks, count)
    check(
        driver().cuLaunchKernel(function, grid, 1, 1, THREADS, 1, 1, 0, stream, pointers, None),
        "launch a kernel",
    )


def _piece_by_piece(
    pieces: Sequence[Piece], device: int, what: int, *, sums: bool
) -> torch.Tensor | None:
    totals = torch.zeros(len(pieces), dtype=torch.int64, device="cuda") if sums else None
    for index, (source, destination, nbytes) in enumerate(pieces):
        data = device_bytes(destination if what == SUM_DESTINATION else source, nbytes, device)
        if what == COPY:
            device_bytes(destination, nbytes, device).copy_(data)
        if totals is not None:
            totals[index] = word_sum(data)
    return totals


def word_sum(data: torch.Tensor) -> torch.Tensor:
    """The sum of one piece, given as bytes, as the kernel has it."""
    whole = data.numel() - data.numel() % 8
    words = data[:whole]
    if words.storage_offset() % 8 or words.data_ptr() % 8:
        words = words.clone()
    return words.view(torch.int64).sum() + data[whole:].sum(dtype=torch.int64)


class _Raw:
    """Device memory as torch takes it over without a copy."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


def device_bytes(address: int, nbytes: int, device: int) -> torch.Tensor:
    """Memory of a device as a tensor. Whoever asks keeps it alive."""
    return torch.as_tensor(_Raw(address, nbytes), device=f"cuda:{device}")
