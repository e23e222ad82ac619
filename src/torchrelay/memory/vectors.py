"""Copies of many pieces of memory by few calls, from this process or another one of this machine.

`process_vm_readv` takes lists of pieces and copies from one process's memory to another's, without
a buffer between and without the other's help. From the process itself it is a memcpy of many pieces
in one call, during which other threads run.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np

from torchrelay.memory.crew import share_out
from torchrelay.state.runs import Column, Moves, copy_one_by_one

PIECE = 8 << 20  # bytes of one call: large, because each may wait for the interpreter's lock
MOST_VECTORS = 1024  # that the kernel takes in one call
_LONG = 64 << 10  # bytes from which a memcpy of its own is as fast

_libc = ctypes.CDLL(None, use_errno=True)
_readv = getattr(_libc, "process_vm_readv", None)  # Linux has it
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


class Batch(NamedTuple):
    """Copies of one call, as the kernel wants them: address and length of each end."""

    here: np.ndarray[tuple[int, ...], np.dtype[np.uint64]]
    there: np.ndarray[tuple[int, ...], np.dtype[np.uint64]]
    nbytes: int
    positions: Column | None = None  # in the stream


def batches(moves: Moves, piece: int = PIECE) -> list[Batch]:
    """Cut copies into calls of about `piece` bytes each."""
    moves = moves.cut(piece)
    count = len(moves.nbytes)
    if not count:
        return []
    here = np.stack([moves.destinations, moves.nbytes], axis=1)
    there = np.stack([moves.sources, moves.nbytes], axis=1)
    ends = np.cumsum(moves.nbytes)
    found = []
    first, before = 0, 0
    while first < count:
        last = int(np.searchsorted(ends, np.uint64(before + piece), side="right"))
        last = min(max(last, first + 1), first + MOST_VECTORS, count)
        end = int(ends[last - 1])
        positions = moves.positions[first:last]
        found.append(Batch(here[first:last], there[first:last], end - before, positions))
        first, before = last, end
    return found


def read(pid: int, batch: Batch) -> None:
    """Copy a batch from the memory of process `pid` to this one's, whole, or raise."""
    if _readv is None:
        raise OtherMemoryError(errno.ENOSYS, "this system has no process_vm_readv")
    count = len(batch.here)
    got = _readv(pid, batch.here.ctypes.data, count, batch.there.ctypes.data, count, 0)
    if got == batch.nbytes:
        return
    code = ctypes.get_errno() if got < 0 else errno.EFAULT
    raise OtherMemoryError(code, os.strerror(code))


def read_bytes(pid: int, address: int, nbytes: int) -> bytes:
    """A few bytes of another process's memory."""
    buffer = ctypes.create_string_buffer(nbytes)
    read_run(pid, address, ctypes.addressof(buffer), nbytes)
    return buffer.raw


def read_run(pid: int, address: int, destination: int, nbytes: int) -> None:
    """Copy one run of bytes from the memory of process `pid` to an address of this one."""
    size = np.uint64(nbytes)
    here = np.array([[destination, size]], np.uint64)
    read(pid, Batch(here, np.array([[address, size]], np.uint64), nbytes))


def copy(moves: Moves, threads: int = 1) -> None:
    """Copy within this process, on a few threads."""
    short = moves.nbytes < np.uint64(_LONG)
    jobs: list[Callable[[], object]] = []
    if np.any(short):
        pid = os.getpid()
        for batch in batches(_where(moves, short), PIECE // 8):
            jobs.append(partial(_copy_short, pid, batch))
    if not np.all(short):
        long = _where(moves, ~short).cut(PIECE)
        columns = (long.destinations, long.sources, long.nbytes)
        for one in zip(*(c.tolist() for c in columns), strict=True):
            jobs.append(partial(ctypes.memmove, *one))
    share_out(jobs, lambda: _call, threads)


def _where(moves: Moves, rows: np.ndarray[tuple[int, ...], np.dtype[np.bool_]]) -> Moves:
    return Moves(*(column[rows] for column in moves))


def _call(job: Callable[[], object]) -> None:
    job()


def _copy_short(pid: int, batch: Batch) -> None:
    try:
        read(pid, batch)
    except OtherMemoryError:  # a sandbox that knows no such call
        here, there = batch.here, batch.there
        position: Column = np.zeros(len(here), np.uint64)
        copy_one_by_one(Moves(position, there[:, 0], here[:, 0], here[:, 1]))
