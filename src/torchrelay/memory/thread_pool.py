"""Tasks on a few threads. For tasks that release the interpreter: copies, hashes, I/O."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import TypeVar

from torchrelay.errors import ResourceError
from torchrelay.memory import threads

Task = TypeVar("Task")
Result = TypeVar("Result")


def run_on_threads(
    tasks: Iterable[Task], make_worker: Callable[[], Callable[[Task], None]], most: int
) -> None:
    """Do every task on at most `most` threads, the caller's among them; returns when all are done.

    `make_worker` is called once per thread and returns the function that does a task there. The
    first failure stops the others after their present task, and is raised.
    """
    todo = list(tasks)
    upcoming = iter(todo)
    lock = threading.Lock()
    failures: list[BaseException] = []

    def work() -> None:
        try:
            act = make_worker()
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
                threads.run(work, "task", among=others)
        work()
        for running in others:
            running.wait()
    except BaseException as fault:  # out of a signal handler
        failures.append(fault)
        threads.end_all(others)
        raise
    if failures:
        raise failures[0]


class ThreadPool:
    """At most `most` tasks at once, whichever calls they belong to. Unlike the executors of the
    standard library it does not delay the end of the interpreter, and works until then."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._slots = threading.Semaphore(most)

    def each(self, act: Callable[[Task], Result], tasks: Iterable[Task]) -> list[Result]:
        """The results of `act`, in order. The first failure is raised when no task is running."""
        todo = list(tasks)
        results: dict[int, Result] = {}

        def do(index: int) -> None:
            with self._slots:
                results[index] = act(todo[index])

        run_on_threads(range(len(todo)), lambda: do, self._most)
        return [results[index] for index in range(len(todo))]
