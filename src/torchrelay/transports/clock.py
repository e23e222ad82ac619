"""Deadlines. Every wait in a transfer asks one of these how long it may last."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from torchrelay.errors import UsageError


class Deadline:
    """A point in time that ends a whole call."""

    def __init__(self, seconds: float) -> None:
        if not 0 < seconds < float("inf"):
            raise UsageError(f"timeout is a positive number of seconds, not {seconds}")
        self.seconds = seconds
        self._end = time.monotonic() + seconds

    def left(self) -> float:
        return max(0.0, self._end - time.monotonic())

    def hasten(self, seconds: float) -> None:
        """End in so many seconds, if that is sooner."""
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
