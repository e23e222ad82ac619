"""The threads that move, copy and hash bytes: borrowed for a job, given back at its end. If
none can be started, the thread that submits a job does it.

How many there are follows from the work: one for each data connection, and for copies as many as
the machine has cores. They are the same threads for all transfers of a process (`memory.threads`).
"""

from __future__ import annotations

import queue
from collections.abc import Callable
from contextlib import suppress

from torchrelay.errors import ResourceError
from torchrelay.memory import threads


class Workers:
    """Runs jobs in the order they come, on at most `most` threads. `report` takes the fault of a
    job that fails."""

    def __init__(self, most: int, report: Callable[[object], None]) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._most, self._report = most, report
        self._running: list[threads.Running] = []

    def submit(self, job: Callable[[], object]) -> None:
        self._jobs.put(job)
        if len(self._running) < self._most:
            try:
                threads.run(self._run, "worker", among=self._running)
            except ResourceError:
                self._running.pop()
                if not self._running:
                    self._jobs.get_nowait()
                    self._do(job)

    def stop(self) -> None:
        """Drop what has not begun; returns when no job runs any more."""
        with suppress(queue.Empty):
            while True:
                self._jobs.get_nowait()
        self._jobs.put(None)
        for running in self._running:
            if not running.here:
                running.end()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            self._do(job)
            del job
        self._jobs.put(None)  # for the others

    def _do(self, job: Callable[[], object]) -> None:
        try:
            job()
        except Exception as fault:
            self._report(fault)
