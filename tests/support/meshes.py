"""States whose tensors are distributed over ranks in every way, and what they hold as a whole.

A *layout* is a name in `LAYOUTS`; `state(layout)` makes this rank's part of the same values
whichever ranks there are, `blank(layout)` the same with nothing in it.
"""

from __future__ import annotations

from functools import cache
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist
from torch.distributed._shard.sharded_tensor import (
    Shard as LocalShard,
)
from torch.distributed._shard.sharded_tensor import (
    ShardedTensor,
    ShardMetadata,
    init_from_local_shards,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from tests.support.states import bits

TENSORS: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
    "even": ((8, 4), torch.float32),
    "uneven": ((7, 5), torch.bfloat16),
    "fewer rows than ranks": ((2, 3), torch.int64),
    "one row": ((1, 6), torch.float32),
    "deep": ((5, 4, 3), torch.complex64),
    "line": ((9,), torch.float64),
}
"""Names, shapes and dtypes of the tensors of every state."""

ONE_DIM: dict[str, tuple[Placement, ...]] = {
    "rows": (Shard(0),),
    "columns": (Shard(1),),
    "copies": (Replicate(),),
}
TWO_DIM: dict[str, tuple[Placement, ...]] = {
    "grid": (Shard(0), Shard(1)),
    "rows of columns": (Shard(1), Shard(0)),
    "rows twice": (Shard(0), Shard(0)),
    "copies of rows": (Replicate(), Shard(0)),
    "columns of copies": (Shard(1), Replicate()),
}
LAYOUTS = ["plain", *ONE_DIM, *TWO_DIM, "shards", "other shards"]


def whole(name: str) -> torch.Tensor:
    """All of a tensor, the same in every process."""
    shape, dtype = TENSORS[name]
    generator = torch.Generator().manual_seed(crc32(name.encode()))
    if dtype.is_complex:
        return torch.randn(shape, generator=generator, dtype=dtype)
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator).to(dtype)
    return torch.randint(-99, 99, shape, generator=generator).to(dtype)


@cache
def mesh(dims: int) -> DeviceMesh:
    """The ranks of this process's world in a row, or in pairs."""
    world = dist.get_world_size()
    if dims == 1:
        return init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))
    inner = min(2, world)
    return init_device_mesh("cpu", (world // inner, inner), mesh_dim_names=("dp", "tp"))


def spread(tensor: torch.Tensor, layout: str) -> torch.Tensor:
    """A whole tensor as `layout` distributes it."""
    if layout == "plain":
        return tensor.clone()
    if layout.endswith("shards"):
        return sharded(tensor, backwards=layout.startswith("other"))
    placements = [
        Shard(0) if isinstance(p, Shard) and p.dim >= tensor.ndim else p
        for p in {**ONE_DIM, **TWO_DIM}[layout]
    ]
    return distribute_tensor(tensor, mesh(len(placements)), placements, src_data_rank=None)


def sharded(tensor: torch.Tensor, *, backwards: bool) -> ShardedTensor:
    """A ShardedTensor in uneven boxes of rows: rank 0 has the fewest, or the most."""
    world, rank = dist.get_world_size(), dist.get_rank()
    rows = tensor.shape[0]
    edges = [rows * n * (n + 1) // (world * (world + 1)) for n in range(world + 1)]
    if backwards:
        edges = [rows - edge for edge in reversed(edges)]
    start, stop = edges[rank], edges[rank + 1]
    rest = [0] * (tensor.ndim - 1)
    box = ShardMetadata([start, *rest], [stop - start, *tensor.shape[1:]], f"rank:{rank}/cpu")
    shards = [LocalShard(tensor[start:stop].clone(), box)] if stop > start else []
    return init_from_local_shards(shards, *tensor.shape)


def state(layout: str) -> dict[str, Any]:
    model = {name: spread(whole(name), layout) for name in TENSORS}
    return {"model": model, "plain": torch.arange(5), "epoch": 3}


def blank(layout: str) -> dict[str, Any]:
    model = {name: spread(torch.zeros_like(whole(name)), layout) for name in TENSORS}
    return {"model": model, "plain": torch.zeros(5, dtype=torch.int64), "epoch": 0}


def local_bits(tensor: torch.Tensor) -> list[bytes]:
    """This rank's part of a tensor."""
    if isinstance(tensor, DTensor):
        return [bits(tensor.to_local())]
    if isinstance(tensor, ShardedTensor):
        return [bits(shard.tensor) for shard in tensor.local_shards()]
    return [bits(tensor)]


def wrong(got: dict[str, Any], layout: str) -> list[str]:
    """Names of tensors that are not what they are in `state(layout)`."""
    expected = state(layout)
    names = [
        name
        for name, tensor in expected["model"].items()
        if type(got["model"][name]) is not type(tensor)
        or local_bits(got["model"][name]) != local_bits(tensor)
    ]
    if got["epoch"] != 3 or not torch.equal(got["plain"], torch.arange(5)):
        names.append("the rest")
    return names
