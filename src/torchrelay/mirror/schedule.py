"""Which step is copied to a mirror next. Pure.

| state   | event                                   | next                                      |
|---------|-----------------------------------------|-------------------------------------------|
| IDLE    | a step is due                           | COPYING it                                |
| COPYING | a step is due                           | COPYING; it waits, in place of another    |
| COPYING | the copy ends, and a step waits         | COPYING the step that waits               |
| COPYING | the copy ends, and none waits           | IDLE                                      |
| COPYING | the copy fails, and a step waits        | COPYING the step that waits               |
| COPYING | the copy fails, and none waits          | OWING its step                            |
| OWING   | a step is committed, due or not         | COPYING that step                         |
| OWING   | the checkpointer is closed              | COPYING its step, for the last time       |

The first step that is committed or restored is due, and then every n-th that is committed. With
n = 3, where the mirror takes as long as two saves and is away for a moment:

    committed    1    2    3    4    5    6    7    8
    due          1              4              7
    copied       1111           4 fails   5555 7777      5: the next step after a failure
"""

from __future__ import annotations

from enum import Enum


class CopyEnd(Enum):
    """How a copy ended."""

    DONE = "nothing is left to do for the step"
    FAILED = "it may be done at another time"


class CopySchedule:
    """The steps to copy of one checkpointer. Its caller has a lock."""

    def __init__(self, every: int) -> None:
        self._every = every
        self._count = 0  # steps since the start, the one that was restored among them
        self._copying: int | None = None
        self._waiting: int | None = None
        self._owed: int | None = None
        self._closed = False

    def restored(self, step: int) -> None:
        """The job begins with this step."""
        if not self._count:
            self.committed(step)

    def committed(self, step: int, *, replaces: bool = False) -> None:
        """`replaces`: in place of another save of the step, which the mirror may have."""
        if self._count % self._every == 0 or self._owed is not None or replaces:
            self._waiting, self._owed = step, None
        self._count += 1

    def next(self) -> int | None:
        """The step to copy now, until `ended`; None if there is none, or a copy is in progress."""
        if self._copying is not None:
            return None
        if self._waiting is None and self._closed:
            self._waiting, self._owed = self._owed, None
        self._copying, self._waiting = self._waiting, None
        return self._copying

    def ended(self, end: CopyEnd) -> None:
        step, self._copying = self._copying, None
        if end is CopyEnd.FAILED and self._waiting is None and not self._closed:
            self._owed = step

    def forget(self, steps: set[int]) -> bool:
        """These steps will be removed: copy none of them. Whether one is being copied."""
        if self._waiting in steps:
            self._waiting = None
        if self._owed in steps:
            self._owed = None
        return self._copying in steps

    def close(self) -> None:
        """No step is committed any more."""
        self._closed = True

    @property
    def retained(self) -> set[int]:
        """The steps that are to stay until they are copied."""
        found = (self._copying, self._waiting, self._owed)
        return {step for step in found if step is not None}
