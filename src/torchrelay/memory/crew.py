"""Work shared out to a few threads. For work that lets other threads run: copies, hashes, I/O."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import TypeVar

from torchrelay.errors import ResourceError
from torchrelay.memory import threads

Task = TypeVar("Task")
Result = TypeVar("Result")


def share_out(tasks: Iterable[Task], hand: Callable[[], Callable[[Task], None]], most: int) -> None:
    """Do every task on at most `most` threads, the caller's among them; returns when all are done.

    `hand` is called once a thread and returns what does a task there. The first failure stops the
    others after the task they are at, and is raised.
    """
    todo = list(tasks)
    upcoming = iter(todo)
    lock = threading.Lock()
    failures: list[BaseException] = []

    def work() -> None:
        try:
            act = hand()
            while not failures:
                with lock:
                    task = next(upcoming, None)
                if task is None:
                    return
                act(task)
        except BaseException as fault:
            failures.append(fault)

    others: list[threads.Running] = []
    try:
        with suppress(ResourceError):  # fewer threads do it, or this one alone
            threads.get_ready(min(most, len(todo)) - 1)
            for _ in range(min(most, len(todo)) - 1):
                threads.run(work, "crew", among=others)
        work()
        for running in others:
            running.wait()
    except BaseException as fault:  # out of a signal handler
        failures.append(fault)
        threads.end_all(others)
        raise
    if failures:
        raise failures[0]


class Crew:
    """At most `most` tasks at once, whoever has them done. Its threads hold up no interpreter that
    ends, and it serves to the end: the executors of the standard library do neither."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._places = threading.Semaphore(most)

    def each(self, act: Callable[[Task], Result], tasks: Iterable[Task]) -> list[Result]:
        """The results of `act`, in order. The first failure is raised when no task is running."""
        todo = list(tasks)
        results: dict[int, Result] = {}

        def do(index: int) -> None:
            with self._places:
                results[index] = act(todo[index])

        share_out(range(len(todo)), lambda: do, self._most)
        return [results[index] for index in range(len(todo))]
