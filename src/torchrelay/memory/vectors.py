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
from itertools import zip_longest
from typing import NamedTuple

import numpy as np

from torchrelay.geometry.runs import Moves, copy_one_by_one
from torchrelay.memory.thread_pool import run_on_threads
from torchrelay.system import c_library

PIECE = 8 << 20  # bytes of one call: large, because each may wait for the interpreter's lock
MOST_VECTORS = 1024  # that the kernel takes in one call
_LONG = 64 << 10  # bytes from which a memcpy of its own is as fast

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

    copies: Moves
    nbytes: int
    here: Ends
    there: Ends


def batches(moves: Moves, piece: int = PIECE) -> list[Batch]:
    """Share copies out to calls of at most `piece` bytes and `MOST_VECTORS` copies each.

    Three copies of 3, 3 and 10 bytes, where a call has at most 8:

        bytes of each           3   3   10
        cut at 8                3   3   8   2
        end of each             3   6   14  16
        calls                  [3   3] [8] [2]      3 + 3 + 8 are more than 8, and so are 8 + 2
    """
    moves = moves.cut(piece)
    ends = np.cumsum(moves.nbytes).tolist()
    here = np.stack([moves.destinations, moves.nbytes], axis=1)
    there = np.stack([moves.sources, moves.nbytes], axis=1)
    found: list[Batch] = []
    first = done = 0
    while first < len(ends):
        # One copy fits at least: none is longer than a call.
        last = bisect_right(ends, done + piece, first, min(first + MOST_VECTORS, len(ends)))
        rows = slice(first, last)
        copies = Moves(*(column[rows] for column in moves))
        found.append(Batch(copies, ends[last - 1] - done, here[rows], there[rows]))
        first, done = last, ends[last - 1]
    return found


def read(pid: int, batch: Batch) -> None:
    """Copy a batch from the memory of process `pid` to this one's, whole, or raise."""
    _read(pid, batch.here, batch.there, batch.nbytes)


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
        for batch in batches(_where(moves, short), PIECE // 4):
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
