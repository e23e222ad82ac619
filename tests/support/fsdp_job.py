"""A training job of FSDP2 and AdamW that is the same on any number of ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor


def fsdp_job(seed: int, *, dims: int = 1) -> dict[str, Any]:
    """A model with its optimizer, and a tensor that is cut in columns; on a mesh of so many
    dimensions."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(12, 33), nn.Tanh(), nn.Linear(33, 5, bias=False))
    world = dist.get_world_size()
    if dims == 2:
        mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("a", "b"))
    else:
        mesh = init_device_mesh("cpu", (world,))
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    column = distribute_tensor(
        torch.arange(7.0 * 22).reshape(7, 22) + seed,
        mesh,
        [Shard(1)] if dims == 1 else [Replicate(), Shard(1)],
    )
    return {"model": model, "optimizer": optimizer, "column": column, "step": 0}


def train(job: dict[str, Any], steps: int, *, features: int = 12) -> list[float]:
    """Every rank has the same data, so that the sums over ranks are exact for two and four.
    `features`: what the job's model takes."""
    losses = []
    for _ in range(steps):
        draw = torch.Generator().manual_seed(job["step"])
        loss = job["model"](torch.randn(16, features, generator=draw)).square().mean()
        job["optimizer"].zero_grad()
        loss.backward()
        job["optimizer"].step()
        job["step"] += 1
        losses.append(loss.item())
    return losses


def whole(job: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Copies of all tensors, whole, by name."""
    found = {f"model.{key}": x for key, x in job["model"].state_dict().items()}
    found["column"] = job["column"]
    for index, held in job["optimizer"].state_dict()["state"].items():
        found |= {f"optimizer.state.{index}.{key}": x for key, x in held.items()}
    return {
        name: x.full_tensor() if isinstance(x, DTensor) else x.clone() for name, x in found.items()
    }
