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
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import torchrelay as tr
from tests.support.ranks import reached, tell
from torchrelay.keeper.process import KeeperName, ask
from torchrelay.keeper.server.messages import End

TIMEOUT = 120.0  # seconds that a call may take where the machine is busy
LEASE = 120.0


def sharded(seed: int) -> dict[str, Any]:
    """A model under FSDP2 with its optimizer, the same on any number of ranks."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(12, 33), nn.Tanh(), nn.Linear(33, 5, bias=False))
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    return {"model": model, "optimizer": optimizer, "step": 0}


def train(job: dict[str, Any], steps: int) -> list[float]:
    """Every rank has the same data, so that the sums over ranks are exact for two and four."""
    losses = []
    for _ in range(steps):
        draw = torch.Generator().manual_seed(job["step"])
        loss = job["model"](torch.randn(16, 12, generator=draw)).square().mean()
        job["optimizer"].zero_grad()
        loss.backward()
        job["optimizer"].step()
        job["step"] += 1
        losses.append(loss.item())
    return losses


def whole(job: dict[str, Any]) -> dict[str, torch.Tensor]:
    found = {}
    for key, x in job["model"].state_dict().items():
        found[f"model.{key}"] = x.full_tensor() if isinstance(x, DTensor) else x.clone()
    for index, held in job["optimizer"].state_dict()["state"].items():
        for key, x in held.items():
            full = x.full_tensor() if isinstance(x, DTensor) else x.clone()
            found[f"optimizer.{index}.{key}"] = full
    return found


def keeper_of(rank: int, job: str, hosts: Iterable[str] | None = None, **more: Any) -> tr.Keeper:
    """A rank's keeper; ranks of a list of hosts are on the host at their place in it."""
    host = None if hosts is None else list(hosts)[rank]
    return tr.Keeper(job, host=host, timeout=TIMEOUT, lease=LEASE, **more)


def train_and_stage(
    rank: int, group: Any, job: str, steps: int, hosts: list[str] | None = None
) -> None:
    """Stage every step, say what the last one was, and wait to be killed."""
    state = sharded(1)
    keeper = keeper_of(rank, job, hosts, copies=0)
    for _ in range(steps):
        train(state, 1)
        keeper.stage(state["step"], state).wait(TIMEOUT)
    tell(whole(state))
    tell(train(state, 3))
    reached("staged", hold=True)


def recover_and_train(
    rank: int, group: Any, job: str, hosts: list[str] | None = None
) -> tuple[int, str, dict[str, torch.Tensor], list[float]]:
    state = sharded(7)
    keeper = keeper_of(rank, job, hosts, copies=0)
    got = tr.recover(into=state, sources=[keeper], group=dist.group.WORLD, timeout=TIMEOUT)
    state["step"] = got.state["step"]
    found = whole(state)
    losses = train(state, 3)
    return got.step, got.report.explain(), found, losses


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
