"""A launcher of training workers on pretended hosts. As torchrun does, it ends all workers when one
dies, and starts all of them again.

Workers are forked off a process that has imported torch: a start takes a moment, not seconds.
"""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from multiprocessing import connection, get_context
from multiprocessing.context import ForkServerProcess
from typing import Any, NamedTuple

from torchrelay.demo import worker
from torchrelay.demo.worker import Plan, Post
from torchrelay.state.torch_private import SLOW_TO_IMPORT

END_SECONDS = 5.0  # that a worker may take to end once it has closed its connection

AHEAD = ["torchrelay.demo.worker", SLOW_TO_IMPORT]

_forks = get_context("forkserver")


def import_ahead() -> None:
    """Have workers forked off a process that has imported what they need. For programs that fork
    off nothing else, before the first start."""
    # numpy would start a thread for each core there. A process with threads is not safe to fork.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    # AdamW would import the second, which takes seconds.
    _forks.set_forkserver_preload(AHEAD)


class LaunchError(Exception):
    """The job did not come to its end in time, or failed again and again."""


class WorkerMessage(NamedTuple):
    """A message of a worker, with its time; `ended` if the worker's process has ended, with its
    exit code, which is -N after signal N."""

    rank: int
    word: str
    time: float
    value: Any


class Launcher:
    """Workers of one start after the other; `hosts` has the name of each worker's host."""

    def __init__(self, plan: Plan, hosts: list[str]) -> None:
        self._plan = plan
        self.hosts = hosts
        self.starts = 0
        self._processes: list[ForkServerProcess] = []
        self._placed: list[str] = []  # the host of each worker of this start
        self._ranks: dict[Any, int] = {}  # by connection, of the workers that have not ended
        self.keepers: dict[str, int] = {}  # by host

    def start(self) -> None:
        """Start a worker for each place."""
        self._placed = list(self.hosts)
        for rank, host in enumerate(self.hosts):
            ours, theirs = _forks.Pipe()
            post = Post(rank, len(self.hosts), host, self.starts)
            process = _forks.Process(target=worker.main, args=(theirs, self._plan, post))
            process.start()
            theirs.close()
            self._processes.append(process)
            self._ranks[ours] = rank
        self.starts += 1

    def receive(self, seconds: float) -> list[WorkerMessage]:
        """Messages of workers; waits for the first one at most `seconds`."""
        found = []
        ready: Any
        for ready in connection.wait(list(self._ranks), timeout=max(0.0, seconds)):
            rank = self._ranks[ready]
            try:
                word, when, value = ready.recv()
            except (EOFError, OSError):
                del self._ranks[ready]
                ready.close()
                self._processes[rank].join(END_SECONDS)
                code = self._processes[rank].exitcode
                found.append(WorkerMessage(rank, "ended", time.monotonic(), code))
                continue
            if word == "keeper":
                # `hosts` may be those of the next start already.
                self.keepers[self._placed[rank]] = value
            else:
                found.append(WorkerMessage(rank, word, when, value))
        return found

    def kill(self, rank: int, number: int | None = None) -> None:
        """Send a worker a signal: SIGKILL, if no other is given."""
        process = self._processes[rank]
        if process.pid is not None and process.is_alive():  # else another may have its number
            with suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL if number is None else number)

    def kill_keeper(self, host: str) -> None:
        if host in self.keepers:
            with suppress(ProcessLookupError):
                os.kill(self.keepers.pop(host), signal.SIGKILL)

    def lose_host(self, host: str) -> None:
        """All that runs on a host is gone at once."""
        for rank, name in enumerate(self.hosts):
            if name == host:
                self.kill(rank)
        self.kill_keeper(host)

    def stop(self) -> list[WorkerMessage]:
        """End all workers, as a launcher does when one of them has died; what they had still
        said."""
        for rank, process in enumerate(self._processes):
            self.kill(rank)
            process.join(10)
        found: list[WorkerMessage] = []
        while self._ranks:
            found += self.receive(1.0)
        self._processes = []
        return found

    def dismiss(self) -> None:
        """All are done: they may leave."""
        for conn in self._ranks:
            with suppress(OSError):
                conn.send("leave")
        for process in self._processes:
            process.join(5)
        self.stop()
