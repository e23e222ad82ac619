"""How much memory a process keeps while no transfer uses it.

Kept memory makes the next transfer fast, and no one else can use it. So all processes of a job on
one host keep at most a tenth of its memory together. A control group may have less than the host:

    memory of the host                    64 GiB
    limit of this container                2 GiB   (of a nested group, if that has less)
    a tenth of the smaller one           204 MiB   for all processes together
    8 processes on this host              25 MiB   for this one: its pools, rings and pinned buffers

The number of processes is the largest that any of its groups knows of; `LOCAL_WORLD_SIZE` (torchrun
sets it) counts where a group does not know yet.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from functools import cache
from typing import Protocol

from torchrelay.memory.free import total_bytes

SHARE = 10
_HINT = "LOCAL_WORLD_SIZE"


class IdleHolder(Protocol):
    """Keeps memory that is not in use."""

    @property
    def kept_bytes(self) -> int:
        """The bytes that it keeps. Takes no lock."""


class HostCounter(Protocol):
    """Knows how many processes are on this host."""

    @property
    def processes_here(self) -> int:
        """At least as many as there are."""


class IdleMemory:
    """The memory that one process may keep, for all of its holders together. Thread-safe: a holder
    may ask for its share in a finalizer, so nothing here waits for a lock then."""

    def __init__(self, total: Callable[[], int | None], hint: Callable[[], int]) -> None:
        self._total, self._hint = total, hint
        self._holders: tuple[weakref.ref[IdleHolder], ...] = ()
        self._counters: tuple[weakref.ref[HostCounter], ...] = ()
        self._lock = threading.Lock()

    def add(self, holder: IdleHolder) -> None:
        """Count what it keeps, for as long as it lives."""
        with self._lock:
            alive = [ref for ref in self._holders if ref() is not None]
            self._holders = (*alive, weakref.ref(holder))

    def count_by(self, counter: HostCounter) -> None:
        """Divide by the number of processes that it knows of, for as long as it lives."""
        with self._lock:
            alive = [ref for ref in self._counters if ref() is not None]
            self._counters = (*alive, weakref.ref(counter))

    @property
    def limit(self) -> int:
        """Bytes that this process may keep; 0 where the system does not say how much there is."""
        counters = [counter for ref in self._counters if (counter := ref()) is not None]
        processes = max([1, self._hint(), *(counter.processes_here for counter in counters)])
        return (self._total() or 0) // SHARE // processes

    def left_for(self, holder: IdleHolder) -> int:
        """Bytes that one holder may keep, next to what the others keep."""
        holders = [other for ref in self._holders if (other := ref()) is not None]
        others = sum(other.kept_bytes for other in holders if other is not holder)
        return max(0, self.limit - others)


def processes_by_hint() -> int:
    """The processes of this host by torchrun; 0 where it has not started this one."""
    text = os.environ.get(_HINT, "")
    return int(text) if text.isdecimal() else 0


# The limits are read once: that takes a millisecond.
idle_memory = IdleMemory(cache(total_bytes), processes_by_hint)
