"""Deadlines. Every wait in a transfer asks one of these how long it may last."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

from torchrelay.errors import UsageError

TICK = 0.1  # seconds after which a wait that is not woken checks again
LOOK_UP = 0.5  # seconds: a signal that comes just before a wait begins does not end that wait
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
    """True if the event is set within `seconds`; without them, waits for as long as it takes. A
    user's interrupt ends the wait."""
    end = None if seconds is None else time.monotonic() + seconds
    while True:
        left = LOOK_UP if end is None else end - time.monotonic()
        if event.wait(max(0.0, min(left, LOOK_UP))):
            return True
        if left <= LOOK_UP and end is not None:
            return False


class Deadline:
    """A point in time that ends a whole call."""

    def __init__(self, timeout: Timeout) -> None:
        self.seconds = seconds_of(timeout)
        self._end = time.monotonic() + self.seconds

    def left(self) -> float:
        return max(0.0, self._end - time.monotonic())

    def early(self) -> float:
        """Seconds left for something whose end other ranks are still to hear of."""
        return self.left() - min(TELLING, self.seconds / 16)

    def hasten(self, seconds: float) -> None:
        """End `seconds` from now, if that is sooner."""
        self._end = min(self._end, time.monotonic() + seconds)

    @property
    def passed(self) -> bool:
        return time.monotonic() >= self._end


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
