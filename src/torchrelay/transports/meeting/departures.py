"""Processes of this machine that something is kept of: noticed when one ends.

A process is known by its node id, which it made for its group and which no other one ever has.
Ranks and process numbers are given again. The number only serves to open a pidfd, by which the
kernel says that this process, and no later one of that number, has ended.
"""

from __future__ import annotations

import asyncio
import os
import threading
import weakref
from collections.abc import Callable
from functools import partial

from torchrelay.memory import threads
from torchrelay.transports.meeting.listener import listener_here


class Departures:
    """Calls `gone` with the node id of a process that was watched and has ended. Threads may share
    it. The calls come from a thread of their own."""

    def __init__(self, gone: Callable[[bytes], None]) -> None:
        self._gone = gone
        self._watched: dict[bytes, tuple[int, int]] = {}  # number and pidfd
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None

    def watch(self, process: bytes, pid: int) -> None:
        """Watch a process that says that this is its number. Call it before the number is checked:
        a process that ends in between is not mistaken for the next one of that number."""
        with self._lock:
            pid_before, fd_before = self._watched.get(process, (0, -1))
            if pid_before == pid:
                return
            try:
                fd = os.pidfd_open(pid)
            except OSError:  # there is none, or the kernel cannot watch it
                return
            self._watched[process] = pid, fd
            here = listener_here()
            self._loop = here.loop
            if fd_before >= 0:
                here.run(_unwatch, here.loop, fd_before)
            here.run(here.loop.add_reader, fd, _ended, here.loop, fd, weakref.ref(self), process)

    def watches(self, process: bytes) -> bool:
        """Whether a process is watched. One that has ended no longer is before `gone` is called."""
        with self._lock:
            return process in self._watched

    def _departed(self, process: bytes, fd: int) -> None:
        with self._lock:
            if self._watched.get(process, (0, -1))[1] != fd:
                return  # it was said to have another number since
            del self._watched[process]
        threads.run_anyway(partial(self._gone, process), "worker")

    def close(self) -> None:
        """Watch none any more."""
        with self._lock:
            watched, self._watched = list(self._watched.values()), {}
            for _, fd in watched:
                if self._loop is not None and not self._loop.is_closed():
                    self._loop.call_soon_threadsafe(_unwatch, self._loop, fd)

    def __del__(self) -> None:
        self.close()


# In the I/O thread. It refers to the watcher weakly, so that it does not keep one alive.


def _ended(
    loop: asyncio.AbstractEventLoop, fd: int, watcher: weakref.ref[Departures], process: bytes
) -> None:
    found = watcher()
    if found is not None:
        found._departed(process, fd)
    _unwatch(loop, fd)


def _unwatch(loop: asyncio.AbstractEventLoop, fd: int) -> None:
    if loop.remove_reader(fd):
        os.close(fd)
