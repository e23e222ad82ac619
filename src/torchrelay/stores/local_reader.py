"""Reads of a local data file: through the page cache, or past it.

Bytes that are on the medium alone and are read once come faster without a detour through the page
cache, which would have to find room for them page by page.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence

from torchrelay.stores.files import named

PAGE = 4096  # what reads past the page cache are aligned to
PROBES = 16  # places of a file that are looked for in the page cache
_LARGE = 8 << 20
_IOV_MAX = 1024
_NO_WAIT: int = getattr(os, "RWF_NOWAIT", 0)


class LocalReader:
    """A data file of a committed step."""

    def __init__(self, path: str, *, once: bool = True) -> None:
        self._path = path
        self._fd: int | None = None
        self._direct: int | None = None
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self.nbytes = os.fstat(self._fd).st_size
        self.cold = self.nbytes >= _LARGE and self._is_out_of_cache()
        if self.cold and once:
            try:
                self._direct = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
            except OSError:
                pass  # a file system that cannot
        self.batched = self._direct is not None

    def _is_out_of_cache(self) -> bool:
        """Whether most of the file would have to be waited for."""
        assert self._fd is not None
        misses = 0
        for probe in range(PROBES):
            try:
                os.preadv(self._fd, [bytearray(1)], self.nbytes * probe // PROBES, _NO_WAIT)
            except BlockingIOError:
                misses += 1
            except OSError:  # a file system that does not tell, such as tmpfs
                return False
        return misses > PROBES // 2

    def read_cached(self, position: int, buffers: Sequence[memoryview]) -> bool:
        assert self._fd is not None
        if not _NO_WAIT:
            return False
        try:
            done = os.preadv(self._fd, buffers, position, _NO_WAIT)
        except OSError:
            return False
        return done == sum(map(len, buffers))

    def read_into(self, position: int, buffers: Sequence[memoryview]) -> None:
        assert self._fd is not None
        if len(buffers) == 1 and self._direct is None:  # the common case, at full length
            try:
                if os.preadv(self._fd, buffers, position) == len(buffers[0]):
                    return
            except OSError:
                pass  # the general way says which file it is
        views = [view for view in buffers if len(view)]
        with named(self._path):
            if self._direct is not None and len(views) == 1:
                position, views = self._read_direct(position, views[0])
            while views:
                done = os.preadv(self._fd, views[:_IOV_MAX], position)
                if not done:
                    raise EOFError(f"{self._path} ends before byte {position}")
                position += done
                while views and done >= len(views[0]):
                    done -= len(views.pop(0))
                if done:
                    views[0] = views[0][done:]

    def _read_direct(self, position: int, view: memoryview) -> tuple[int, list[memoryview]]:
        """Read what is aligned of a range; returns what is left to read."""
        assert self._direct is not None
        address = ctypes.addressof(ctypes.c_char.from_buffer(view))
        whole = len(view) // PAGE * PAGE
        if position % PAGE or address % PAGE:
            whole = 0
        done = 0
        while done < whole:
            try:
                count = os.preadv(self._direct, [view[done:whole]], position + done)
            except OSError:
                break  # the usual way may work, or say what is wrong
            if count % PAGE or not count:
                break
            done += count
        return position + done, [view[done:]] if done < len(view) else []

    def close(self) -> None:
        held = self._fd, self._direct
        self._fd = self._direct = None  # forgotten first: no number is closed twice
        for fd in held:
            if fd is not None:
                os.close(fd)

    def __del__(self) -> None:
        self.close()
