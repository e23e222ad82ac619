"""Copies of many pieces of memory by few calls, from this process or another one of this machine.

`process_vm_readv` takes lists of pieces and copies from one process's memory to another's, without
a buffer between and without the other's help. From the process itself it is a memcpy of many pieces
in one call, during which other threads run.
"""

from __future__ import annotations

import ctypes
import errno
import os
from bisect import bisect_right
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate, pairwise, repeat, zip_longest
from typing import NamedTuple

import numpy as np

from torchrelay.geometry.runs import Moves, copy_one_by_one
from torchrelay.memory.thread_pool import run_on_threads
from torchrelay.system import c_library

PIECE = 8 << 20  # bytes of one call: large, because each may wait for the interpreter's lock
MOST_VECTORS = 1024  # that the kernel takes in one call
_GAP = 1024  # bytes between pieces that cost less than a piece of its own. Less than a page: where
# both pieces can be read, what lies between can.
_LONG = 64 << 10  # bytes from which a memcpy of its own is as fast

_nowhere = ctypes.create_string_buffer(_GAP)
_readv = getattr(c_library(), "process_vm_readv", None)  # Linux has it
if _readv is not None:
    _readv.restype = ctypes.c_ssize_t
    _readv.argtypes = (
        ctypes.c_int,
        ctypes.c_void_p,
        ctypes.c_ulong,
        ctypes.c_void_p,
        ctypes.c_ulong,
        ctypes.c_ulong,
    )


class OtherMemoryError(OSError):
    """Another process's memory could not be read; `errno` says why."""


Job = Callable[[], object]
Ends = np.ndarray[tuple[int, ...], np.dtype[np.uint64]]


class Batch(NamedTuple):
    """Copies of one call, and address and length of each end as the kernel wants them."""

    moves: Moves  # of all calls
    rows: slice
    nbytes: int
    here: Ends
    there: Ends
    total: int  # bytes, with those between pieces

    @property
    def copies(self) -> Moves:
        return Moves(*(column[self.rows] for column in self.moves))


def batches(moves: Moves, piece: int = PIECE, *, bridge: bool = False) -> list[Batch]:
    """Cut copies into calls of about `piece` bytes each. `bridge`: small gaps between the pieces
    that are read are read with them, and thrown away."""
    moves = moves.cut(piece)
    count = len(moves.nbytes)
    if not count:
        return []
    most = MOST_VECTORS // 2 if bridge else MOST_VECTORS
    so_far = np.cumsum(moves.nbytes)
    # A list is faster to look at, where it does not take longer to make.
    ends = so_far.tolist() if count <= MOST_VECTORS else so_far
    edges, sums = [0], [0]
    while edges[-1] < count:
        first = edges[-1]
        last = bisect_right(ends, sums[-1] + piece, first, min(first + most, count))
        edges.append(max(last, first + 1))
        sums.append(int(ends[edges[-1] - 1]))
    (here, marks), (there, their_marks) = _vectors(moves, edges, bridge)
    columns = (
        repeat(moves),
        map(slice, edges, edges[1:]),
        (after - before for before, after in pairwise(sums)),
        [here[first:last] for first, last in pairwise(marks)],
        [there[first:last] for first, last in pairwise(their_marks)],
        np.add.reduceat(here[:, 1], marks[:-1]).tolist(),
    )
    return [Batch(*row) for row in zip(*columns, strict=False)]


def _vectors(
    moves: Moves, edges: list[int], bridge: bool
) -> tuple[tuple[Ends, list[int]], tuple[Ends, list[int]]]:
    """Both ends of the copies, and where in them each edge is."""
    sources, sizes = moves.sources, moves.nbytes
    gaps = np.full(len(sizes), _GAP, np.uint64)  # after each piece, up to the next
    if bridge:
        gaps[:-1] = sources[1:] - (sources + sizes)[:-1]  # far too much where that lies before
        gaps[np.array(edges[1:]) - 1] = _GAP
    near = gaps < np.uint64(_GAP)
    if not near.any():
        here, there = (np.stack([end, sizes], axis=1) for end in (moves.destinations, sources))
        return (here, edges), (there, edges)
    first = np.ones(len(sizes), bool)
    first[1:] = ~near[:-1]
    there = np.stack([sources[first], (sources + sizes)[~near] - sources[first]], axis=1)
    here = np.empty((2 * len(sizes), 2), np.uint64)
    here[::2, 0], here[::2, 1] = moves.destinations, sizes
    here[1::2, 0], here[1::2, 1] = ctypes.addressof(_nowhere), np.where(near, gaps, 0)
    full = here[:, 1] > 0
    here = np.compress(full, here, axis=0)  # many times as fast as `here[full]`
    return (here, _edges(full, [2 * edge for edge in edges])), (there, _edges(first, edges))


def _edges(rows: np.ndarray[tuple[int, ...], np.dtype[np.bool_]], edges: list[int]) -> list[int]:
    """Where edges are when the rows alone are left that are marked."""
    counts = (int(np.count_nonzero(rows[first:last])) for first, last in pairwise(edges))
    return [0, *accumulate(counts)]


def read(pid: int, batch: Batch) -> None:
    """Copy a batch from the memory of process `pid` to this one's, whole, or raise."""
    _read(pid, batch.here, batch.there, batch.total)


def _read(pid: int, here: Ends, there: Ends, nbytes: int) -> None:
    if _readv is None:
        raise OtherMemoryError(errno.ENOSYS, "this system has no process_vm_readv")
    got = _readv(pid, here.ctypes.data, len(here), there.ctypes.data, len(there), 0)
    if got == nbytes:
        return
    code = ctypes.get_errno() if got < 0 else errno.EFAULT
    raise OtherMemoryError(code, os.strerror(code))


def read_bytes(pid: int, address: int, nbytes: int) -> bytes:
    """A few bytes of another process's memory."""
    buffer = ctypes.create_string_buffer(nbytes)
    ends = (ctypes.addressof(buffer), address)
    here, there = (np.array([[end, nbytes]], np.uint64) for end in ends)
    _read(pid, here, there, nbytes)
    return buffer.raw


def copy(moves: Moves, threads: int = 1, others: Sequence[Job] = ()) -> None:
    """Copy within this process, on a few threads, which run the `others` in between."""
    short = moves.nbytes < np.uint64(_LONG)
    jobs: list[Job] = []
    if np.any(short):
        pid = os.getpid()
        for batch in batches(_where(moves, short), PIECE // 4, bridge=True):
            jobs.append(partial(_copy_short, pid, batch))
    if not np.all(short):
        long = _where(moves, ~short).cut(PIECE)
        columns = (long.destinations, long.sources, long.nbytes)
        for one in zip(*(c.tolist() for c in columns), strict=True):
            jobs.append(partial(ctypes.memmove, *one))
    # Alternate: copies let other threads run, and the other jobs may not.
    mixed = (job for pair in zip_longest(jobs, others) for job in pair if job is not None)
    run_on_threads(mixed, lambda: _call, threads)


def _where(moves: Moves, rows: np.ndarray[tuple[int, ...], np.dtype[np.bool_]]) -> Moves:
    return Moves(*(column[rows] for column in moves))


def _call(job: Job) -> None:
    job()


def _copy_short(pid: int, batch: Batch) -> None:
    try:
        read(pid, batch)
    except OtherMemoryError:  # a sandbox that knows no such call
        copy_one_by_one(batch.copies)
