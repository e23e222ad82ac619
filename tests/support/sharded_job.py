"""A training job of FSDP2 and AdamW, saved by all ranks of a pool: what commands look at."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import torchrelay as tr

STEPS = (10, 20)


def job(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 8, bias=False))
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> dict[str, Any]:
    weights, moments = get_state_dict(model, optimizer)
    return {"model": weights, "optim": moments, "epoch": step // 10, "name": "four ranks"}


def save(rank: int, group: Any, folder: str) -> None:
    """Two steps under `run`, and the last one as torch's own DCP saves it under `dcp`."""
    model, optimizer = job(seed=3)
    with tr.Checkpointer(f"{folder}/run", group=group) as there:
        for step in range(1, STEPS[-1] + 1):
            torch.manual_seed(100 * step + rank)
            model(torch.randn(4, 16)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if step in STEPS:
                there.save(step, state_of(model, optimizer, step))
    state = state_of(model, optimizer, STEPS[-1])
    dcp.save(state, checkpoint_id=f"{folder}/dcp", process_group=group)


def train_on(rank: int, group: Any, places: list[str]) -> list[list[float]]:
    """The losses of this rank when the job goes on from the newest step of each place."""
    found = []
    for place in places:
        model, optimizer = job(seed=99)
        state = state_of(model, optimizer, 0)
        with tr.Checkpointer(
            place, group=group, options=tr.options.CheckpointerOptions(read_only=True)
        ) as there:
            there.load(into=state)
        set_state_dict(
            model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"]
        )
        losses = []
        for step in range(3):
            torch.manual_seed(step)
            loss = model(torch.randn(4, 16)).square().mean()
            losses.append(loss.item())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append(losses)
    return found
