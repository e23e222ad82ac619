"""Threads that are used again.

Starting one takes a fifth of a millisecond, and several where every core is busy: the new thread
waits for its turn there, and whoever starts it waits with it. A transfer needs about ten.

A process may have no more threads, and an interpreter that ends starts none. Every start of one
says so by `ResourceError`.
"""

from __future__ import annotations

import os
import queue
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress

from torchrelay.deadlines import wait_until_set
from torchrelay.errors import ResourceError
from torchrelay.system import in_child

KEPT_SECONDS = 60.0  # that a thread waits for more to do before it ends
IDLE = "torchrelay-idle"

# By niceness: a thread cannot get its priority back. Without a lock, which an exception out of a
# signal handler could leave locked: each use is one call.
_idle: dict[int, deque[_Thread]] = {}


def _idle_of(niceness: int) -> deque[_Thread]:
    """The idle threads of a niceness: the same for all who ask at once, also where no lock of the
    interpreter has them ask one after the other."""
    return _idle.setdefault(niceness, deque())


class Running:
    """Something that runs on a thread."""

    def __init__(self) -> None:
        self._claim = threading.Lock()  # taken by its thread, or by who ends it before it begins
        self._over = threading.Event()
        self._thread = 0

    @property
    def here(self) -> bool:
        """Whether it is what the calling thread runs."""
        return threading.get_ident() == self._thread

    def wait(self, seconds: float | None = None) -> bool:
        """Wait until it is over, or for so long; whether it is."""
        return wait_until_set(self._over, seconds)

    def end(self) -> None:
        """Return when it is over. If it has not begun, it never does."""
        if self._claim.acquire(blocking=False):
            self._over.set()
        self.wait()


def run(
    target: Callable[[], object],
    name: str,
    niceness: int = 0,
    among: list[Running] | None = None,
) -> Running:
    """Have a daemon thread call `target` at once. An exception is printed, and goes no further.

    `among` has it before it begins, so that an exception out of a signal handler loses none:
    whoever gives up ends all of them. `ResourceError` if none can be started: it never begins
    then, and whoever waits for it sees it over.
    """
    running = Running()
    if among is not None:
        among.append(running)
    try:
        thread = _idle_of(niceness).pop()
    except IndexError:
        try:
            thread = _Thread(niceness)
        except BaseException:
            running.end()
            raise
    thread.jobs.put((target, f"torchrelay-{name}", running))
    return running


def run_anyway(target: Callable[[], object], name: str) -> Running:
    """`run`; where none can be started, the calling thread does it, and raises its exception."""
    try:
        return run(target, name)
    except ResourceError:
        running = Running()
        running._claim.acquire()
        try:
            target()
        finally:
            running._over.set()
        return running


def start(target: Callable[[], object], name: str) -> threading.Thread:
    """Start a daemon thread that is used once. `ResourceError` if it cannot be started."""
    thread = threading.Thread(target=target, name=f"torchrelay-{name}", daemon=True)
    begin(thread)
    return thread


def begin(thread: threading.Thread) -> None:
    """Start a thread that was made. `ResourceError` if it cannot be started."""
    try:
        thread.start()
    except RuntimeError as fault:
        raise ResourceError(
            f"cannot start a thread: {fault}. Raise the limit of processes and threads (ulimit -u, "
            "pids.max of the control group) or of memory (ulimit -v), or end some"
        ) from fault


def end_all(begun: Iterable[Running]) -> None:
    """Return when all are over, or will never begin. Another exception does not change that."""
    try:
        for running in begun:
            running.end()
    except BaseException:
        end_all(begun)


def get_ready(count: int) -> None:
    """Start threads until `count` of them wait for a job. A thread that starts while others are
    busy would wait for each of them in turn."""
    idle = _idle_of(0)
    for _ in range(count - len(idle)):
        idle.append(_Thread(0))


class _Thread:
    def __init__(self, niceness: int) -> None:
        self.jobs: queue.SimpleQueue[tuple[Callable[[], object], str, Running]]
        self.jobs = queue.SimpleQueue()
        self._niceness = niceness
        begin(threading.Thread(target=self._serve, name=IDLE, daemon=True))

    def _serve(self) -> None:
        me = threading.current_thread()
        if self._niceness:
            # A process of another system, or in a sandbox, may not change priorities; nothing is
            # lost.
            with suppress(OSError, AttributeError):
                nice = os.getpriority(os.PRIO_PROCESS, 0) + self._niceness
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), nice)
        while True:
            try:
                target, me.name, running = self.jobs.get(timeout=KEPT_SECONDS)
            except queue.Empty:
                if self._leave():
                    return
                continue
            running._thread = threading.get_ident()
            try:
                if running._claim.acquire(blocking=False):
                    target()
            except BaseException:
                threading.excepthook(threading.ExceptHookArgs((*sys.exc_info(), me)))
            del target  # nothing of it is kept alive when it is over
            running._over.set()
            del running
            me.name = IDLE
            _idle_of(self._niceness).append(self)

    def _leave(self) -> bool:
        """True if the thread was still idle; it takes no more jobs then."""
        try:
            _idle_of(self._niceness).remove(self)
        except ValueError:
            return False
        return True


def _forget() -> None:
    """In a child process, which has none of the threads."""
    _idle.clear()


in_child(_forget)
