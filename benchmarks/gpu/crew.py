"""Ranks that may fail, hang or die: each call tells how every one of them ended.

Unlike `harness.Ranks` these have environments of their own, and a rank that raises stays.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable
from contextlib import suppress
from datetime import timedelta
from multiprocessing import connection, get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

START = 60.0
"""Seconds for processes to import torch, find each other and set CUDA up."""


class Wrong(Exception):
    """What was promised does not hold; the text says what."""


class NotStarted(Exception):
    """A rank of a crew did not come up: the crew is of no use."""


class Me(NamedTuple):
    """What a function in a rank is told."""

    rank: int
    group: Any
    device: str


class Reply(NamedTuple):
    """How a call ended: "ok", "wrong", "error", "died" or "late"."""

    kind: str
    value: Any = None


class Crew:
    """`size` processes in a gloo group. `env`: what is set for a rank before it starts."""

    def __init__(
        self, size: int, device: str, env: dict[int, dict[str, str]] | None = None
    ) -> None:
        self.size = size
        self._scratch = tempfile.mkdtemp(prefix="torchrelay-crew-")
        self._conns: list[Connection] = []
        self._processes = []
        context = _context(device)
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_main, args=(theirs, rank, size, self._scratch, device), daemon=True
            )
            # torch reads some of it when it is imported: it must be there before that.
            before = dict(os.environ)
            os.environ.update((env or {}).get(rank, {}))
            try:
                process.start()
            finally:
                os.environ.clear()
                os.environ.update(before)
            theirs.close()
            self._conns.append(ours)
            self._processes.append(process)
        self._dead: set[int] = set()
        self._ready = False

    def wait_ready(self) -> None:
        if not self._ready:
            for rank, reply in self._replies(range(self.size), START).items():
                if reply.kind != "ok":
                    raise NotStarted(f"rank {rank} did not start: {reply.kind} {reply.value or ''}")
            self._ready = True

    @property
    def pids(self) -> list[int]:
        return [process.pid or 0 for process in self._processes]

    def call(
        self, fn: Callable[..., Any], *args: Any, ranks: Iterable[int], limit: float
    ) -> dict[int, Reply]:
        """Run a module-level `fn(me, *args)` in some ranks; how each ended, within `limit`."""
        self.wait_ready()
        chosen = [rank for rank in ranks if rank not in self._dead]
        for rank in chosen:
            with suppress(OSError):
                self._conns[rank].send((fn, args))
        return self._replies(chosen, limit)

    def _replies(self, ranks: Iterable[int], limit: float) -> dict[int, Reply]:
        deadline = time.monotonic() + limit
        waiting = {self._conns[rank]: rank for rank in ranks}
        found: dict[int, Reply] = {}
        while waiting:
            ready = connection.wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                found.update(dict.fromkeys(waiting.values(), Reply("late")))
                break
            for conn in ready:
                rank = waiting.pop(conn)
                try:
                    found[rank] = conn.recv()
                except (EOFError, OSError):
                    found[rank] = Reply("died")
                    self._dead.add(rank)
        return found

    def close(self) -> None:
        for conn in self._conns:
            with suppress(OSError):
                conn.send(None)
        ends = time.monotonic() + 2
        for process in self._processes:
            process.join(max(0.0, ends - time.monotonic()))
            process.kill()
            process.join(5)
        shutil.rmtree(self._scratch, ignore_errors=True)


def _context(device: str) -> Any:
    if device != "cpu":
        return get_context("spawn")
    # Nothing that a fork would break, and no environment of their own: torch is imported once.
    context = get_context("forkserver")
    context.set_forkserver_preload(["benchmarks.gpu.scenes", "benchmarks.harness"])
    return context


def _main(conn: Connection, rank: int, size: int, scratch: str, device: str) -> None:
    with suppress(OSError):  # if memory runs out, it is the test that ends, not others
        Path("/proc/self/oom_score_adj").write_text("500")
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{Path(scratch) / 'store'}",
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=START),
        )
        if device != "cpu" and torch.cuda.is_available():
            torch.zeros(1, device=device)  # the context is there before memory is measured
            torch.cuda.synchronize()
        me = Me(rank, dist.group.WORLD, device)
        conn.send(Reply("ok"))
        while (call := conn.recv()) is not None:
            conn.send(_reply(me, *call))
    except EOFError:
        pass  # the parent is gone
    except BaseException:
        with suppress(OSError):
            conn.send(Reply("error", traceback.format_exc(limit=-4)))
    os._exit(0)


def _reply(me: Me, fn: Callable[..., Any], args: tuple[Any, ...]) -> Reply:
    try:
        return Reply("ok", fn(me, *args))
    except Wrong as fault:
        return Reply("wrong", str(fault))
    except Exception:
        return Reply("error", traceback.format_exc(limit=-4))
