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
    """Runs jobs one after the other on a thread of lower priority."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="torchrelay-work", daemon=True)
        self._thread.start()

    def submit(self, job: Callable[[], None]) -> None:
        """`job` reports its own result and faults."""
        self._jobs.put(job)

    def stop(self) -> None:
        """Drop what has not begun; returns when no job runs any more."""
        while not self._jobs.empty():
            with suppress(queue.Empty):
                self._jobs.get_nowait()
        self._jobs.put(None)
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        # A process of another system, or in a sandbox, may not change priorities; nothing is lost.
        with suppress(OSError, AttributeError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        while (job := self._jobs.get()) is not None:
            job()
