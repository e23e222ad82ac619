"""Progress of a transfer, a save or a load."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import NamedTuple

from torchrelay.errors import UsageError


class Progress(NamedTuple):
    """Bytes sent, received or checked so far, and their total."""

    done: int
    total: int


ProgressCallback = Callable[[Progress], None]


def reporter(progress: ProgressCallback | None) -> Callable[[int, int], None]:
    """Reports of several threads, for the caller's progress function: it is called by one thread at
    a time, and `done` never falls: bytes that are fetched again are not shown twice."""
    show = _checked(progress)
    if show is None:
        return untold
    lock, most = threading.Lock(), 0

    def report(done: int, total: int) -> None:
        nonlocal most
        with lock:
            if done >= most:
                most = done
                show(Progress(done, total))

    return report


def _checked(progress: ProgressCallback | None) -> ProgressCallback | None:
    if progress is not None and not callable(progress):
        raise UsageError(f"progress is a function of a Progress, not {progress!r}")
    return progress


def untold(done: int, total: int) -> None:
    """A progress function that ignores its arguments."""


class Bar:
    """Bytes done of all, for the caller's progress function. Any thread may add to it; the function
    is called by one at a time."""

    def __init__(self, show: ProgressCallback | None, total: int = 0) -> None:
        self._show = _checked(show)
        self._lock = threading.Lock()
        self._done = 0
        self.total = total

    @property
    def is_shown(self) -> bool:
        return self._show is not None

    def add(self, nbytes: int) -> None:
        if self._show is not None:
            with self._lock:
                self._done += nbytes
                self._show(Progress(min(self._done, self.total), self.total))
