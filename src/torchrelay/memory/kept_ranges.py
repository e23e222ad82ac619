"""Ranges of a memory file that tensors keep after its owner is done with it.

A memory file is freed as a whole, with its last mapping. This module returns unused ranges earlier,
so that keeping one tensor does not keep the memory of all.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import weakref
from contextlib import suppress
from itertools import count
from typing import ClassVar

from torchrelay.memory.pages import paged

_KEEP_SIZE, _PUNCH_HOLE = 1, 2  # of fallocate(2)
_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long]


class KeptRanges:
    """Mappings of parts of a memory file. From `shrink` on, what no mapping has is freed.

    After a fork nothing is freed by parts: the other process may have a mapping that is gone here.
    """

    _forked: ClassVar[bool] = False

    def __init__(self, fd: int, nbytes: int) -> None:
        self._fd = os.dup(fd)
        self._nbytes = nbytes
        self._ranges: dict[int, tuple[int, int]] = {}
        self._numbers = count()
        self._lock = threading.RLock()  # the last reference may go in a thread that has it
        self._shrunk = False

    def add(self, mapping: mmap.mmap, first: int, last: int) -> None:
        """Bytes [first, last) are kept while the mapping lives."""
        with self._lock:
            number = next(self._numbers)
            self._ranges[number] = first, last
        weakref.finalize(mapping, self._gone, number).atexit = False

    def shrink(self) -> None:
        """The owner is done: free what is not kept, now and whenever a mapping goes."""
        with self._lock:
            self._shrunk = True
            self._free(0, self._nbytes)

    def _gone(self, number: int) -> None:
        with self._lock:
            first, last = self._ranges.pop(number)
            if self._shrunk:
                self._free(first, last)

    def _free(self, first: int, last: int) -> None:
        """Free the pages of a range that no mapping has."""
        last = paged(last)
        for start, stop in sorted(self._ranges.values()):
            if stop > first and start < last:
                self._punch(first, start)
                first = max(first, paged(stop))
        self._punch(first, last)
        if not self._ranges and self._fd >= 0:
            fd, self._fd = self._fd, -1
            os.close(fd)

    def _punch(self, first: int, last: int) -> None:
        if last > first and self._fd >= 0 and not self._forked:
            _libc.fallocate(self._fd, _KEEP_SIZE | _PUNCH_HOLE, first, last - first)

    def __del__(self) -> None:
        if self._fd >= 0:
            with suppress(OSError):
                os.close(self._fd)

    @classmethod
    def note_fork(cls) -> None:
        cls._forked = True


os.register_at_fork(before=KeptRanges.note_fork)
