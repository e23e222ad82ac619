"""Run functions in real spawned processes that are ranks of a process group.

A function is module-level, takes `(rank, group, *args)` and returns something plain that pickles.

    run_ranks(fn, 2, state)              one call, one list of results
    with Ranks(fn, 2, state) as ranks:   the same with hands on: kill, stop, phases
    RankPool(2).run(fn, state)           workers stay, calls follow one another (fast)

Children of the first two are forks of a server that has torch imported. So is the first of a pool;
the others are, unless told otherwise, interpreters of their own, so that no two have one hash seed.
They rendezvous over a file, open no fixed port, and go away when their parent does. A child that
has reported stays until every result is in, so that its connections do not break under the others.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import os
import pickle
import queue
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing import connection, get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.support.forks import servers, take_environment

FAILURE_GRACE = 3.0
"""Seconds the other ranks get to report once one has failed."""
HOLD_SECONDS = 30.0
"""How long `reached(..., hold=True)` waits for the parent's release."""
START_SECONDS = 100.0
"""How long the workers of a pool may take to form their group."""
STOP_SECONDS = 10.0
"""How long the kernel may take to stop a process."""


class RankFailed(Exception):
    """A rank raised, or died without leave. `failures`: a text for each, the first one first."""

    def __init__(self, message: str, failures: Mapping[int, str]) -> None:
        super().__init__(message)
        self.failures = dict(failures)


class RanksTimedOut(TimeoutError):
    """Ranks did not finish in time and were killed: `running`, and in `stacks` where they hung."""

    def __init__(self, message: str, running: list[int], stacks: Mapping[int, str]) -> None:
        super().__init__(message)
        self.running = running
        self.stacks = dict(stacks)


class _KilledType:
    def __repr__(self) -> str:
        return "Killed"


Killed = _KilledType()
"""Stands in the results for a rank that died of SIGKILL, as the test wanted."""


@dataclass(frozen=True)
class Exited:
    """Stands in the results for a rank that left with an exit code named in `expect_exit`."""

    code: int


# In the child -----------------------------------------------------------------------------------


class _Channel:
    """The child's end of its pipe: messages of any thread go out, the parent's come in."""

    def __init__(self, conn: Connection) -> None:
        self._conn = conn
        self._sending = threading.Lock()
        self.released = threading.Semaphore(0)
        self.calls: queue.SimpleQueue[tuple[Any, ...] | None] = queue.SimpleQueue()
        threading.Thread(target=self._receive, name="ranks-control", daemon=True).start()

    def send(self, *message: Any) -> None:
        data = pickle.dumps(message)
        with self._sending:
            self._conn.send_bytes(data)

    def _receive(self) -> None:
        while True:
            try:
                kind, *rest = pickle.loads(self._conn.recv_bytes())
            except (EOFError, OSError):
                os._exit(3)  # the parent is gone
            if kind == "release":
                self.released.release()
            else:
                self.calls.put(tuple(rest) if kind == "run" else None)


_channel: _Channel | None = None


def reached(phase: str, *, hold: bool = False) -> None:
    """Called in a rank: tell the parent of `phase`; with `hold`, wait until it releases us."""
    if _channel is None:
        raise RuntimeError("reached() is for functions that run as a rank")
    _channel.send("reached", phase)
    if hold and not _channel.released.acquire(timeout=HOLD_SECONDS):
        raise TimeoutError(f"phase {phase!r} was not released within {HOLD_SECONDS:.0f} s")


def tell(value: Any) -> None:
    """Called in a rank that may not return: let the parent have something before."""
    if _channel is None:
        raise RuntimeError("tell() is for functions that run as a rank")
    _channel.send("told", value)


