"""A trainer that does nothing but save, for tests that kill it. Run by a fork server."""

from __future__ import annotations

import os
import random
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess

import torch

import torchrelay as tr
from tests.support.forks import servers
from tests.support.ranks import state_of
from tests.support.saved import training
from torchrelay.checkpointer import KeepLast


def start(root: str, first: int, seed: int) -> tuple[ForkServerProcess, Connection]:
    """Start one; its reports come through the connection, until it is killed."""
    ours, theirs = servers.Pipe(duplex=False)
    process = servers.Process(target=_save_on, args=(root, first, seed, theirs), daemon=True)
    process.start()
    theirs.close()
    return process, ours


def _save_on(root: str, first: int, seed: int, link: Connection) -> None:
    """Reports ("writer", pid), ("begin", step), ("ack", step) once a step is committed, and
    ("failed", step) where the writer process was lost."""
    os.setsid()
    torch.set_num_threads(1)
    rng = random.Random(seed)
    checkpointer = tr.Checkpointer(root, keep=KeepLast(2), timeout=60)
    checkpointer.prepare(training(first))
    pending: tr.Pending | None = None

    def settle() -> None:
        nonlocal pending
        if pending is not None:
            fault = pending.exception(60)
            link.send(("failed" if fault else "ack", pending.step))
            pending = None

    link.send(("writer", checkpointer._saver.writer.process.pid))
    for step in range(first, first + 100_000):
        settled = rng.random() < 0.5
        if settled:
            settle()
        link.send(("begin", step))
        try:
            if step % 2:
                pending, before = checkpointer.save_async(step, training(step)), pending
                if before is not None and before.succeeded():
                    link.send(("ack", before.step))
            else:
                checkpointer.save(step, training(step))
                link.send(("ack", step))
        except tr.errors.CheckpointError:
            link.send(("failed", step))
        link.send(("writer", checkpointer._saver.writer.process.pid))


def is_gone(pid: int) -> bool:
    """Whether a process has ended; one that nobody has waited for counts as ended."""
    return state_of(pid) in "ZX"
