"""Spawned ranks that stay and run one call after another, and facts about the machine."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from multiprocessing import connection, get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import torchrelay
from benchmarks.versus import hush_torch

SECONDS = 120.0
"""That any one call may last."""


class RankFailed(Exception):
    """A rank raised, died or was late; the text tells which and where."""


class Ranks:
    """`size` processes in a gloo group, each with one torch thread.

    `parents`: they may have children of their own, and keep freed memory as torch does by default.
    """

    def __init__(self, size: int, *, parents: bool = False) -> None:
        self.size = size
        self.failed = False
        """Whether a call has failed: no other can follow then."""
        self._scratch = tempfile.mkdtemp(prefix="torchrelay-bench-")
        self._conns: list[Connection] = []
        self._processes = []
        # torch's allocator, where it is mimalloc, keeps what is freed and gives it back to the
        # system when other calls happen to remind it. Given back at once, new tensors are made in
        # new memory in every lap, whoever makes them. Read when a process starts.
        if not parents:
            os.environ.setdefault("MIMALLOC_PURGE_DELAY", "0")
        spawn = get_context("spawn")
        for rank in range(size):
            ours, theirs = spawn.Pipe()
            process = spawn.Process(
                target=_main, args=(theirs, rank, size, self._scratch), daemon=not parents
            )
            process.start()
            theirs.close()
            self._conns.append(ours)
            self._processes.append(process)

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, kind: object, *exc: object) -> None:
        self.close(2 if kind is None else 0)  # after a failure nobody listens

    def close(self, patience: float = 2) -> None:
        for conn in self._conns:
            with suppress(OSError):
                conn.send(None)
        for process in self._processes:
            process.join(patience)
            process.kill()
            process.join(5)
        shutil.rmtree(self._scratch, ignore_errors=True)

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes if process.pid is not None]

    def run(self, fn: Callable[..., Any], *args: Any, count: int | None = None) -> list[Any]:
        """What a module-level `fn(group, *args)` returns in each of the first `count` ranks.

        `group` is theirs alone; the other ranks stand by.
        """
        try:
            return self._run(fn, args, self.size if count is None else count)
        except RankFailed:
            self.failed = True
            raise

    def _run(self, fn: Callable[..., Any], args: tuple[Any, ...], chosen: int) -> list[Any]:
        for conn in self._conns:
            conn.send((chosen, fn, args))
        deadline = time.monotonic() + SECONDS
        results: dict[int, Any] = {}
        while len(results) < self.size:
            waiting = [conn for rank, conn in enumerate(self._conns) if rank not in results]
            ready = connection.wait(waiting, timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                late = [rank for rank in range(self.size) if rank not in results]
                raise RankFailed(f"{fn.__name__}: ranks {late} took over {SECONDS:.0f} s")
            for rank in [r for r, conn in enumerate(self._conns) if conn in ready]:
                try:
                    good, results[rank] = self._conns[rank].recv()
                except (EOFError, OSError):
                    raise RankFailed(f"{fn.__name__}: rank {rank} died") from None
                if not good:
                    raise RankFailed(f"{fn.__name__}: rank {rank} failed\n{results[rank]}")
        return [results[rank] for rank in range(chosen)]


def _main(conn: Connection, rank: int, size: int, scratch: str) -> None:
    with suppress(OSError):  # if memory runs out, it is the benchmark that ends, not others
        Path("/proc/self/oom_score_adj").write_text("500")
    torch.set_num_threads(1)
    hush_torch()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    groups: dict[int, Any] = {}
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{Path(scratch) / 'store'}",
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=SECONDS),
        )
        groups[size] = dist.group.WORLD
        while (call := conn.recv()) is not None:
            count, fn, args = call
            if count not in groups:
                groups[count] = dist.new_group(list(range(count)))
            conn.send((True, fn(groups[count], *args) if rank < count else None))
    except EOFError:
        pass  # the parent is gone
    except BaseException:
        conn.send((False, traceback.format_exc()))
    os._exit(0)


def save(result: dict[str, Any], out: Path | None) -> None:
    """Write a result, if it is wanted."""
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(result, indent=2) + "\n")


def machine() -> dict[str, Any]:
    """What a reader needs to judge the figures."""
    return {
        "cores": len(os.sched_getaffinity(0)),
        "cpu": _field("/proc/cpuinfo", "model name") or platform.machine(),
        "memory_gib": round(int((_field("/proc/meminfo", "MemTotal") or "0").split()[0]) / 2**20),
        "kernel": platform.release(),
        "transparent_hugepages": _hugepages(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torchrelay": torchrelay.__version__,
        "commit": _commit(),
    }


def _commit() -> str:
    """The commit of the library that is measured; COMMIT says it for a copy without history."""
    if named := os.environ.get("COMMIT"):
        return named
    source = Path(torchrelay.__file__).parent
    command = ["git", "-C", str(source), "log", "-1", "--format=%h", "--", "."]
    with suppress(OSError):
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    return ""


def free_memory() -> int:
    """Bytes that can be had without paging."""
    return int((_field("/proc/meminfo", "MemAvailable") or "0").split()[0]) << 10


def busy(seconds: float) -> float:
    """The share of all cores that something else takes while our own processes wait."""
    before = _ticks()
    time.sleep(seconds)
    after = _ticks()
    total = sum(after) - sum(before)
    idle = sum(after[3:5]) - sum(before[3:5])  # idle and waiting for a disk
    return round(1 - idle / total, 3) if total else 0.0


def _ticks() -> list[int]:
    with suppress(OSError):
        return [int(field) for field in Path("/proc/stat").read_text().split("\n")[0].split()[1:9]]
    return [0] * 8


def _field(file: str, name: str) -> str:
    with suppress(OSError):
        for line in Path(file).read_text().splitlines():
            if line.startswith(name):
                return line.partition(":")[2].strip()
    return ""


def _hugepages() -> str:
    """The setting in force, which the kernel shows in brackets."""
    with suppress(OSError):
        text = Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text()
        return text.partition("[")[2].partition("]")[0]
    return ""