def _leave(code: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # a blocked thread cannot hold up or abort interpreter shutdown


def _share_a_device() -> None:
    """Have the groups of this process use one device of gloo, and not each its own.

    A device is a thread that wakes up a hundred times a second. Workers that stay make groups by
    the hundred, for the meshes of their calls, and torch's caches keep groups: those of a few
    workers that nobody used took half a core from the tests that followed.
    """
    stock = dist.ProcessGroupGloo.__init__
    shared: list[Any] = []

    def init(
        self: Any,
        store: Any,
        rank: int,
        size: int,
        timeout: Any = timedelta(minutes=30),
        **named: Any,
    ) -> None:
        if isinstance(timeout, timedelta):
            if not shared:
                shared.append(dist.ProcessGroupGloo.create_default_device())
            options = dist.ProcessGroupGloo._Options()
            options._devices, options._timeout = shared, timeout
            # Later releases pass more, which belongs to the options here.
            for name, value in named.items():
                if hasattr(options, name):
                    setattr(options, name, value)
            stock(self, store, rank, size, options)
        else:
            stock(self, store, rank, size, timeout, **named)

    dist.ProcessGroupGloo.__init__ = init  # type: ignore[method-assign]


def _child_main(
    conn: Connection,
    rank: int,
    world_size: int,
    scratch: str,
    backend: str,
    group_timeout: float,
    environment: dict[str, str],
    stays: bool,
) -> None:
    global _channel
    take_environment(environment)
    stacks = open(_stack_file(scratch, rank), "w")  # noqa: SIM115 - open for the process's life
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    channel = _channel = _Channel(conn)
    try:
        torch.set_num_threads(1)
        importlib.import_module("tests.support.preloaded")  # a fork has it; not a call's time
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        if stays:
            _share_a_device()
        dist.init_process_group(
            backend,
            store=dist.FileStore(str(Path(scratch) / "store"), world_size),
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=group_timeout),
        )
        channel.send("ready")
        spare: dist.ProcessGroup | None = None
        while (call := channel.calls.get()) is not None:
            payload, fresh, fresh_timeout = call
            if spare is not None:  # every rank is done with it: calls do not overlap
                dist.destroy_process_group(spare)
                spare = None
            group = dist.group.WORLD
            if fresh:
                group = spare = dist.new_group(timeout=timedelta(seconds=fresh_timeout))
            fn, args = pickle.loads(payload)
            channel.send("done", fn(rank, group, *args))
    except BaseException:
        text = traceback.format_exc()
        print(f"rank {rank} failed:\n{text}", file=sys.stderr, flush=True)
        channel.send("failed", text)
        _leave(1)
    _leave(0)


def _stack_file(scratch: str, rank: int) -> Path:
    return Path(scratch) / f"stack-{rank}"


# In the parent ----------------------------------------------------------------------------------


@dataclass
class _Worker:
    rank: int
    process: BaseProcess
    conn: Connection
    ready: bool = False
    done: bool = False
    value: Any = None
    failure: str | None = None
    gone: bool = False
    phases: list[str] = field(default_factory=list)
    told: list[Any] = field(default_factory=list)

    @property
    def settled(self) -> bool:
        return self.done or self.failure is not None

    def send(self, *message: Any) -> None:
        with contextlib.suppress(OSError):  # a dead child is found out by its sentinel
            self.conn.send_bytes(pickle.dumps(message))

    def signal(self, number: int) -> None:
        if self.process.is_alive() and self.process.pid is not None:
            with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
                os.kill(self.process.pid, number)


