"""Ranks of a process group, as processes that are started and ended together."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import torch
import torch._dynamo  # imported by the first DTensor of each worker otherwise
import torch.distributed as dist

import torchrelay as tr

SECONDS = 60.0  # that any call may take
_forks = multiprocessing.get_context("fork")  # torch is imported once
_imported = [getattr(tr, name) for name in tr.__all__]  # and so is torchrelay


class Workers:
    """A rank that dies leaves the others without collectives. So all of them are ended, and started
    again, as torchrun does it."""

    def __init__(self, act: Callable[..., None], world: int, folder: str) -> None:
        self._act, self.world, self._folder = act, world, folder
        self.starts = 0
        self._processes: list[BaseProcess] = []
        self.connections: dict[int, Connection] = {}  # to ranks that have not ended

    def start(self, *words: Any) -> None:
        self.starts += 1
        meeting = f"file://{self._folder}/{self._act.__name__}-{self.starts}"
        for rank in range(self.world):
            self.connections[rank], theirs = _forks.Pipe()
            args = (self._act, rank, self.world, meeting, theirs, words)
            self._processes.append(_forks.Process(target=_work, args=args))
            self._processes[-1].start()
            theirs.close()

    def heard(self) -> Iterator[tuple[Any, ...]]:
        """Each rank, and what it has sent. RuntimeError for one that failed."""
        for rank, connection in list(self.connections.items()):
            try:
                while connection.poll():
                    yield rank, *connection.recv()
            except (EOFError, OSError):
                del self.connections[rank]
                self._processes[rank].join(SECONDS)
                if self._processes[rank].exitcode != 0:
                    raise RuntimeError(f"rank {rank} of {self._act.__name__} failed") from None

    def kill(self, rank: int) -> None:
        self._processes[rank].kill()
        self._processes[rank].join(SECONDS)

    def end(self) -> list[tuple[Any, ...]]:
        """Kill those that are left; returns the messages that they had sent before."""
        rest = []
        for rank in range(len(self._processes)):
            self.kill(rank)
        for rank, connection in self.connections.items():
            with suppress(EOFError, OSError):
                while connection.poll():
                    rest.append((rank, *connection.recv()))
        self._processes, self.connections = [], {}
        return rest


def _work(
    act: Callable[..., None], rank: int, world: int, meeting: str, link: Connection, words: Any
) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    timeout = timedelta(seconds=SECONDS)
    dist.init_process_group("gloo", meeting, rank=rank, world_size=world, timeout=timeout)
    act(rank, world, link, *words)
    dist.destroy_process_group()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
