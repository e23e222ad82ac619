"""Jobs that stage their state and are killed, and what is left of keepers."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import torchrelay as tr
from tests.support import flat
from tests.support.fsdp_job import fsdp_job, train, whole
from tests.support.ranks import reached, tell
from torchrelay.keeper.process import KeeperName, ask
from torchrelay.keeper.server.messages import End

TIMEOUT = 120.0  # seconds that a call may take where the machine is busy
LEASE = 120.0


def keeper_of(rank: int, job: str, hosts: Iterable[str] | None = None, **more: Any) -> tr.Keeper:
    """A rank's keeper; ranks of a list of hosts are on the host at their place in it."""
    name = job if hosts is None else f"{job}@{list(hosts)[rank]}"
    return flat.keeper(name, timeout=TIMEOUT, lease_seconds=LEASE, **more)


def train_and_stage(
    rank: int, group: Any, job: str, steps: int, hosts: list[str] | None = None
) -> None:
    """Stage every step, say what the last one was, and wait to be killed."""
    state = fsdp_job(1)
    keeper = keeper_of(rank, job, hosts, copies=0)
    for _ in range(steps):
        train(state, 1)
        keeper.stage(state["step"], state).result(TIMEOUT)
    tell(whole(state))
    tell(train(state, 3))
    reached("staged", hold=True)


def recover_and_train(
    rank: int, group: Any, job: str, hosts: list[str] | None = None
) -> tuple[int, str, dict[str, torch.Tensor], list[float]]:
    state = fsdp_job(7)
    keeper = keeper_of(rank, job, hosts, copies=0)
    got = tr.recover(into=state, sources=[keeper], group=dist.group.WORLD, timeout=TIMEOUT)
    state["step"] = got.state["step"]
    found = whole(state)
    losses = train(state, 3)
    return got.step, str(got.report), found, losses


def end_keepers(job: str) -> None:
    """End every keeper of a job, and see it gone."""
    for name in KeeperName.all():
        if name.job == job:
            ask(name, End())
            gone(name)


def gone(name: KeeperName) -> None:
    end = time.monotonic() + TIMEOUT
    while name in KeeperName.all():
        assert time.monotonic() < end, f"{name} is still there"
        time.sleep(0.01)


def process_gone(pid: int) -> None:
    """Wait until a process has: its name goes a moment before it does."""
    end = time.monotonic() + TIMEOUT
    while is_running(pid):
        assert time.monotonic() < end, f"{pid} is still running"
        time.sleep(0.01)


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    with open(f"/proc/{pid}/stat") as stat:
        return stat.read().rpartition(")")[2].split()[0] not in "ZX"


def descriptors(pid: int) -> dict[Path, str]:
    """What a process has open, as the kernel names it."""
    found = {}
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        try:
            found[entry] = str(entry.readlink())
        except FileNotFoundError:
            continue
    return found


def arenas(pid: int) -> list[Path]:
    """The memory of staged steps that a process has, each once."""
    paths = [path for path, name in descriptors(pid).items() if "torchrelay-arena" in name]
    return list({path.stat().st_ino: path for path in paths}.values())


def wait_for_copies(keeper: tr.Keeper, step: int) -> dict[str, Any]:
    """Until this rank's keeper has its copies of a step or a later one, and is at no other."""
    end = time.monotonic() + TIMEOUT
    while True:
        copies: dict[str, Any] = keeper.status()["copies"]
        if copies["step"] is not None and copies["step"] >= step and copies["copying"] is None:
            return copies
        assert time.monotonic() < end, copies
        time.sleep(0.01)


def special() -> dict[str, Any]:
    """Leaves that replicas elsewhere have lost or damaged."""
    torch.manual_seed(5)
    tied = torch.arange(12.0).reshape(3, 4)
    return {
        "parameter": nn.Parameter(torch.ones(3)),
        "sparse": torch.eye(4).to_sparse(),
        "conj": torch.randn(3, dtype=torch.complex64).conj(),
        "bfloat": torch.randn(5).to(torch.bfloat16),
        "tied": tied,
        "again": tied,
        "view": tied[1:],
    }
