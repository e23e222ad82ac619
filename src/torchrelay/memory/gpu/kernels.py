"""Kernels for many pieces of GPU memory at once: copies of them, their digests, and both.

Hundreds of copies take the host longer to request than the device to perform, and a digest made on
the device covers the transfer to the host and back. The kernels' source is kernels.cu. The driver
loads kernels.ptx, which runs on every GPU from compute capability 7.0 on. If it cannot be loaded,
torch copies piece by piece, and digests are made on the host.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import xxhash

from torchrelay.errors import ResourceError
from torchrelay.geometry import DIGEST_BYTES
from torchrelay.geometry.chunks import Sizes
from torchrelay.geometry.runs import Column, Moves, Runs
from torchrelay.memory import threads
from torchrelay.memory.digest import CELL_BYTES, digest, joined_each
from torchrelay.memory.gpu.chunk_table import ChunkTable, Numbers
from torchrelay.memory.gpu.side import side_stream

TILE = 2 << 20  # bytes that one block copies at a time
COPY_THREADS = 512
BLOCKS_PER_PROCESSOR = 4
HASH_THREADS = 32
CHUNKS_PER_BLOCK = HASH_THREADS // 8  # eight threads take a chunk
_ORDINAL = 9  # CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
_NAMES = (b"torchrelay_copy", b"torchrelay_xxh3_128", b"torchrelay_copy_xxh3_128")
_WORD = 8  # bytes that the kernels hash at a time, where they lie and go to


class CudaError(Exception):
    """The CUDA driver refused; the message says what."""


@cache
def driver() -> Any:
    """The CUDA driver's library; `CudaError` where there is none."""
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as fault:
        raise CudaError(f"the CUDA driver cannot be called: {fault}") from None


@cache
def brief_driver() -> Any:
    """The same, for calls that return at once and are made by the hundred: the thread keeps the
    interpreter, which takes longer to give away and get back than the calls take."""
    driver()  # says what is wrong, if something is
    return ctypes.PyDLL("libcuda.so.1")


def check(code: int, what: str) -> None:
    if code:
        raise CudaError(f"CUDA cannot {what} (error {code})")


def take_context(device: int) -> None:
    """Make the device's context this thread's, for calls of the driver."""
    torch.cuda.set_device(device)
    torch.cuda.current_stream().query()


class _Kernels(NamedTuple):
    copy: ctypes.c_void_p
    hash: ctypes.c_void_p
    copy_and_hash: ctypes.c_void_p
    processors: int


_loading = threading.Lock()


def functions(file: str, names: Sequence[bytes], device: int) -> list[ctypes.c_void_p]:
    """Kernels by their names, of a file next to this one, loaded on a device."""
    text = (Path(__file__).parent / file).read_bytes()
    module, found = ctypes.c_void_p(), []
    with torch.cuda.device(device):
        torch.cuda.current_stream().query()  # makes the device's context this thread's
        check(driver().cuModuleLoadData(ctypes.byref(module), text), "load kernels")
        for name in names:
            function = ctypes.c_void_p()
            code = driver().cuModuleGetFunction(ctypes.byref(function), module, name)
            check(code, "find a kernel")
            found.append(function)
    return found


@cache
def _load(device: int) -> _Kernels:
    found = functions("kernels.ptx", _NAMES, device)
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    return _Kernels(found[0], found[1], found[2], processors)


def kernels(device: int) -> _Kernels | None:
    """The kernels, loaded once (which takes a tenth of a second); None where they cannot be."""
    with _loading:
        try:
            return _load(device)
        except (CudaError, OSError):
            return None


_warm: set[int] = set()


def warm_up(device: int) -> None:
    """Begin to load the kernels, while there are other things to wait for."""
    if device not in _warm:
        _warm.add(device)
        with contextlib.suppress(ResourceError):  # they are loaded when they are needed
            threads.start(lambda: kernels(device), "kernels")


def on_device(table: Numbers, device: int) -> torch.Tensor:
    """Numbers as the kernels take them: on the device, in one dimension. The memory outlives the
    kernel that is launched next, since torch reuses it in the order of the stream."""
    flat = np.ascontiguousarray(table).view(np.int64).reshape(-1)
    return torch.from_numpy(flat).to(f"cuda:{device}")


def copy(moves: Moves, device: int) -> None:
    """Ask a device, on its current stream, to copy memory of its own by address."""
    with torch.cuda.device(device):
        loaded = kernels(device)
        if loaded is None:
            copy_one_by_one(moves, device, device)
            return
        cut = moves.cut(TILE)
        if len(cut.nbytes):
            rows = np.stack([cut.sources, cut.destinations, cut.nbytes], axis=1)
            table = on_device(rows, device)
            grid = min(loaded.processors * BLOCKS_PER_PROCESSOR, len(rows))
            launch(loaded.copy, grid, COPY_THREADS, [table.data_ptr(), len(rows)])


def copy_one_by_one(moves: Moves, there: int, here: int) -> None:
    """Ask a device to copy memory of another one that it can reach, or its own, by many calls."""
    columns = (moves.sources, moves.destinations, moves.nbytes)
    for source, to, nbytes in zip(*(column.tolist() for column in columns), strict=True):
        device_bytes(to, nbytes, here).copy_(device_bytes(source, nbytes, there))