class _Workers:
    """Spawned ranks and what they have reported. Knows nothing of why they were spawned."""

    def __init__(
        self,
        world_size: int,
        *,
        backend: str,
        group_timeout: float,
        expect_killed: Collection[int] = (),
        expect_exit: Mapping[int, int] | None = None,
        forks: bool = True,
        stay: bool = False,
    ) -> None:
        self.expect_killed = set(expect_killed)
        self.expect_exit = dict(expect_exit or {})
        self.scratch = tempfile.mkdtemp(prefix="ranks-")
        self.workers: list[_Worker] = []
        self._failed_order: list[int] = []
        common = world_size, self.scratch, backend, group_timeout, dict(os.environ), stay
        try:
            for rank in range(world_size):
                context = servers if forks or rank == 0 else get_context("spawn")
                ours, theirs = context.Pipe(duplex=True)
                process = context.Process(
                    target=_child_main,
                    args=(theirs, rank, *common),
                    name=f"rank-{rank}",
                    daemon=True,
                )
                self.workers.append(_Worker(rank, process, ours))
                process.start()
                theirs.close()
        except BaseException:
            self.close()
            raise

    def form(self, timeout: float) -> None:
        """Wait until every rank is in the group, or has failed to be."""

        def started() -> bool:
            return all(w.ready or w.settled for w in self.workers)

        if not self.pump(started, time.monotonic() + timeout):
            running = [w.rank for w in self.workers if not w.ready]
            stacks = self.kill_with_stacks(running)
            raise RanksTimedOut(f"ranks {running} did not form a group", running, stacks)

    def submit(self, payload: bytes, fresh: bool, fresh_timeout: float) -> None:
        for worker in self.workers:
            worker.done, worker.value = False, None
            worker.phases.clear()
            worker.send("run", payload, fresh, fresh_timeout)

    def pump(self, until: Callable[[], bool], deadline: float) -> bool:
        """Take in reports until `until()` holds or the deadline passes; return whether it held."""
        while not until():
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                return False
            watched: dict[Any, _Worker] = {}
            for worker in self.workers:
                if not worker.gone:
                    watched[worker.conn] = worker
                    watched[worker.process.sentinel] = worker
            if not watched:
                return until()
            for ready in connection.wait(list(watched), timeout=remaining):
                self._take(watched[ready])
        return True

    def _take(self, worker: _Worker) -> None:
        if worker.gone:
            return
        try:
            while worker.conn.poll():
                self._note(worker, *pickle.loads(worker.conn.recv_bytes()))
        except (EOFError, OSError):
            worker.process.join(5)
        if worker.process.exitcode is not None:
            # What it wrote before it died may have arrived after the poll above.
            with contextlib.suppress(EOFError, OSError):
                while worker.conn.poll():
                    self._note(worker, *pickle.loads(worker.conn.recv_bytes()))
            worker.gone = True
            if not worker.settled:
                self._note_death(worker, worker.process.exitcode)

    def _note(self, worker: _Worker, kind: str, *rest: Any) -> None:
        if kind == "ready":
            worker.ready = True
        elif kind == "reached":
            worker.phases.append(rest[0])
        elif kind == "told":
            worker.told.append(rest[0])
        elif kind == "done":
            worker.done, worker.value = True, rest[0]
        elif kind == "failed":
            self._fail(worker, rest[0])

    def _note_death(self, worker: _Worker, code: int) -> None:
        if code == -signal.SIGKILL and worker.rank in self.expect_killed:
            worker.done, worker.value = True, Killed
        elif self.expect_exit.get(worker.rank) == code:
            worker.done, worker.value = True, Exited(code)
        else:
            how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
            self._fail(worker, f"died with {how} before it reported a result\n")

    def _fail(self, worker: _Worker, text: str) -> None:
        worker.failure = text
        self._failed_order.append(worker.rank)

    def collect(self, ranks: Iterable[int], deadline: float, what: str) -> list[Any]:
        """Results of `ranks`. Raises, with every child killed, if one fails or is late."""
        chosen = [self.workers[rank] for rank in ranks]

        def finished() -> bool:
            return all(w.settled for w in chosen) or any(w.failure is not None for w in chosen)

        if not self.pump(finished, deadline):
            running = [w.rank for w in chosen if not w.settled]
            stacks = self.kill_with_stacks(running)
            done = [w.rank for w in chosen if w.done]
            raise RanksTimedOut(
                f"{what}: ranks {running} were still running at the deadline (finished: {done})"
                + "".join(f"\n--- rank {r} was at\n{text}" for r, text in stacks.items()),
                running,
                stacks,
            )
        if any(w.failure is not None for w in chosen):
            grace = time.monotonic() + FAILURE_GRACE
            self.pump(lambda: all(w.settled for w in chosen), grace)
            stacks = self.kill_with_stacks([w.rank for w in chosen if not w.settled])
            failures = {r: self.workers[r].failure or "" for r in self._failed_order}
            raise RankFailed(
                f"{what}: ranks {list(failures)} failed"
                + "".join(f"\n--- rank {r}\n{text}" for r, text in failures.items())
                + "".join(f"\n--- rank {r} was still at\n{text}" for r, text in stacks.items()),
                failures,
            )
        return [w.value for w in chosen]

    def kill_with_stacks(self, ranks: list[int]) -> dict[int, str]:
        """Kill every child; return where each of `ranks` was."""
        for rank in ranks:
            self.workers[rank].signal(signal.SIGUSR1)
        if ranks:
            time.sleep(0.3)  # the dump is written by a signal handler; a stopped child writes none
        for worker in self.workers:
            worker.signal(signal.SIGKILL)
        stacks = {}
        for rank in ranks:
            path = _stack_file(self.scratch, rank)
            text = path.read_text(errors="replace") if path.exists() else ""
            stacks[rank] = text or "(no stack: stopped, or not started yet)\n"
        return stacks

    def close(self) -> None:
        for worker in self.workers:
            if worker.done:
                worker.send("leave")
        deadline = time.monotonic() + 2
        for worker in self.workers:
            if worker.process.pid is None:
                continue
            if worker.done:
                worker.process.join(max(0.0, deadline - time.monotonic()))
            worker.signal(signal.SIGKILL)
            worker.process.join(10)
            worker.conn.close()
        shutil.rmtree(self.scratch, ignore_errors=True)


