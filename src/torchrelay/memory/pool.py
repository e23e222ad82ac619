"""Memory that outlives the tensors in it: the next receive does not fault its pages in again.

Tensors over it are ordinary ones, each with a storage of its own: keeping one keeps no other's
memory. When the last reference to one goes, its range comes back here, is kept while no more than
`limit` bytes lie idle, and goes to the next tensor of the same size. Ranges beyond the limit are
returned to the system, oldest first. A pool may also return all idle memory some time after the
last request.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NamedTuple

import torch

from torchrelay.errors import MismatchError, ResourceError
from torchrelay.geometry.boxes import Numbers
from torchrelay.geometry.runs import Moves
from torchrelay.landing.workspace import LARGE_BYTES, Workspace, allocate
from torchrelay.memory import threads, vectors
from torchrelay.memory.free import check_free
from torchrelay.memory.gpu import kernels
from torchrelay.memory.idle import IdleMemory, idle_memory
from torchrelay.memory.pages import Mapping, paged, populate, release
from torchrelay.memory.writable import first_read_only


class _Range(NamedTuple):
    mapping: Mapping  # unmapped when none of its ranges is in use or idle any more
    address: int
    nbytes: int


class Pool:
    """Host memory for received states. Bounded when idle, not in use. Thread-safe.

    `limit`: the bytes that it keeps; by default its share of `memory.idle`. `seconds`: this long
    after the last `take` nothing idle is kept any more.
    """

    def __init__(
        self,
        limit: int | None = None,
        *,
        seconds: float | None = None,
        shared: IdleMemory = idle_memory,
    ) -> None:
        self._limit, self._shared = limit, shared
        self._seconds = seconds
        self._until = 0.0
        self._timed = False  # whether a thread waits for that
        self._lock = threading.Lock()
        self._idle: dict[int, deque[_Range]] = {}  # by size; what came back last stands last
        self.kept_bytes = 0
        self._returned: deque[_Range] = deque()
        self._closed = False
        if limit is None:
            shared.add(self)

    @property
    def limit(self) -> int:
        """The bytes that it may keep now."""
        return self._shared.left_for(self) if self._limit is None else self._limit

    @property
    def idle_bytes(self) -> int:
        with self._lock:
            self._settle()
            return self.kept_bytes

    def take(self, sizes: Sequence[int]) -> list[torch.Tensor]:
        """A buffer for each size, in order. Raises `MemoryError` if memory runs out."""
        wanted = [paged(max(size, 1)) for size in sizes]
        with self._lock:
            self._settle()
            # The newest of those that came back: its pages are the warmest.
            same = [self._idle.get(nbytes) for nbytes in wanted]
            found = [ranges.pop() if ranges else None for ranges in same]
            self.kept_bytes -= sum(one.nbytes for one in found if one is not None)
            fresh = sum(n for n, one in zip(wanted, found, strict=True) if one is None)
            self._evict(self.limit - fresh)  # what fitted nothing makes room for what is new
            self._put_off()
        if fresh:
            mapping = Mapping(fresh)
            populate(mapping.address, fresh, cores())
            at = mapping.address
            for index, nbytes in enumerate(wanted):
                if found[index] is None:
                    found[index] = _Range(mapping, at, nbytes)
                    at += nbytes
        return [self._lend(one, n) for one, n in zip(found, sizes, strict=True) if one is not None]

    def close(self) -> None:
        """Keep nothing from now on. Tensors that are in use stay as they are."""
        with self._lock:
            self._closed = True
            self._settle()

    def _lend(self, one: _Range, nbytes: int) -> torch.Tensor:
        block = (ctypes.c_ubyte * max(nbytes, 1)).from_address(one.address)
        weakref.finalize(block, self._give_back, one).atexit = False
        return torch.frombuffer(block, dtype=torch.uint8)[:nbytes]

    def _give_back(self, one: _Range) -> None:
        # Runs wherever the last reference goes, perhaps in a thread that holds the lock.
        self._returned.append(one)
        if self._lock.acquire(blocking=False):
            try:
                self._settle()
            finally:
                self._lock.release()

    def _settle(self) -> None:
        while self._returned:
            one = self._returned.popleft()
            same = self._idle.pop(one.nbytes, None) or deque()
            same.append(one)
            self._idle[one.nbytes] = same
            self.kept_bytes += one.nbytes
        over = self._seconds is not None and time.monotonic() >= self._until
        self._evict(0 if self._closed or over else self.limit)

    def _put_off(self) -> None:
        """Have what is idle given back some time from now, and not before."""
        if self._seconds is None:
            return
        self._until = time.monotonic() + self._seconds
        if not self._timed:
            with suppress(ResourceError):  # it stays idle, then
                threads.run(self._give_up, "pool")
                self._timed = True

    def _give_up(self) -> None:
        while True:
            with self._lock:
                left = self._until - time.monotonic()
                if left <= 0:
                    self._timed = False
                    self._settle()
                    return
            time.sleep(left)

    def _evict(self, keep: int) -> None:
        while self.kept_bytes > max(keep, 0):
            size, same = next(iter(self._idle.items()))
            if not same:
                del self._idle[size]
                continue
            one = same.popleft()
            release(one.address, one.nbytes)
            self.kept_bytes -= size


class CheckedWorkspace(Workspace):
    """Memory by torch, compared with what is free before it is taken."""

    def buffers(self, sizes: Sequence[int]) -> list[torch.Tensor]:
        _check_free(sum(sizes))
        return super().buffers(sizes)

    def stage(self, nbytes: int, device: torch.device | str = "cpu") -> torch.Tensor:
        if torch.device(device).type == "cpu":
            _check_free(nbytes)
        return super().stage(nbytes, device)

    def first_read_only(self, addresses: Numbers, sizes: Numbers) -> int:
        return first_read_only(addresses, sizes)


def _check_free(nbytes: int) -> None:
    try:
        check_free(nbytes)
    except MemoryError as fault:
        raise MismatchError(f"no memory for {nbytes} bytes: {fault}") from None


class Pooled(CheckedWorkspace):
    """Memory from a pool, copies on several threads or by one kernel."""

    def __init__(self, pool: Pool | None) -> None:
        self._pool = pool

    def buffers(self, sizes: Sequence[int]) -> list[torch.Tensor]:
        large = [nbytes for nbytes in sizes if nbytes >= LARGE_BYTES]
        if self._pool is None or not large:
            return super().buffers(sizes)
        try:
            found = iter(self._pool.take(large))
        except MemoryError as fault:
            raise MismatchError(f"no memory for {sum(large)} bytes: {fault}") from None
        return [next(found) if nbytes >= LARGE_BYTES else allocate(nbytes) for nbytes in sizes]

    def stage(self, nbytes: int, device: torch.device | str = "cpu") -> torch.Tensor:
        on_host = torch.device(device).type == "cpu"
        return self.buffers([nbytes])[0] if on_host else allocate(nbytes, device)

    def copy(
        self, moves: Moves, *, alone: bool = True, also: Sequence[Callable[[], object]] = ()
    ) -> None:
        vectors.copy(moves, cores() if alone else 1, also)

    def copy_by_address(self, moves: Moves, device: torch.device) -> bool:
        if device.type != "cuda" or device.index is None:
            return False
        kernels.copy(moves, device.index)
        return True


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
