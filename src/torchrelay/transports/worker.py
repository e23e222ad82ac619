"""Hashing and copying beside the transfer.

The backend's own threads move the bytes. Where cores are few, work on a chunk that has arrived
must not hold up the one that is on its way: it runs on a thread that yields to them.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable
from contextlib import suppress

NICENESS = 5  # added to the process's own; measured 4 to 5 % on two cores


class Worker:
    """Runs jobs in the order they come, on a thread of lower priority or on several."""

    def __init__(self, threads: int = 1, niceness: int = NICENESS) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._niceness = niceness
        self._most = threads
        self._threads: list[threading.Thread] = []

    def submit(self, job: Callable[[], None]) -> None:
        """`job` reports its own result and faults."""
        self._jobs.put(job)
        if len(self._threads) < self._most:
            thread = threading.Thread(target=self._run, name="torchrelay-work", daemon=True)
            self._threads.append(thread)
            thread.start()

    def stop(self) -> None:
        """Drop what has not begun; returns when no job runs any more."""
        while not self._jobs.empty():
            with suppress(queue.Empty):
                self._jobs.get_nowait()
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()

    def _run(self) -> None:
        # A process of another system, or in a sandbox, may not change priorities; nothing is lost.
        if self._niceness:
            with suppress(OSError, AttributeError):
                nice = os.getpriority(os.PRIO_PROCESS, 0) + self._niceness
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), nice)
        while (job := self._jobs.get()) is not None:
            job()
