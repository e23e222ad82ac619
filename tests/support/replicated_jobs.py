"""Training jobs whose ranks hold replicas, and much that is each rank's own."""

from __future__ import annotations

import random
from typing import Any, NamedTuple

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

KINDS = ("ddp", "hsdp", "replicated")


class Net(torch.nn.Module):
    """Rows that no number of ranks divides, statistics, dropout, and a buffer."""

    def __init__(self, *, norm: bool) -> None:
        super().__init__()
        self.first = torch.nn.Linear(5, 7)
        self.norm = torch.nn.BatchNorm1d(7) if norm else torch.nn.LayerNorm(7)
        self.drop = torch.nn.Dropout(0.3)
        self.last = torch.nn.Linear(7, 3)
        self.register_buffer("scale", torch.full((11,), 0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale: Any = self.scale
        last: torch.Tensor = self.last(self.drop(self.norm(self.first(x))))
        return last * scale[0]


class Job(NamedTuple):
    net: torch.nn.Module
    optimizer: torch.optim.Optimizer
    state: dict[str, Any]
    rank: int

    def train(self, step: int) -> None:
        torch.manual_seed(1000 * step + self.rank)
        self.net(torch.randn(4, 5)).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.state["position"] = step * 10 + self.rank
        self.state["rng"] = torch.get_rng_state()
        self.state["errors"][(step * 31 + self.rank) % 1000] += self.rank + 1
        self.state["uneven"] = torch.ones(self.rank + 1, 3)

    def replicas(self) -> dict[str, torch.Tensor]:
        """Local tensors that this rank holds in common with others, by their paths."""
        found: dict[str, torch.Tensor] = {}
        for name, value in [*self.net.named_parameters(), *self.net.named_buffers()]:
            found[f"model.{name.removeprefix('module.')}"] = value
        named = self.optimizer.state_dict()["state"]
        for number, values in named.items():
            found |= {f"optimizer.state.{number}.{key}": one for key, one in values.items()}
        kept = {}
        for path, one in found.items():
            if isinstance(one, DTensor):
                if any(placement.is_replicate() for placement in one.placements):
                    kept[path] = one.to_local()
            elif isinstance(self.net, DistributedDataParallel):
                if "running_" not in path:
                    kept[path] = one
            elif path.endswith(".step"):
                kept[path] = one
        return {path: one for path, one in kept.items() if one.numel()}


def job(kind: str, rank: int, world: int, group: Any) -> Job:
    torch.manual_seed(0)
    net: torch.nn.Module = Net(norm=kind == "ddp")
    if kind == "ddp":
        net = DistributedDataParallel(net, process_group=group)
    elif kind == "hsdp":
        copies = 2 if world % 2 == 0 else world
        shape, names = (copies, world // copies), ("replicate", "shard")
        fully_shard(net, mesh=init_device_mesh("cpu", shape, mesh_dim_names=names))
    else:
        tensor = 2 if world % 2 == 0 else world
        names = ("data", "tensor")
        mesh = init_device_mesh("cpu", (world // tensor, tensor), mesh_dim_names=names)
        plan = {"first": ColwiseParallel(), "last": RowwiseParallel()}
        net = torch.nn.Sequential()
        net.add_module("first", torch.nn.Linear(5, 24))
        net.add_module("last", torch.nn.Linear(24, 3))  # its bias is the same along "tensor"
        parallelize_module(net, mesh["tensor"], plan)
        fully_shard(net, mesh=mesh["data"])
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    state = {
        "model": net,
        "optimizer": optimizer,
        "rng": torch.get_rng_state(),
        "position": rank,
        "errors": torch.zeros(1000),
        "uneven": torch.ones(rank + 1, 3),
    }
    return Job(net, optimizer, state, rank)


def flip(tensor: torch.Tensor, dice: random.Random) -> None:
    """Flips a bit of a tensor; the same again takes it back."""
    data = tensor.detach().view(-1).view(torch.uint8)
    bit = dice.randrange(8 * data.numel())
    data[bit // 8] = int(data[bit // 8]) ^ 1 << bit % 8
