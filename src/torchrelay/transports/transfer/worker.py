"""Hashing and copying beside the transfer.

The backend's own threads move the bytes. Where cores are few, work on a chunk that has arrived
must not hold up the one that is on its way: it runs on a thread that yields to them.
"""

from __future__ import annotations

import queue
from collections.abc import Callable
from contextlib import suppress

from torchrelay.memory import threads
from torchrelay.memory.pool import cores

NICENESS = 2  # added to the process's own; on two cores 0 and 5 were no faster


def hashers() -> int:
    """Threads that hash and land chunks: one keeps up with two connections, and must leave the
    cores to those where they are few."""
    return max(1, min(4, cores() // 4))


def on_the_way() -> bool:
    """Whether whoever moves a chunk should hash it too, while it is in the cache: where cores are
    few that costs least. With more of them another thread is faster, beside."""
    return cores() < 4


class Worker:
    """Runs jobs in the order they come, on a thread of lower priority or on several."""

    def __init__(self, most: int = 1, niceness: int = NICENESS) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._niceness = niceness
        self._most = most
        self._running: list[threads.Running] = []

    def submit(self, job: Callable[[], None]) -> None:
        """`job` reports its own result and faults."""
        self._jobs.put(job)
        if len(self._running) < self._most:
            self._running.append(threads.run(self._run, "work", self._niceness))

    def stop(self) -> None:
        """Drop what has not begun; returns when no job runs any more."""
        while not self._jobs.empty():
            with suppress(queue.Empty):
                self._jobs.get_nowait()
        for _ in self._running:
            self._jobs.put(None)
        for running in self._running:
            if not running.here:
                running.wait()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
