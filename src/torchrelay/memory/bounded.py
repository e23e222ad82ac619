"""Calls that may hang, such as system calls on a file system that does not answer, done on a thread
that can be left behind.

    steps = bounded(store.steps, deadline.left(), "list the steps", file=store.url)

An abandoned call continues when the storage answers again. So it must not touch memory that the
caller has back by then: it reads into its own memory, and the caller's thread does the rest. A load
into the caller's tensors cannot do that; an event notifies it that the caller has left, and it
stops at the next piece.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from torchrelay.errors import ResourceError, StorageTimeoutError
from torchrelay.memory import threads

GRACE = 0.5  # seconds in which what was left behind may come to its next piece
Result = TypeVar("Result")


def bounded(
    act: Callable[[], Result],
    seconds: float,
    what: str,
    *,
    file: str | None = None,
    left: threading.Event | None = None,
) -> Result:
    """Return what `act` returns, or raise what it raises, within `seconds`.

    `StorageTimeoutError` if that is not over by then: "cannot {what}: ...". A thread still does it.
    `left` is set when it is left behind, also by an exception that comes up here meanwhile.
    """
    results: list[Result] = []
    faults: list[BaseException] = []

    def work() -> None:
        try:
            results.append(act())
        except BaseException as fault:
            faults.append(fault)

    if seconds <= 0 or not _done(work, seconds, left):
        raise StorageTimeoutError(
            f"cannot {what}: no answer in {max(0.0, seconds):.3g} s, which was the time left. See "
            "whether the file system or service answers at all, or give a longer timeout",
            file=file,
        )
    if faults:
        raise faults.pop()
    return results.pop()


def _done(work: Callable[[], None], seconds: float, left: threading.Event | None) -> bool:
    try:
        running = threads.run(work, "storage")
    except ResourceError:  # no thread can be started, as while the interpreter ends
        work()
        return True
    over = False
    try:
        over = running.wait(seconds)
    finally:
        if not over and left is not None:
            left.set()
            running.wait(GRACE)
    return over
