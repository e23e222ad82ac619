"""A range of a memory file, mapped into this process: read where it lies, or copied by memcpy.

A read of such a file by the kernel takes about three times as long as a memcpy from a mapping. The
pages are mapped as they are asked for, many at a time, because a fault for each costs as much.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Sequence

from torchrelay.memory.pages import NO_RESERVE, PAGE, address_of, map_present


class MappedRange:
    """Bytes [start, start + nbytes) of a memory file; `OSError` where they cannot be mapped.

    Writing to a view changes nothing but this mapping. Unmapped with the object and its views.
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
