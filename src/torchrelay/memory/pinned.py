"""Pinned buffers through which bytes go to a GPU, each followed by an event on the stream.

Memory that several threads touch and one call registers is pinned in less than half the time that
torch takes to allocate it. One set of buffers stays with the process, for the next load.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from torchrelay.memory.arena import register, unregister
from torchrelay.memory.kernels import check, driver, take_context
from torchrelay.memory.pages import Mapping, populate
from torchrelay.memory.pool import cores

PIECE = 4 << 20  # bytes of a buffer: smaller ones cost more calls than the copies take
EACH = 2  # buffers of a thread: one is filled while the other is on its way
MOST_THREADS = 16
_WAITING = 1 | 2  # an event that is waited for without spinning, and does not keep the time


class PinnedBuffers:
    """Buffers for so many threads. `CudaError` or `MemoryError` where there is no memory."""

    def __init__(self, threads: int) -> None:
        self.threads = threads
        nbytes = threads * EACH * PIECE
        self._mapping = Mapping(nbytes)
        self.address = self._mapping.address
        populate(self.address, nbytes, cores())
        check(register(self.address, nbytes), f"pin {nbytes} bytes")

    def close(self) -> None:
        unregister(self.address)


_kept: list[PinnedBuffers] = []
_lock = threading.Lock()


@contextmanager
def pinned_buffers() -> Iterator[PinnedBuffers]:
    """A set of buffers for one use, kept for the next one after it."""
    with _lock:
        mine = _kept.pop() if _kept else None
    mine = mine or PinnedBuffers(max(2, min(MOST_THREADS, cores())))
    try:
        yield mine
    finally:
        with _lock:
            if not _kept:
                _kept.append(mine)
                mine = None
        if mine is not None:
            mine.close()


class Upload:
    """One thread's buffers of a set: fill `view`, then `send` what is in it, and so on."""

    def __init__(self, buffers: PinnedBuffers, thread: int, device: int, stream: Any) -> None:
        take_context(device)
        self._at = [buffers.address + (thread * EACH + n) * PIECE for n in range(EACH)]
        self._views = [
            memoryview((ctypes.c_char * PIECE).from_address(at)).cast("B") for at in self._at
        ]
        self._events = [_event() for _ in self._at]
        self._stream = ctypes.c_void_p(stream.cuda_stream)
        self._turn = 0

    def view(self, nbytes: int) -> memoryview:
        """The next buffer, when nothing reads it any more."""
        check(driver().cuEventSynchronize(self._events[self._turn]), "wait for a copy")
        return self._views[self._turn][:nbytes]

    def send(self, destination: int, nbytes: int) -> None:
        """Have what is in the buffer copied to an address of the device."""
        source, turn = self._at[self._turn], self._turn
        code = driver().cuMemcpyHtoDAsync_v2(
            ctypes.c_uint64(destination),
            ctypes.c_void_p(source),
            ctypes.c_size_t(nbytes),
            self._stream,
        )
        check(code, "copy to the device")
        check(driver().cuEventRecord(self._events[turn], self._stream), "note a copy")
        self._turn = (turn + 1) % EACH

    def close(self) -> None:
        """Nothing reads the buffers any more."""
        while self._events:
            driver().cuEventDestroy_v2(self._events.pop())


def _event() -> ctypes.c_void_p:
    event = ctypes.c_void_p()
    check(driver().cuEventCreate(ctypes.byref(event), ctypes.c_uint(_WAITING)), "make an event")
    return event


def room_on(device: int) -> int:
    """Bytes of a device that torch could still allocate."""
    free = int(torch.cuda.mem_get_info(device)[0])
    idle = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return free + idle
