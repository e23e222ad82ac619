"""Memory that a staged state lives in: shared with a writer process, pinned where there is a GPU.

It is memfds: another process maps them by their descriptors, nothing is left behind in a file
system, and the kernel frees them with the last process that has them. They are allocated once and
used for every save, because fresh memory costs several times as much as the copy. Several of them
are allocated side by side, where threads that allocate one would wait for each other.
"""

from __future__ import annotations

import errno
import mmap
import os
from contextlib import suppress
from typing import Any

import torch

from torchrelay.memory.free import check_free
from torchrelay.memory.pages import HUGE_PAGE, allocate, private_memory, reserve, side_by_side
from torchrelay.memory.sealed import sealed_memory
from torchrelay.memory.thread_pool import run_on_threads
from torchrelay.shortage import raise_shortage
from torchrelay.system import LINUX

LEAST_PART = 64 << 20  # bytes of a memfd, if there are several
MOST_PARTS = 128  # the kernel passes on 253 descriptors at a time


class Arena:
    """`nbytes` of shared memory; `MemoryError` if there is none. Freed by `close`.

    It is one range here, of at most `parts` files (`fds`) that have `each` bytes of it. Systems
    other than Linux have no such files: the memory is this process's alone there, and `fds` is
    empty. Without `populate` it has no pages yet: call `reserve` for a range before writing to it.
    """

    def __init__(
        self, nbytes: int, *, pinned: bool = False, parts: int = 1, populate: bool = True
    ) -> None:
        self.nbytes = nbytes
        self.pinned = False
        self._map: mmap.mmap | None = None
        self.fds: list[int] = []
        parts = max(1, min(parts, nbytes // LEAST_PART, MOST_PARTS))
        self.each = -(-nbytes // parts // HUGE_PAGE) * HUGE_PAGE if parts > 1 else nbytes
        try:
            if populate:
                check_free(nbytes)
            if LINUX:
                for at in range(0, nbytes, self.each):
                    self.fds.append(sealed_memory(min(self.each, nbytes - at)))
                self._map = side_by_side(self.fds, self.each, nbytes)
            else:
                self._map = private_memory(nbytes)
        except (OSError, ValueError, OverflowError, MemoryError) as fault:
            self.close()
            if isinstance(fault, OSError) and fault.errno in (errno.EMFILE, errno.ENFILE):
                raise_shortage(fault, "share memory")
            raise MemoryError(f"no arena of {nbytes} bytes: {fault}") from None
        self.tensor = torch.frombuffer(self._map, dtype=torch.uint8)
        self.address = self.tensor.data_ptr()
        try:
            if populate:
                run_on_threads(range(len(self.fds)), lambda: self._allocate, len(self.fds))
            if pinned:
                if code := register(self.address, nbytes):
                    raise MemoryError(f"CUDA cannot pin {nbytes} bytes (error {code})")
                self.pinned = True
        except BaseException:
            self.close()
            raise

    @property
    def fd(self) -> int:
        """Of an arena of one part; -1 when it is closed."""
        return self.fds[0] if self.fds else -1

    def reserve(self, start: int, nbytes: int) -> None:
        """Give a range of an arena of one part its pages; `MemoryError` where there are none."""
        reserve(self.fd, nbytes, start)

    def _allocate(self, part: int) -> None:
        at = part * self.each
        allocate(self.fds[part], self.address + at, min(self.each, self.nbytes - at))

    def close(self) -> None:
        """Free the memory here. Nothing may use `tensor` afterwards."""
        if self.pinned:
            unregister(self.address)
            self.pinned = False
        if self._map is not None:
            self.tensor = torch.empty(0, dtype=torch.uint8, device="cpu")
            self._map = None  # unmapped when the last view of it is gone
        fds, self.fds = self.fds, []  # forgotten first: no number is closed twice
        for fd in fds:
            os.close(fd)

    def detach_after_fork(self) -> None:
        """In a child of a fork, where CUDA knows nothing of it: free it here alone."""
        self.pinned = False
        self.close()

    def __del__(self) -> None:
        with suppress(AttributeError):  # one that could not be made
            self.close()


def register(address: int, nbytes: int) -> int:
    """Pin memory for CUDA; 0, or the number of an error."""
    return int(_runtime().cudaHostRegister(address, nbytes, 0))


def unregister(address: int) -> None:
    _runtime().cudaHostUnregister(address)


def _runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]
