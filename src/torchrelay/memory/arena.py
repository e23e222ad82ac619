"""Memory that a staged state lives in: shared with a writer process, pinned where there is a GPU.

It is a memfd: another process maps it by its descriptor, nothing is left behind in a file system,
and the kernel frees it with the last process that has it. It is allocated and touched once and
used for every save, because touching fresh memory costs several times as much as the copy.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from typing import Any

import torch

from torchrelay.memory.pages import populate


class Arena:
    """`nbytes` of shared memory; `MemoryError` if there is none. Freed by `close`."""

    def __init__(self, nbytes: int, *, pinned: bool = False, threads: int = 2) -> None:
        self.nbytes = nbytes
        self.pinned = False
        self._map: mmap.mmap | None = None
        self.fd = -1
        self.fd = os.memfd_create("torchrelay-arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.fd, nbytes)
            # Whoever maps it may rely on its size: touching what was cut off would end the process.
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL)
            self._map = mmap.mmap(self.fd, nbytes)
        except (OSError, ValueError) as fault:
            self.close()
            raise MemoryError(f"no arena of {nbytes} bytes: {fault}") from None
        self.tensor = torch.frombuffer(self._map, dtype=torch.uint8)
        self.address = self.tensor.data_ptr()
        try:
            populate(self.address, nbytes, threads)
            if pinned:
                self._register()
        except BaseException:
            self.close()
            raise

    def _register(self) -> None:
        code = register(self.address, self.nbytes)
        if code != 0:
            raise MemoryError(f"CUDA cannot pin {self.nbytes} bytes (error {code})")
        self.pinned = True

    def close(self) -> None:
        """Free the memory here. Nothing may use `tensor` afterwards."""
        if self.pinned:
            unregister(self.address)
            self.pinned = False
        if self._map is not None:
            self.tensor = torch.empty(0, dtype=torch.uint8, device="cpu")
            self._map = None  # unmapped when the last view of it is gone
        fd, self.fd = self.fd, -1  # forgotten first: no number is closed twice
        if fd >= 0:
            os.close(fd)

    def forsake(self) -> None:
        """In a child of a fork, where CUDA knows nothing of it: free it here alone."""
        self.pinned = False
        self.close()

    def __del__(self) -> None:
        self.close()


def register(address: int, nbytes: int) -> int:
    """Pin memory for CUDA; 0, or the number of an error."""
    return int(_runtime().cudaHostRegister(address, nbytes, 0))


def unregister(address: int) -> None:
    _runtime().cudaHostUnregister(address)


def _runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]
