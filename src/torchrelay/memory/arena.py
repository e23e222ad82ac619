"""Memory that a staged state lives in: shared with a writer process, pinned where there is a GPU.

It is a memfd: another process maps it by its descriptor, nothing is left behind in a file system,
and the kernel frees it with the last process that has it. It is allocated and touched once and
used for every save, because touching fresh memory costs several times as much as the copy.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from typing import Any

import torch

from torchrelay.memory.crew import share_out

_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE
_TOUCH = 64 << 20

_libc = ctypes.CDLL(None, use_errno=True)


class Arena:
    """`nbytes` of shared memory; `MemoryError` if there is none. Freed by `close`."""

    def __init__(self, nbytes: int, *, pinned: bool = False, threads: int = 2) -> None:
        self.nbytes = nbytes
        self.pinned = False
        self._map: mmap.mmap | None = None
        self.fd = os.memfd_create("torchrelay-arena", os.MFD_CLOEXEC)
        try:
            os.ftruncate(self.fd, nbytes)
            self._map = mmap.mmap(self.fd, nbytes)
        except (OSError, ValueError) as fault:
            os.close(self.fd)
            raise MemoryError(f"no arena of {nbytes} bytes: {fault}") from None
        self.tensor = torch.frombuffer(self._map, dtype=torch.uint8)
        self.address = self.tensor.data_ptr()
        try:
            self._touch(threads)
            if pinned:
                self._register()
        except BaseException:
            self.close()
            raise

    def _touch(self, threads: int) -> None:
        share_out(range(0, self.nbytes, _TOUCH), lambda: self._touch_from, threads)

    def _touch_from(self, at: int) -> None:
        nbytes = min(_TOUCH, self.nbytes - at)
        where = ctypes.c_void_p(self.address + at)
        if _libc.madvise(where, ctypes.c_size_t(nbytes), _POPULATE_WRITE):
            code = ctypes.get_errno()
            if code != errno.EINVAL:
                raise MemoryError(f"no memory for an arena: {os.strerror(code)}")
            ctypes.memset(self.address + at, 0, nbytes)  # a kernel that cannot populate

    def _register(self) -> None:
        code = _runtime().cudaHostRegister(self.address, self.nbytes, 0)
        if int(code) != 0:
            raise MemoryError(f"CUDA cannot pin {self.nbytes} bytes (error {int(code)})")
        self.pinned = True

    def close(self) -> None:
        """Free the memory here. Nothing may use `tensor` afterwards."""
        if self.pinned:
            _runtime().cudaHostUnregister(self.address)
            self.pinned = False
        if self._map is not None:
            self.tensor = torch.empty(0, dtype=torch.uint8)
            self._map = None  # unmapped when the last view of it is gone
            os.close(self.fd)

    def __del__(self) -> None:
        self.close()


def _runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]
