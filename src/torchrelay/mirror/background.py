"""Copies to a mirror, in the background of a job: a thread that waits for the process that copies.

mirroring.committed(step)     after each commit: returns at once
mirroring.retained                steps that retention leaves until they are copied
mirroring.forget({step})      before steps are removed
mirroring.close(seconds)      waits for the copy in progress, and for one that is owed
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

from torchrelay.deadlines import Stopwatch, wait_until_set
from torchrelay.errors import DamagedError, RelayError
from torchrelay.memory import threads
from torchrelay.metrics import Measurement
from torchrelay.mirror.client import MirrorProcess
from torchrelay.mirror.process import CopyRequest
from torchrelay.mirror.schedule import CopyEnd, CopySchedule
from torchrelay.pending import logger
from torchrelay.results import Outcome, Report

END_SECONDS = 2.0  # that the thread may take once the process was killed


class MirrorPlaces(NamedTuple):
    """The URLs of the steps and of their mirror; seconds without a byte after which a copy is given
    up."""

    root: str
    mirror: str
    timeout: float


class MirrorHooks(NamedTuple):
    """Calls to the owner of the steps around a copy, on the thread of the copies.

    `ignored`: steps of the mirror that count for nothing, since they are damaged. `copied` has the
    sizes of a step's files and the metrics of its save. `damaged`: a step is not what was saved.
    """

    measured: Callable[[int], Measurement]
    ignored: Callable[[], list[int]]
    copied: Callable[[int, Mapping[str, int], Mapping[str, float]], None]
    damaged: Callable[[int], None]


class Mirroring:
    """The copies of one checkpointer. `failures`: how many have failed."""

    def __init__(self, places: MirrorPlaces, every: int, hooks: MirrorHooks) -> None:
        self._places, self._hooks = places, hooks
        self._schedule = CopySchedule(every)
        self._process = MirrorProcess()
        self._lock = threading.Lock()
        self._running: threads.Running | None = None  # while there is something to copy
        self._over = threading.Event()  # set when the copy in progress is over
        self._cancelled = False  # whether its step is being removed
        self._ended = False
        self.failures = 0

    def restored(self, step: int) -> None:
        """The job begins with this step of the root or of the mirror. Never fails."""
        with self._lock:
            self._schedule.restored(step)
            self._begin()

    def committed(self, step: int, *, replaces: bool) -> None:
        """A step was committed, perhaps in place of another save of it. Never fails."""
        with self._lock:
            self._schedule.committed(step, replaces=replaces)
            self._begin()

    @property
    def retained(self) -> set[int]:
        """The steps that are to stay until they are copied."""
        with self._lock:
            return self._schedule.retained

    def forget(self, steps: set[int], seconds: float) -> None:
        """Copy none of these steps. A copy of one of them that is in progress is broken off."""
        with self._lock:
            over, self._cancelled = self._over, self._schedule.forget(steps)
            if self._cancelled:
                self._process.kill()
        if self._cancelled:
            wait_until_set(over, seconds)

    def _begin(self) -> None:
        """With the lock: have a thread copy what is due, unless one does."""
        if self._running is not None or self._ended:
            return
        step = self._schedule.next()
        if step is None:
            return
        try:
            self._running = threads.run(partial(self._run, step), "mirror")
        except RelayError as fault:  # no thread can be started
            self._schedule.ended(self._failed(step, fault))

    def _run(self, first: int) -> None:
        step: int | None = first
        while step is not None:
            end = self._copy(step)
            with self._lock:
                self._schedule.ended(end)
                self._over.set()
                self._over, self._cancelled = threading.Event(), False
                step = None if self._ended else self._schedule.next()
                if step is None:
                    self._running = None

    def _copy(self, step: int) -> CopyEnd:
        root, mirror, timeout = self._places
        request, watch = CopyRequest(root, mirror, step, self._hooks.ignored()), Stopwatch()
        with self._hooks.measured(step) as measured:
            try:
                with watch("copy"):
                    copied = self._process.copy(request, timeout)
                if copied is not None:
                    self._hooks.copied(step, copied.sizes, copied.metrics)
            except Exception as fault:
                if self._cancelled:
                    measured.end(None, skipped="the step is being removed")
                    return CopyEnd.DONE
                measured.end(None, fault)
                return self._failed(step, fault)
            if copied is None:
                measured.end(None, skipped="the step was removed or replaced meanwhile")
                return CopyEnd.DONE
            peers: dict[int | str, Outcome] = {f"{mirror}/step-{step}": Outcome(route="storage")}
            measured.end(Report(step, copied.written, watch.seconds, peers))
        return CopyEnd.DONE

    def _failed(self, step: int, fault: Exception) -> CopyEnd:
        """A step that is damaged stays so; any other may be copied at another time."""
        self.failures += 1
        logger.error("step %d was not copied to %s: %s", step, self._places.mirror, fault)
        if not isinstance(fault, DamagedError):
            return CopyEnd.FAILED
        self._hooks.damaged(step)
        return CopyEnd.DONE

    def detach_after_fork(self) -> None:
        """In a child of a fork: forget thread and process, which stay the parent's."""
        self._ended, self._running = True, None
        self._process.detach_after_fork()

    def close(self, seconds: float) -> None:
        """Wait for the copy in progress, and try once more to copy a step that is owed. After that
        time the copy is broken off: the next checkpointer continues it."""
        with self._lock:
            if self._ended:
                return
            self._schedule.close()
            self._begin()
            running = self._running
        over = False
        try:
            over = running is None or running.wait(seconds)
        finally:
            self._ended = True
            if not over and running is not None:
                logger.warning("a copy to %s was not over at the end", self._places.mirror)
                self._process.kill()
                running.wait(END_SECONDS)
            self._process.close()
