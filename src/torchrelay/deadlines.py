"""Deadlines. Every wait in a transfer asks one of these how long it may last."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from torchrelay.errors import RelayError, UsageError

TICK = 0.1  # seconds after which a wait that nobody wakes looks whether its call was cancelled
LOOK_UP = 0.5  # seconds: a signal that comes just before a wait begins does not end that wait


class InterruptedTransfer(RelayError):
    """The caller has given up on a call of its own. Peers are told; the caller raises the cause."""


TELLING = 0.25  # seconds that it may take to tell the other ranks
Timeout = float | timedelta  # seconds, or what torch's own calls take


def seconds_of(timeout: Timeout, name: str = "timeout") -> float:
    """The seconds of a timeout; `UsageError` unless it is a positive length of time."""
    seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)):
        raise UsageError(f"{name} is a number of seconds or a timedelta, not {timeout!r}")
    if not 0 < seconds < float("inf"):
        raise UsageError(f"{name} is a positive number of seconds, not {seconds}")
    return seconds


def wait_until_set(event: threading.Event, seconds: float | None = None) -> bool:
    """Whether an event comes within so many seconds, or at all. A user's interrupt is heard."""
    end = None if seconds is None else time.monotonic() + seconds
    while True:
        left = LOOK_UP if end is None else end - time.monotonic()
        if event.wait(max(0.0, min(left, LOOK_UP))):
            return True
        if left <= LOOK_UP and end is not None:
            return False


class Deadline:
    """A point in time that ends a whole call, or an end that comes before."""

    def __init__(self, timeout: Timeout) -> None:
        self._cause: BaseException | None = None
        self._waiting: list[queue.SimpleQueue[Any]] = []
        self.set(timeout)

    def set(self, timeout: Timeout) -> None:
        """Have it be so long from now."""
        self.seconds = seconds_of(timeout)
        self._end = time.monotonic() + self.seconds

    def left(self) -> float:
        return 0.0 if self._cause is not None else max(0.0, self._end - time.monotonic())

    def early(self) -> float:
        """Seconds left for something whose end other ranks are still to hear of."""
        return self.left() - min(TELLING, self.seconds / 16)

    def hasten(self, seconds: float) -> None:
        """End in so many seconds, if that is sooner."""
        self._end = min(self._end, time.monotonic() + seconds)

    @property
    def passed(self) -> bool:
        return self._cause is not None or time.monotonic() >= self._end

    @property
    def cancelled(self) -> bool:
        return self._cause is not None

    def cancel(self, cause: BaseException) -> None:
        """End the call now. Whoever waits at a queue that was named finds the news there."""
        self._cause = cause
        for one in list(self._waiting):
            one.put(_interrupted(cause))

    @contextmanager
    def wakes(self, waiting: queue.SimpleQueue[Any]) -> Iterator[None]:
        """Within: a cancelled call is told of at this queue, by an `InterruptedTransfer`."""
        self._waiting.append(waiting)
        try:
            if self._cause is not None:
                waiting.put(_interrupted(self._cause))
            yield
        finally:
            self._waiting.remove(waiting)


def _interrupted(cause: BaseException) -> InterruptedTransfer:
    return InterruptedTransfer(f"interrupted by {type(cause).__name__}")


class Stopwatch:
    """Seconds spent in each phase of a call; `phase` is the current one."""

    def __init__(self) -> None:
        self.phase = "start"
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        self.phase = phase
        begun = time.monotonic()
        try:
            yield
        finally:
            spent = time.monotonic() - begun
            self.seconds[phase] = self.seconds.get(phase, 0.0) + spent
