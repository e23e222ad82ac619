"""Mappings of fresh memory, and touching them before they are used.

Fresh memory costs a fault a page. Huge pages cost the fewest, unless the system itself has to fetch
the memory first (a guest whose host took it back): then they can be several times slower than small
ones. So a few megabytes of each are touched, and the faster kind goes on.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import threading
import time

from torchrelay.memory.crew import share_out

HUGE_PAGE = 2 << 20
PAGE = mmap.PAGESIZE
_STEP = 8 << 20
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE
_HUGE, _SMALL = 14, 15  # MADV_HUGEPAGE, MADV_NOHUGEPAGE
_TRY_AGAIN = 64  # steps after which the kind that lost is tried once more

_libc = ctypes.CDLL(None, use_errno=True)


class Mapping:
    """Private memory of this process at a multiple of `HUGE_PAGE`; `MemoryError` if none is left.

    Unmapped with the object.
    """

    def __init__(self, nbytes: int) -> None:
        try:
            # Python's own default is shared: not given back in parts, and not copied by a fork.
            self._map = mmap.mmap(
                -1,
                -(-nbytes // PAGE) * PAGE + HUGE_PAGE,
                flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS,
            )
        except (OSError, ValueError, OverflowError) as fault:
            raise MemoryError(f"no {nbytes} bytes of memory: {fault}") from None
        anchor = ctypes.c_char.from_buffer(self._map)
        self.address = -(-ctypes.addressof(anchor) // HUGE_PAGE) * HUGE_PAGE
        del anchor  # an export would keep the mapping from being closed


def release(address: int, nbytes: int) -> None:
    """Give the pages of a range back to the system; they read as zeros after that."""
    _advise(address, nbytes, mmap.MADV_DONTNEED)


def populate(address: int, nbytes: int, threads: int) -> None:
    """Touch a range that begins at a page; `MemoryError` where the system has no more memory."""
    kinds = _Kinds()
    steps = range(address, address + nbytes, _STEP)
    end = address + nbytes

    def touch(at: int) -> None:
        size = min(_STEP, end - at)
        kind = kinds.next() if size == _STEP else None
        begun = time.perf_counter()
        if kind is not None:
            _advise(at, size, kind)  # a kernel without huge pages says no, and nothing is lost
        code = _advise(at, size, _POPULATE_WRITE)
        if code == errno.EINVAL:  # a kernel that cannot populate
            ctypes.memset(at, 0, size)
        elif code:
            raise MemoryError(f"no memory: {os.strerror(code)}")
        if kind is not None:
            kinds.took(kind, time.perf_counter() - begun)

    share_out(steps, lambda: touch, threads)


def _advise(address: int, nbytes: int, advice: int) -> int:
    """0, or the number of an error."""
    low = address - address % PAGE
    size = address + nbytes - low
    failed = _libc.madvise(ctypes.c_void_p(low), ctypes.c_size_t(size), advice)
    return ctypes.get_errno() if failed else 0


class _Kinds:
    """Which pages to ask for next: the kind that took less time the last time it was tried."""

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}
        self._given = 0
        self._lock = threading.Lock()

    def next(self) -> int:
        with self._lock:
            self._given += 1
            if _HUGE not in self._seconds:
                return _HUGE
            if _SMALL not in self._seconds:
                return _SMALL
            faster = min(self._seconds, key=self._seconds.__getitem__)
            if self._given % _TRY_AGAIN:
                return faster
            return _SMALL if faster == _HUGE else _HUGE

    def took(self, kind: int, seconds: float) -> None:
        with self._lock:
            self._seconds[kind] = seconds