def in_words(moves: Moves) -> bool:
    """Whether nearly all bytes can be copied and hashed at once: the kernel takes words of a stream
    that are words of memory at both ends, and others byte by byte."""
    offsets = (moves.sources - moves.positions) | (moves.destinations - moves.positions)
    unaligned = moves.nbytes[offsets % np.uint64(_WORD) > 0].sum()
    return bool(unaligned * 64 <= moves.nbytes.sum())


def digests(hashed: ChunkTable, device: int) -> torch.Tensor:
    """Ask a device, on its current stream, for the XXH3-128 of each row of a table: rows of bytes
    there. A table that copies is for the kernels alone: they hash what has come to lie there."""
    count = hashed.count
    with torch.cuda.device(device):
        loaded = kernels(device)
        if loaded is None:
            return _digests_on_host(hashed, device).to(f"cuda:{device}")
        found = torch.empty(count, DIGEST_BYTES, dtype=torch.uint8, device="cuda")
        if count:
            both = on_device(hashed.numbers, device)
            segments = both.data_ptr() + hashed.chunks.nbytes
            numbers = [both.data_ptr(), count, segments, found.data_ptr()]
            kernel = loaded.copy_and_hash if hashed.copies else loaded.hash
            launch(kernel, -(-count // CHUNKS_PER_BLOCK), HASH_THREADS, numbers)
        return found


def digest_of(data: torch.Tensor) -> bytes:
    """The digest of a chunk, a tensor of bytes, made where they lie."""
    if not data.is_cuda or not data.numel():
        return digest(data.cpu().numpy())
    memory = Runs([0], [data.data_ptr()], [data.numel()])
    return digests_of(memory, [0], [data.numel()], data.device.index)[0]


def digests_of(
    memory: Runs,
    starts: Sequence[int],
    sizes: Sequence[int],
    device: int,
    to: Runs | None = None,
) -> list[bytes]:
    """The digests of chunks in the order of the stream, none of them empty: made by the device that
    has their bytes. Bytes outside of the memory are zeros. With `to`, which takes the kernels, the
    same bytes are first copied there, and hashed in their new location."""
    if not len(starts):
        return []
    begin, end, edges = cells_of(starts, sizes)
    table = ChunkTable.of(memory, begin, end, to)
    with torch.cuda.device(device), side_stream():
        cells = digests(table, device).cpu().numpy().tobytes()
    return joined_each(cells, edges)


def cells_of(starts: Sizes, sizes: Sizes) -> tuple[Column, Column, list[int]]:
    """The cells of chunks, none of them empty: where each begins and ends, and the number of the
    first cell of each chunk, with the count of all of them at the end."""
    first, nbytes = np.array(starts, np.int64), np.array(sizes, np.int64)
    counts = -(-nbytes // CELL_BYTES)
    edges = np.append(0, np.cumsum(counts))
    chunk = np.repeat(np.arange(len(counts)), counts)  # of each cell
    begin = first[chunk] + CELL_BYTES * (np.arange(len(chunk)) - edges[chunk])
    end = np.minimum(begin + CELL_BYTES, (first + nbytes)[chunk])
    return begin.astype(np.uint64), end.astype(np.uint64), edges.tolist()


def launch(function: ctypes.c_void_p, grid: int, threads: int, numbers: Iterable[int]) -> None:
    """Have the current device run a kernel on its current stream, with arguments of 64 bits."""
    values = [ctypes.c_uint64(number) for number in numbers]
    pointers = (ctypes.c_void_p * len(values))(*map(ctypes.addressof, values))
    current = torch.cuda.current_stream()
    current.query()  # makes the device's context this thread's
    stream = ctypes.c_void_p(current.cuda_stream)
    check(
        driver().cuLaunchKernel(function, grid, 1, 1, threads, 1, 1, 0, stream, pointers, None),
        "launch a kernel",
    )


def _digests_on_host(hashed: ChunkTable, device: int) -> torch.Tensor:
    def of(first: int, nbytes: int) -> bytes:
        running, at = xxhash.xxh3_128(), 0
        while at < nbytes:
            base, end, _ = hashed.segments[first].tolist()
            address = (base + at) % (1 << 64)
            data = device_bytes(address, end - at, device).cpu() if base else None
            bits: Any = bytes(end - at) if data is None else data.numpy()
            running.update(bits)
            first, at = first + 1, end
        return running.digest()

    whole = b"".join(of(*row) for row in hashed.chunks.tolist())
    return torch.frombuffer(bytearray(whole or b"\0"), dtype=torch.uint8)[: len(whole)].view(
        -1, DIGEST_BYTES
    )


def device_at(address: int) -> int:
    """The GPU whose memory an address leads to."""
    number = ctypes.c_int()
    code = driver().cuPointerGetAttribute(ctypes.byref(number), _ORDINAL, ctypes.c_uint64(address))
    check(code, "say which GPU memory is on")
    return number.value


def by_device(memory: Runs) -> dict[int, Runs]:
    """Memory of GPUs, apart for each of them."""
    if torch.cuda.device_count() < 2 or not len(memory.starts):
        return {0: memory} if len(memory.starts) else {}
    on = np.array([device_at(at) for at in memory.addresses.tolist()])
    columns = (memory.starts, memory.addresses, memory.stops - memory.starts)
    return {int(n): Runs(*(column[on == n] for column in columns)) for n in np.unique(on)}


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
    """Memory of a device as a tensor. The caller keeps the memory alive."""
    return torch.as_tensor(_Raw(address, nbytes), device=f"cuda:{device}")
