"""Servers that run out of descriptors for a while accept again when there are some."""

from __future__ import annotations

import itertools
import os
import resource
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import msgspec
import pytest
import torch

import torchrelay as tr
from tests.keeper.jobs import TIMEOUT, end_keepers
from torchrelay.keeper.process import KeeperName
from torchrelay.sources.connection import Host
from torchrelay.sources.lent_memory import LocalFacts

JOB = f"descriptors-{os.getpid()}"
STATE = {"x": torch.arange(100_000.0), "step": 7}


@contextmanager
def no_descriptors(pid: int) -> Iterator[None]:
    """Within: a process cannot open anything."""
    taken = {int(entry.name) for entry in Path(f"/proc/{pid}/fd").iterdir()}
    free = next(number for number in itertools.count() if number not in taken)
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (free, before[1]))
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, before)


def strain(pid: int, name: str) -> None:
    """Connect to a Unix socket of a process that cannot accept, until it has tried to."""
    with no_descriptors(pid), ExitStack() as open_lines:
        for _ in range(3):
            line = open_lines.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            line.settimeout(0.5)
            line.connect("\0" + name)
            with pytest.raises(TimeoutError):
                line.recv(1)


def test_a_keeper_accepts_again_and_has_its_steps() -> None:
    try:
        keeper = tr.Keeper(JOB, no_dist=True, timeout=TIMEOUT)
        keeper.stage(7, STATE).result(TIMEOUT)
        pid = keeper.pid
        assert pid is not None
        strain(pid, KeeperName.of(JOB).address)
        with tr.Keeper(JOB, no_dist=True, timeout=10) as again:  # the worker that comes next
            assert again.pid == pid
            got = tr.recover(sources=[again], no_dist=True, timeout=30)
            assert got.step == 7 and torch.equal(got.state["x"], STATE["x"])
        keeper.close()
    finally:
        end_keepers(JOB)


def test_an_endpoint_lends_its_memory_again() -> None:
    with tr.serve(STATE, step=7, no_dist=True, timeout=60) as endpoint:
        assert tr.pull(endpoint.url, timeout=60).report.route == "mapped"
        host = Host(endpoint.url)
        facts = msgspec.json.decode(host.get("/local.json", seconds=30).body, type=LocalFacts)
        host.close()
        pid = endpoint._server.process.pid
        assert pid is not None
        strain(pid, facts.socket)
        got = tr.pull(endpoint.url, timeout=60)
        assert got.report.route == "mapped", got.report.instead
