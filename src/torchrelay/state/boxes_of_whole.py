"""A destination for some boxes of a tensor, in a process that knows of no other rank."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor, ShardedTensorBase
from torch.distributed._shard.sharded_tensor.shard import Shard
from torch.distributed._shard.sharding_spec.api import EnumerableShardingSpec

from torchrelay.geometry.boxes import Box, without
from torchrelay.record import manifest as m
from torchrelay.state.tensors import shard_metadata


class BoxesOfWhole(ShardedTensor):
    """A ShardedTensor without a process group: no process has the boxes that are not here."""

    # Torch's own asks its group even for its size.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]


def boxes_of_whole(parts: Sequence[tuple[Box, torch.Tensor]], shape: Sequence[int]) -> BoxesOfWhole:
    """A destination for some boxes of a tensor of this shape, by the memory that takes each."""
    spec, here = _spec_of(tuple(box for box, _ in parts), tuple(shape))
    how: dict[str, Any] = {"layout": torch.strided, "pin_memory": False, "requires_grad": False}
    kind = parts[0][1].dtype
    built: BoxesOfWhole = ShardedTensorBase.__new__(BoxesOfWhole, spec, *shape, dtype=kind, **how)
    built._local_shards = [Shard(x.detach(), y) for (_, x), y in zip(parts, here, strict=True)]
    return built


@lru_cache(1024)  # layers are alike
def _spec_of(boxes: tuple[Box, ...], shape: tuple[int, ...]) -> tuple[EnumerableShardingSpec, Any]:
    rest = without(((0,) * len(shape), shape), boxes)
    here = [shard_metadata(m.Box(*box, None), "rank:0/cpu") for box in boxes]
    there = [shard_metadata(m.Box(*box, None), "rank:1/cpu") for box in rest]
    return EnumerableShardingSpec([*here, *there]), here
