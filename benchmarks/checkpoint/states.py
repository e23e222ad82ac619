"""The state that is saved. Deterministic: every process can make the same one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from benchmarks.workloads import ramp


@dataclass(frozen=True)
class Size:
    """A decoder. The full one has 341M parameters: 4.1 GB and 872 tensors with its AdamW state."""

    width: int = 1024
    hidden: int = 2816
    layers: int = 24
    vocabulary: int = 32_000


SMALL = Size(width=64, hidden=176, layers=4, vocabulary=512)


def shapes(size: Size) -> dict[str, tuple[int, ...]]:
    width, hidden = size.width, size.hidden
    found: dict[str, tuple[int, ...]] = {"embed.weight": (size.vocabulary, width)}
    for layer in range(size.layers):
        for name in ("q", "k", "v", "o"):
            found[f"layers.{layer}.attention.{name}.weight"] = (width, width)
        for name in ("gate", "up"):
            found[f"layers.{layer}.mlp.{name}.weight"] = (hidden, width)
        found[f"layers.{layer}.mlp.down.weight"] = (width, hidden)
        for name in ("norm1", "norm2"):
            found[f"layers.{layer}.{name}.weight"] = (width,)
    return found | {"norm.weight": (width,)}


def make(size: Size, group: Any) -> dict[str, Any]:
    """Weights and AdamW state in nested dicts; over several ranks cut as FSDP2 cuts them."""
    world, rank = group.size(), group.rank()
    place = 0
    tensor: Callable[[tuple[int, ...]], torch.Tensor]

    def whole(shape: tuple[int, ...]) -> torch.Tensor:
        nonlocal place
        numel = torch.Size(shape).numel()
        place += numel
        return ramp(numel, place - numel).view(shape)

    tensor = whole
    if world > 1:
        mesh = init_device_mesh("cpu", (world,))
        rows = 1 << 29  # the ranks' bits differ too
        place = rank * rows

        def shard(shape: tuple[int, ...]) -> torch.Tensor:
            mine = whole((shape[0] // world, *shape[1:]))
            return DTensor.from_local(mine, mesh, [Shard(0)], run_check=False)

        tensor = shard
    layout = shapes(size)
    return {
        "model": {name: tensor(shape) for name, shape in layout.items()},
        "optim": {
            name: {
                "step": torch.tensor(7.0),
                "exp_avg": tensor(shape),
                "exp_avg_sq": tensor(shape),
            }
            for name, shape in layout.items()
        },
    }


def flat(state: Any, path: str = "") -> dict[str, torch.Tensor]:
    """The tensors in this process's memory by dotted path."""
    if isinstance(state, dict):
        return {
            name: tensor
            for key, value in state.items()
            for name, tensor in flat(value, f"{path}.{key}" if path else str(key)).items()
        }
    return {path: state.to_local() if isinstance(state, DTensor) else state}
