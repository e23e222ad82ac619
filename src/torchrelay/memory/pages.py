"""Mappings of memory, fresh or of a memory file, and touching them before they are used.

Fresh memory costs a fault a page. Huge pages cost the fewest, unless the system itself has to fetch
the memory first (a guest whose host took it back): then they can be several times slower than small
ones. So a few megabytes of each kind are touched, and the faster kind is used for the rest.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import threading
import time
from collections.abc import Sequence
from typing import Any

from torchrelay.memory.free import check_free
from torchrelay.memory.thread_pool import run_on_threads
from torchrelay.system import LINUX, c_library

HUGE_PAGE = 2 << 20
PAGE = mmap.PAGESIZE
_STEP = 8 << 20
_POPULATE_READ, _POPULATE_WRITE = 22, 23  # MADV_POPULATE_READ, MADV_POPULATE_WRITE
_HUGE, _SMALL = 14, 15  # MADV_HUGEPAGE, MADV_NOHUGEPAGE
_TRY_AGAIN = 64  # steps after which the kind that lost is tried once more

_FIXED, NO_RESERVE = 0x10, 0x4000  # MAP_FIXED, MAP_NORESERVE

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of mallopt(3)
_RETURNED = 16 << 10  # bytes from which libc maps a block of its own and unmaps it when freed

_libc: Any = c_library()


def return_freed_memory(nbytes: int = _RETURNED) -> None:
    """Have this process return freed blocks of at least `nbytes` to the system. A server with
    hundreds of clients would otherwise keep the gaps between their buffers: 60 MB after five
    minutes instead of 25. Does nothing if the C library has no such setting."""
    set_option = getattr(_libc, "mallopt", None)
    if set_option is not None:
        set_option(_MMAP_THRESHOLD, nbytes)
        set_option(_TRIM_THRESHOLD, 4 * nbytes)


def paged(nbytes: int) -> int:
    """`nbytes`, rounded up to whole pages."""
    return -(-nbytes // PAGE) * PAGE


class Mapping:
    """Private memory of this process at a multiple of `HUGE_PAGE`; `MemoryError` if none is left.

    Unmapped with the object.
    """

    def __init__(self, nbytes: int) -> None:
        check_free(nbytes)
        try:
            self._map = private_memory(paged(nbytes) + HUGE_PAGE)
        except (OSError, ValueError, OverflowError) as fault:
            raise MemoryError(f"no {nbytes} bytes of memory: {fault}") from None
        self.address = -(-address_of(self._map) // HUGE_PAGE) * HUGE_PAGE


def address_of(buffer: mmap.mmap | memoryview) -> int:
    """Where the first byte of writable memory is, which must not be empty."""
    # The export ends with this call: a lasting one would keep the memory from being freed.
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))


def host_view(address: int, nbytes: int) -> memoryview:
    """Host memory as a buffer. The caller keeps it alive."""
    return memoryview((ctypes.c_char * nbytes).from_address(address)).cast("B")


def private_memory(nbytes: int) -> mmap.mmap:
    """Fresh memory of this process alone."""
    if not hasattr(mmap, "MAP_PRIVATE"):  # Windows
        return mmap.mmap(-1, nbytes)
    # Python's own default is shared: not given back in parts, and not copied by a fork.
    return mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def side_by_side(files: Sequence[int], each: int, nbytes: int) -> mmap.mmap:
    """Files of memory, `each` bytes of one, as one range of `nbytes`; `OSError` if that cannot be.

    Unmapped with the object.
    """
    _libc.mmap.restype = ctypes.c_void_p
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE
    whole = mmap.mmap(-1, nbytes, flags=flags)
    address = address_of(whole)
    for number, file in enumerate(files):
        at = number * each
        code = _libc.mmap(
            ctypes.c_void_p(address + at),
            ctypes.c_size_t(min(each, nbytes - at)),
            mmap.PROT_READ | mmap.PROT_WRITE,
            mmap.MAP_SHARED | _FIXED,
            file,
            ctypes.c_long(0),
        )
        if code != address + at:
            raise OSError(ctypes.get_errno(), "memory cannot be mapped")
    return whole


def reserve(file: int, nbytes: int, start: int = 0) -> None:
    """Give a range of a file of memory its pages; `MemoryError` where the system has no more."""
    check_free(nbytes)
    try:
        os.posix_fallocate(file, start, nbytes)
    except OSError as fault:
        raise MemoryError(f"no memory: {fault.strerror}") from None


def allocate(file: int, address: int, nbytes: int) -> None:
    """Give a file of memory its pages, and have them mapped at an address; `MemoryError` where the
    system has no more memory. Faster than touching pages that the file has not got yet."""
    reserve(file, nbytes)
    code = _advise(address, nbytes, _POPULATE_WRITE)
    if code not in (0, errno.EINVAL):  # a kernel that cannot do that maps them when they are used
        raise MemoryError(f"no memory: {os.strerror(code)}")


def release(address: int, nbytes: int) -> None:
    """Give the pages of a range back to the system; they read as zeros after that."""
    _advise(address, nbytes, mmap.MADV_DONTNEED)


def map_present(address: int, nbytes: int) -> None:
    """Map the pages that a file of memory has for a range, all at once. A kernel that cannot do
    that maps them when they are touched."""
    _advise(address, nbytes, _POPULATE_READ)


class MappedRange:
    """Bytes [start, start + nbytes) of a memory file, mapped into this process: read where they
    lie, or copied by memcpy. `OSError` where they cannot be mapped.

    A read of such a file by the kernel takes about three times as long as a memcpy from a mapping.
    The pages are mapped as they are asked for, many at a time, because a fault for each costs as
    much. Writing to a view changes nothing but this mapping. Unmapped with the object and its
    views.
    """

    def __init__(self, fd: int, start: int, nbytes: int) -> None:
        first = start // PAGE * PAGE
        self._map = mmap.mmap(
            fd,
            start + nbytes - first,
            flags=mmap.MAP_PRIVATE | NO_RESERVE,
            prot=mmap.PROT_READ | mmap.PROT_WRITE,  # a tensor over memory has to be writable
            offset=first,
        )
        self._skip = start - first
        self._address = address_of(self._map) + self._skip
        self.nbytes = nbytes

    def view(self, position: int, nbytes: int) -> memoryview:
        """Bytes as they lie; `EOFError` where there are none."""
        self._reach(position, nbytes)
        return memoryview(self._map)[self._skip + position :][:nbytes]

    def copy_to(self, position: int, buffers: Sequence[memoryview]) -> None:
        """Fill buffers that are not empty, one after the other. Other threads run meanwhile."""
        self._reach(position, sum(map(len, buffers)))
        at = self._address + position
        for buffer in buffers:
            ctypes.memmove(address_of(buffer), at, len(buffer))
            at += len(buffer)

    def _reach(self, position: int, nbytes: int) -> None:
        if position + nbytes > self.nbytes:
            raise EOFError(f"the memory ends before byte {position + nbytes}")
        map_present(self._address + position, nbytes)


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

    run_on_threads(steps, lambda: touch, threads)


def _advise(address: int, nbytes: int, advice: int) -> int:
    """0, or the number of an error. Advice has other numbers on other systems, which get none."""
    if not LINUX:
        return errno.EINVAL
    low = address - address % PAGE
    size = address + nbytes - low
    failed = _libc.madvise(ctypes.c_void_p(low), ctypes.c_size_t(size), advice)
    return ctypes.get_errno() if failed else 0


class _Kinds:
    """Which pages to ask for next: the kind that took less time the last time it was tried."""

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}
        self._turns = 0
        self._lock = threading.Lock()

    def next(self) -> int:
        with self._lock:
            self._turns += 1
            for kind in (_HUGE, _SMALL):
                if kind not in self._seconds:
                    return kind
            faster, slower = sorted(self._seconds, key=self._seconds.__getitem__)
            return faster if self._turns % _TRY_AGAIN else slower

    def took(self, kind: int, seconds: float) -> None:
        with self._lock:
            self._seconds[kind] = seconds
