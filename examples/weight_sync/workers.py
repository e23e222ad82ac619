"""Ranks of one process group, as processes that are started and ended together."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple

import torch
import torch._dynamo  # DTensors and optimizers import it: once, not in each worker
import torch.distributed as dist

SECONDS = 60.0  # that any call may take
_forks = multiprocessing.get_context("fork")  # torch is imported once


class Link(NamedTuple):
    """A worker's connection to the process that started it."""

    connection: Connection

    def tell(self, *words: Any) -> None:
        self.connection.send(words)

    def wait_for_end(self) -> None:
        if not self.connection.poll(SECONDS):
            raise TimeoutError(f"nothing was heard in {SECONDS:g} s")


class Workers:
    """A rank that dies leaves the others without their collectives. So all of them are ended and
    started again, as torchrun does it."""

    def __init__(self, name: str, act: Callable[..., None], world: int, folder: str) -> None:
        self.name, self._act, self.world, self._folder = name, act, world, folder
        self.starts = 0
        self._processes: list[Any] = []
        self._connections: list[Connection] = []

    def start(self, *words: Any) -> None:
        self.starts += 1
        meeting = f"file://{self._folder}/{self.name}s-{self.starts}"
        for rank in range(self.world):
            ours, theirs = _forks.Pipe()
            args = (self._act, rank, self.world, meeting, Link(theirs), words)
            self._processes.append(_forks.Process(target=_work, args=args))
            self._processes[-1].start()
            theirs.close()
            self._connections.append(ours)

    def hear(self, seconds: float) -> list[tuple[int, tuple[Any, ...]]]:
        """Messages that arrive within `seconds`. Raises `RuntimeError` for a rank that failed."""
        found = []
        ready = wait([c for c in self._connections if not c.closed], seconds)
        for rank, connection in enumerate(self._connections):
            if connection in ready:
                try:
                    found.append((rank, connection.recv()))
                except (EOFError, OSError):
                    connection.close()
        for rank, process in enumerate(self._processes):
            if process.exitcode:
                raise RuntimeError(f"{self.name} {rank} ended with code {process.exitcode}")
        return found

    @property
    def done(self) -> bool:
        """Whether all ranks came to their end, and all that they told was heard."""
        return all(connection.closed for connection in self._connections)

    def dismiss(self) -> None:
        """Let workers that wait for the end of the run exit."""
        for connection in self._connections:
            connection.send("end")

    def kill(self, rank: int) -> None:
        self._processes[rank].kill()
        self._processes[rank].join()

    def end(self) -> None:
        """No worker is left, and nothing more is heard of them."""
        for rank, connection in enumerate(self._connections):
            self.kill(rank)
            connection.close()
        self._processes, self._connections = [], []


def _work(
    act: Callable[..., None], rank: int, world: int, meeting: str, link: Link, words: Any
) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=meeting,
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=SECONDS),
    )
    act(rank, world, link, *words)
    dist.destroy_process_group()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
