"""Pinned buffers through which bytes go to a GPU, each followed by an event on the stream.

Each thread has the buffers pinned that it fills, when it first does: none waits for all of them.
One set of buffers stays with the process, for the next load.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch

from torchrelay.memory.arena import register, unregister
from torchrelay.memory.gpu.kernels import brief_driver, check, driver, take_context
from torchrelay.memory.idle import idle_memory
from torchrelay.memory.pages import Mapping, populate
from torchrelay.memory.pool import cores

# Bytes of a buffer. After each a thread needs the interpreter, which many of them wait for; but
# what leaves the processor's cache before it is copied on has to come back from memory.
PIECE = 4 << 20
EACH = 2  # buffers of a thread: one is filled while the other is on its way
MOST_THREADS = 12  # more of them are in each other's way
_WAITING = 1 | 2  # an event that is waited for without spinning, and does not keep the time


class PinnedBuffers:
    """Buffers for `threads` threads. Raises `MemoryError` if memory runs out."""

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self.nbytes = threads * EACH * PIECE
        self._mapping = Mapping(self.nbytes)
        self._pinned: set[int] = set()

    def of(self, thread: int) -> list[int]:
        """Where the buffers of a thread begin. `CudaError` where they cannot be pinned."""
        address = self._mapping.address + thread * EACH * PIECE
        if address not in self._pinned:
            populate(address, EACH * PIECE, 1)
            check(register(address, EACH * PIECE), f"pin {EACH * PIECE} bytes")
            self._pinned.add(address)
        return [address + n * PIECE for n in range(EACH)]

    def close(self) -> None:
        while self._pinned:
            unregister(self._pinned.pop())


class _KeptBuffers:
    """The set of buffers that stays with the process, if it may keep that much."""

    def __init__(self) -> None:
        self._set: PinnedBuffers | None = None
        self._lock = threading.Lock()
        idle_memory.add(self)

    @property
    def kept_bytes(self) -> int:
        kept = self._set
        return 0 if kept is None else kept.nbytes

    def take(self) -> PinnedBuffers | None:
        with self._lock:
            found, self._set = self._set, None
            return found

    def give(self, buffers: PinnedBuffers) -> None:
        with self._lock:
            if self._set is None and buffers.nbytes <= idle_memory.left_for(self):
                self._set = buffers
                return
        buffers.close()


_kept = _KeptBuffers()


@contextmanager
def pinned_buffers() -> Iterator[PinnedBuffers]:
    """A set of buffers for one use, kept for the next one after it."""
    mine = _kept.take() or PinnedBuffers(max(2, min(MOST_THREADS, cores())))
    try:
        yield mine
    finally:
        _kept.give(mine)


@cache
def _calls() -> Any:
    """The driver's library, with the types of calls that return at once."""
    library, pointer = brief_driver(), ctypes.c_void_p
    library.cuMemcpyHtoDAsync_v2.argtypes = (ctypes.c_uint64, pointer, ctypes.c_size_t, pointer)
    library.cuEventRecord.argtypes = (pointer, pointer)
    library.cuEventQuery.argtypes = (pointer,)
    return library


class Upload:
    """One thread's buffers of a set: fill `view`, then `send` what is in it, and so on."""

    def __init__(self, buffers: PinnedBuffers, thread: int, device: int, stream: Any) -> None:
        take_context(device)
        self._at = buffers.of(thread)
        self._views = [
            memoryview((ctypes.c_char * PIECE).from_address(at)).cast("B") for at in self._at
        ]
        self._events = [_event() for _ in self._at]
        self._stream: int = stream.cuda_stream
        self._calls = _calls()
        self._turn = 0

    def view(self, nbytes: int) -> memoryview:
        """The next buffer, when nothing reads it any more."""
        event = self._events[self._turn]
        if self._calls.cuEventQuery(event):
            check(driver().cuEventSynchronize(ctypes.c_void_p(event)), "wait for a copy")
        view = self._views[self._turn]
        return view if nbytes == PIECE else view[:nbytes]

    def send(self, destination: int, nbytes: int) -> None:
        """Have what is in the buffer copied to an address of the device."""
        turn, stream = self._turn, self._stream
        code = self._calls.cuMemcpyHtoDAsync_v2(destination, self._at[turn], nbytes, stream)
        check(code, "copy to the device")
        check(self._calls.cuEventRecord(self._events[turn], stream), "note a copy")
        self._turn = (turn + 1) % EACH

    def close(self) -> None:
        """Nothing reads the buffers any more."""
        while self._events:
            driver().cuEventDestroy_v2(ctypes.c_void_p(self._events.pop()))


def _event() -> int:
    event = ctypes.c_void_p()
    check(driver().cuEventCreate(ctypes.byref(event), ctypes.c_uint(_WAITING)), "make an event")
    return event.value or 0


def room_on(device: int) -> int:
    """Bytes of a device that torch could still allocate."""
    free = int(torch.cuda.mem_get_info(device)[0])
    idle = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return free + idle