def state_of(pid: int) -> str:
    """The kernel's letter for what a process does: T is stopped, Z is over, X is gone."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/stat") as stat:
        return stat.read().rsplit(")", 1)[1].split()[0]
    return "X"


def wait_until_stopped(pid: int) -> None:
    """Wait until a process that got SIGSTOP stands still, whoever's child it is."""
    deadline = time.monotonic() + STOP_SECONDS
    while state_of(pid) not in "TZX":
        if time.monotonic() > deadline:
            raise TimeoutError(f"process {pid} does not stop")
        time.sleep(0.001)


def _name(fn: Callable[..., Any]) -> str:
    return getattr(fn, "__qualname__", repr(fn))


class Ranks:
    """`fn(rank, group, *args)` running in `world_size` processes while the test interferes.

    Use as a context manager; on leaving, every child still alive is killed. A rank killed by `kill`
    counts as killed on purpose.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        world_size: int,
        *args: Any,
        backend: str = "gloo",
        group_timeout: float = 60,
        expect_killed: Collection[int] = (),
        expect_exit: Mapping[int, int] | None = None,
    ) -> None:
        self._what = _name(fn)
        payload = pickle.dumps((fn, args))
        self._set = _Workers(
            world_size,
            backend=backend,
            group_timeout=group_timeout,
            expect_killed=expect_killed,
            expect_exit=expect_exit,
        )
        try:
            self._set.form(START_SECONDS)  # a rank that leaves early would fail the others' start
            self._set.submit(payload, False, group_timeout)
        except BaseException:
            self._set.close()
            raise

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        self._set.close()

    @property
    def processes(self) -> list[BaseProcess]:
        """The child of each rank; `processes[rank].pid` is its process id."""
        return [w.process for w in self._set.workers]

    def kill(self, rank: int) -> None:
        """SIGKILL, and wait until the process is gone."""
        self._set.expect_killed.add(rank)
        self._set.workers[rank].signal(signal.SIGKILL)
        self.processes[rank].join(10)

    def stop(self, rank: int) -> None:
        """SIGSTOP, and wait until the process stands still."""
        worker = self._set.workers[rank]
        worker.signal(signal.SIGSTOP)
        if worker.process.pid is not None:
            wait_until_stopped(worker.process.pid)

    def cont(self, rank: int) -> None:
        """SIGCONT."""
        self._set.workers[rank].signal(signal.SIGCONT)

    def wait_reached(self, rank: int, phase: str, timeout: float = 30) -> None:
        """Wait until `rank` has called `reached(phase)`; each call there serves one wait here."""
        worker = self._set.workers[rank]

        def seen() -> bool:
            return phase in worker.phases or worker.settled

        if not self._set.pump(seen, time.monotonic() + timeout):
            stacks = self._set.kill_with_stacks([rank])
            raise RanksTimedOut(
                f"{self._what}: rank {rank} did not reach {phase!r} in {timeout} s\n{stacks[rank]}",
                [rank],
                stacks,
            )
        if phase in worker.phases:
            worker.phases.remove(phase)
            return
        why = worker.failure or f"it finished with {worker.value!r}"
        raise RankFailed(f"{self._what}: rank {rank} never reached {phase!r}: {why}", {rank: why})

    def told(self, rank: int) -> list[Any]:
        """What `rank` has said by `tell`, as far as it is known here."""
        return self._set.workers[rank].told

    def release(self, rank: int) -> None:
        """Let `rank` go on from a `reached(..., hold=True)`."""
        self._set.workers[rank].send("release")

    def results(self, timeout: float = 60, ranks: Iterable[int] | None = None) -> list[Any]:
        """Results of all ranks, or of `ranks` in that order (others may be stopped or stuck)."""
        chosen = range(len(self._set.workers)) if ranks is None else ranks
        return self._set.collect(chosen, time.monotonic() + timeout, self._what)


def run_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float = 60,
    backend: str = "gloo",
    group_timeout: float = 60,
    expect_killed: Collection[int] = (),
    expect_exit: Mapping[int, int] | None = None,
) -> list[Any]:
    """Run `fn(rank, group, *args)` in `world_size` new processes; return its results by rank.

    `timeout` covers the start of the processes too (seconds each, on a small machine). A rank in
    `expect_killed` may die of SIGKILL: its result is `Killed`. A rank in `expect_exit` may leave
    with that code: its result is `Exited(code)`.
    """
    deadline = time.monotonic() + timeout
    with Ranks(
        fn,
        world_size,
        *args,
        backend=backend,
        group_timeout=group_timeout,
        expect_killed=expect_killed,
        expect_exit=expect_exit,
    ) as ranks:
        return ranks.results(deadline - time.monotonic())


class RankPool:
    """Ranks that stay: spawned at the first `run`, and again after a call that failed."""

    def __init__(
        self,
        world_size: int,
        *,
        backend: str = "gloo",
        group_timeout: float = 60,
        forks: bool = False,
    ) -> None:
        self.world_size = world_size
        self._forks = forks
        self._backend = backend
        self._group_timeout = group_timeout
        self._set: _Workers | None = None

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the workers; a later `run` spawns new ones."""
        if self._set is not None:
            self._set.close()
            self._set = None

    def run(
        self,
        fn: Callable[..., Any],
        *args: Any,
        timeout: float = 30,
        fresh_group: bool = False,
        group_timeout: float | None = None,
    ) -> list[Any]:
        """Run `fn(rank, group, *args)` on every worker; return its results by rank.

        `fresh_group` gives this call a group of its own, for calls that leave messages unmatched;
        naming a `group_timeout` does so too. `timeout` does not count the start of the workers.
        After a failure or a timeout the workers are replaced.
        """
        payload = pickle.dumps((fn, args))
        try:
            workers = self._ready()
            fresh_timeout = self._group_timeout if group_timeout is None else group_timeout
            workers.submit(payload, fresh_group or group_timeout is not None, fresh_timeout)
            return workers.collect(range(self.world_size), time.monotonic() + timeout, _name(fn))
        except BaseException:
            self.close()
            raise

    def _ready(self) -> _Workers:
        if self._set is not None:
            if all(w.process.is_alive() for w in self._set.workers):
                return self._set
            self.close()
        workers = self._set = _Workers(
            self.world_size,
            backend=self._backend,
            group_timeout=self._group_timeout,
            forks=self._forks,
            stay=True,
        )
        workers.form(START_SECONDS)
        return workers
