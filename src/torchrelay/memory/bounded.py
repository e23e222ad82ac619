"""Calls that may hang, such as system calls on a file system that does not answer, done on a thread
that can be left behind.

    steps = bounded(store.steps, deadline.left(), "list the steps", file=store.url)

What is left behind goes on when the storage answers again. So such a call must not touch what the
caller has back by then: it reads into memory of its own, and what follows it happens here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from torchrelay.errors import StorageTimeoutError
from torchrelay.memory import threads

Result = TypeVar("Result")


def bounded(
    act: Callable[[], Result], seconds: float, what: str, *, file: str | None = None
) -> Result:
    """Return what `act` returns, or raise what it raises, within `seconds`.

    `StorageTimeoutError` if that is not over by then: "cannot {what}: ...". A thread still does it.
    """
    results: list[Result] = []
    faults: list[BaseException] = []

    def work() -> None:
        try:
            results.append(act())
        except BaseException as fault:
            faults.append(fault)

    if seconds <= 0 or not _done(work, seconds):
        raise StorageTimeoutError(
            f"cannot {what}: no answer in {max(0.0, seconds):.3g} s, which was the time left. See "
            "whether the file system or service answers at all, or give a longer timeout",
            file=file,
        )
    if faults:
        raise faults.pop()
    return results.pop()


def _done(work: Callable[[], None], seconds: float) -> bool:
    try:
        running = threads.run(work, "storage")
    except RuntimeError:  # no thread can be started while the interpreter ends
        work()
        return True
    return running.wait(seconds)
