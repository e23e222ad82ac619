"""States that releases of torch exchange, and what is the same in them.

It needs torch alone: an interpreter with another torch runs it, too. Values are counted, so that no
release draws others.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
from torch.distributed._shard.sharded_tensor import Shard as LocalShard
from torch.distributed._shard.sharded_tensor import (
    ShardedTensor,
    ShardMetadata,
    init_from_local_shards,
)
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

_DTYPES = """
bfloat16 bool complex64 complex128 float16 float32 float64 float8_e4m3fn float8_e5m2
int8 int16 int32 int64 uint8 uint16 uint32
"""
DTYPES = _DTYPES.split()
LAYOUTS: dict[str, Placement] = {"rows": Shard(0), "columns": Shard(1), "copies": Replicate()}


def counted(shape: tuple[int, ...], dtype: torch.dtype, first: int = 0) -> torch.Tensor:
    """A tensor whose bytes count up."""
    count = torch.Size(shape).numel() * dtype.itemsize
    data = ((torch.arange(count) + first) * 37 % 251).to(torch.uint8)
    if dtype == torch.bool:
        data = data % 2
    return data.view(dtype).reshape(shape)


def plain() -> dict[str, Any]:
    """Tensors of several dtypes and layouts, and nested values, as one process has them."""
    grid = counted((2, 3, 4, 2), torch.float32)
    return {
        "model": OrderedDict(
            [("weight", counted((4, 3), torch.float32)), ("bias", counted((3,), torch.bfloat16))]
        ),
        "dtypes": {name: counted((2, 3), getattr(torch, name), n) for n, name in enumerate(DTYPES)},
        "scalar": torch.tensor(-0.0),
        "empty": torch.empty(0, 3),
        "turned": counted((4, 6), torch.int16).t(),
        "window": counted((20,), torch.int32)[5:9],
        "stepped": counted((20,), torch.int64)[1::3],
        "images": grid.contiguous(memory_format=torch.channels_last),
        "optimizer": {"lr": 0.1, "betas": (0.9, 0.95), "groups": [1, {"decay": None}]},
        "mixed": [torch.arange(3), {"half": torch.ones(2, dtype=torch.float16)}, "text"],
        "step": 7,
        "name": "n\u00e9",
        "raw": b"\x00\xff",
        "flags": [True, -1, 1 << 70, float("inf"), 1 - 2j],
    }


def wholes() -> dict[str, torch.Tensor]:
    """The tensors that `distributed` cuts; seven rows are uneven for two ranks."""
    return {
        "rows": counted((7, 5), torch.float32),
        "columns": counted((3, 5), torch.bfloat16, 1),
        "copies": counted((2, 2), torch.int64, 2),
    }


def distributed(mesh: Any, at: int, *, fill: bool = True) -> dict[str, DTensor]:
    """A rank's part of DTensors on a mesh of two, or zeros in its place; no collective call."""
    made = {}
    for name, whole in wholes().items():
        placement = LAYOUTS[name]
        local = whole
        if isinstance(placement, Shard):
            local = whole.chunk(2, placement.dim)[at].contiguous()
        made[name] = DTensor.from_local(
            local.clone() if fill else torch.zeros_like(local),
            mesh,
            [placement],
            run_check=False,
            shape=whole.shape,
            stride=whole.stride(),
        )
    return made


def sharded(rank: int) -> ShardedTensor:
    """This rank's part of a ShardedTensor of two and of five rows. A collective call."""
    start, stop = ((0, 2), (2, 7))[rank]
    box = ShardMetadata([start, 0], [stop - start, 5], f"rank:{rank}/cpu")
    shard = LocalShard(wholes()["rows"][start:stop].clone(), box)
    return init_from_local_shards([shard], 7, 5)


def whole() -> dict[str, Any]:
    """The state in a checkpoint of two ranks, as one process has it."""
    cut = wholes()
    return {**plain(), "distributed": cut, "sharded": cut["rows"]}


def part(mesh: Any, rank: int) -> dict[str, Any]:
    """The part of `whole` that a rank has. A collective call."""
    return {**plain(), "distributed": distributed(mesh, rank), "sharded": sharded(rank)}


def empty_part(mesh: Any, rank: int) -> dict[str, Any]:
    """The same, to be filled. A collective call."""
    into = {**zeros(plain()), "distributed": distributed(mesh, rank, fill=False)}
    into["sharded"] = sharded(rank)
    for shard in into["sharded"].local_shards():
        shard.tensor.zero_()
    return into


def dense() -> dict[str, Any]:
    """What torch's own receiver can take in place: tensors that fill their storages."""
    taken = plain()
    return {name: taken[name] for name in ("model", "dtypes", "scalar", "step", "name")}


def as_dcp(value: Any) -> Any:
    """The state as a DCP directory has it, which knows dicts of one kind alone."""
    return {key: as_dcp(item) for key, item in value.items()} if isinstance(value, dict) else value


def zeros(value: Any) -> Any:
    """The same state with dense tensors of zeros and no values, to be filled in place."""
    if isinstance(value, torch.Tensor):
        return torch.zeros(value.shape, dtype=value.dtype)
    if isinstance(value, dict):
        return type(value)((key, zeros(item)) for key, item in value.items())
    return type(value)(map(zeros, value)) if type(value) in (list, tuple) else None


def differences(got: Any, want: Any, path: str = "state") -> list[str]:
    """The paths at which two states differ in type or bits."""
    if isinstance(want, DTensor):
        if not isinstance(got, DTensor):
            return [f"{path}: {type(got).__name__} for a DTensor"]
        same = (
            got.shape == want.shape
            and got.placements == want.placements
            and got.device_mesh == want.device_mesh
            and hash(got.device_mesh) == hash(want.device_mesh)
        )
        local = differences(got.to_local(), want.to_local(), path)
        return local if same else [f"{path}: {got.device_mesh} {got.placements} {got.shape}"]
    if isinstance(want, ShardedTensor):
        mine, theirs = ([one.tensor for one in st.local_shards()] for st in (got, want))
        return differences(mine, theirs, path)
    if isinstance(want, torch.Tensor):
        if type(got) is not type(want):
            return [f"{path}: {type(got).__name__} for a {type(want).__name__}"]
        if got.dtype != want.dtype or got.shape != want.shape:
            return [f"{path}: {got.dtype} {tuple(got.shape)}"]
        return [] if _bits(got) == _bits(want) else [f"{path}: other values"]
    if type(got) is not type(want):
        return [f"{path}: {type(got).__name__} for a {type(want).__name__}"]
    if isinstance(want, dict):
        if got.keys() != want.keys():  # a checkpoint has them in the order of its files
            return [f"{path}: keys {list(got)}"]
        pairs = [(key, got[key], want[key]) for key in want]
    elif isinstance(want, (list, tuple)):
        if len(got) != len(want):
            return [f"{path}: {len(got)} items"]
        pairs = [(n, a, b) for n, (a, b) in enumerate(zip(got, want))]  # noqa: B905
    else:
        return [] if got == want else [f"{path}: {got!r}"]
    return [one for key, a, b in pairs for one in differences(a, b, f"{path}[{key!r}]")]


def _bits(tensor: torch.Tensor) -> list[int]:
    found: list[int] = tensor.detach().contiguous().flatten().view(torch.uint8).tolist()
    return found
