"""What the steps in tests/golden hold. Made of counted bytes, so that no version of torch or numpy
draws other values; tests compare with this and not with another load."""

from __future__ import annotations

import argparse
import datetime
import decimal
import fractions
import uuid
from collections import OrderedDict, defaultdict
from typing import Any

import numpy as np
import torch
from torch.distributed._shard.sharded_tensor import Shard as LocalShard
from torch.distributed._shard.sharded_tensor import ShardMetadata, init_from_local_shards
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor

from tests.support.states import Color, Level, Moment, Pair, Point, strided

ONE, TWO, LIBRARY = 7, 12, 3
"""The steps: by one process, by two ranks, and one of values of the standard library."""

# Written out: later versions of torch have other dtypes.
_DTYPES = """
bfloat16 bits16 bits1x8 bits2x4 bits4x2 bits8 bool complex128 complex32 complex64 float16 float32
float4_e2m1fn_x2 float64 float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz float8_e8m0fnu
int1 int16 int2 int3 int32 int4 int5 int6 int64 int7 int8 uint1 uint16 uint2 uint3 uint32 uint4
uint5 uint6 uint64 uint7 uint8
"""
_ARRAYS = "? i1 <u2 <i4 >i4 <f2 <f4 <f8 >f8 <c8 >c16 <M8[ns] <m8[s] >M8[D] S3 <U2 >U2 V5"
DTYPES = _DTYPES.split()
ARRAYS: list[Any] = [
    *_ARRAYS.split(),
    [("a", "<i4"), ("b", ">f8", (2,))],
    [("outer", [("in", "<i2"), ("side", "S2")]), ("t", "<M8[s]")],
]


def counted(shape: tuple[int, ...], dtype: torch.dtype, first: int = 0) -> torch.Tensor:
    """A tensor whose bytes count up."""
    count = torch.Size(shape).numel()
    data = torch.arange(first, first + count * dtype.itemsize) * 37 % 251
    storage = data.to(torch.uint8).untyped_storage()
    return strided(storage, dtype, 0, shape, torch.empty(shape, device="meta").stride())


def numbers(*shape: int) -> torch.Tensor:
    """Floats that every sum and product of them keeps exact."""
    count = torch.Size(shape).numel()
    return ((torch.arange(count) * 29 % 64).float() / 8 - 4).reshape(shape)


def _arrays() -> dict[str, Any]:
    made: dict[str, Any] = {}
    for dtype in map(np.dtype, ARRAYS):
        array = np.zeros((2, 3), dtype)
        if dtype.kind == "U":
            array[...] = "é"
        elif dtype.kind == "b":
            array[:, 1] = True
        elif dtype.names is None:
            data = (np.arange(array.nbytes) * 41 % 120).astype(np.uint8)
            array = np.frombuffer(data.tobytes(), dtype).reshape(2, 3).copy()
        made[str(dtype)] = array
    made["fortran"] = np.asfortranarray(np.arange(6.0).reshape(2, 3))
    made["empty"] = np.zeros((0, 2), np.int16)
    made["scalars"] = [
        np.float32(-0.0),
        np.int64(7),
        np.bool_(True),
        np.str_("né"),
        np.bytes_(b"a"),
    ]
    made["dates"] = [np.datetime64("2024-01-01"), np.timedelta64(3, "s"), np.void(b"abc")]
    return made


def _tensors() -> dict[str, Any]:
    base = counted((48,), torch.uint8)
    weight = numbers(3, 4)
    complex_ = counted((2, 3), torch.complex64)
    grid = numbers(2, 3, 4, 2)
    sparse = torch.tensor([[0.0, 1.5, 0.0, 2.0], [0.0] * 4, [3.0, 0.0, -1.0, 0.0]])
    coo = torch.sparse_coo_tensor(torch.tensor([[0, 1, 0], [2, 0, 2]]), numbers(3), (2, 3))
    wide = torch.tensor([[1.0, 0, 0, 2], [0, 3, 4, 0], [0, 0, 0, 5], [6, 0, 0, 7]])
    return {
        "dtypes": {name: counted((2, 3), getattr(torch, name), n) for n, name in enumerate(DTYPES)},
        "scalars": [torch.tensor(-0.0), torch.tensor(1 << 60), torch.tensor(True)],
        "nan payload": torch.tensor([0x7FC12345, 0x7F812345], dtype=torch.int32).view(
            torch.float32
        ),
        "empty": [torch.empty(0), torch.empty(2, 0, 3, dtype=torch.int8)],
        "meta": torch.empty((2, 3), dtype=torch.float16, device="meta"),
        "turned": numbers(4, 6).t(),
        "stepped": numbers(20)[1::3],
        "expanded": numbers(1, 4).expand(3, 4),
        "channels_last": grid.contiguous(memory_format=torch.channels_last),
        "overlapping": {
            "bytes": base[1:17],
            "words": base[8:40].view(torch.float32),
            "odd": base[::7],
        },
        "tied": {"in": weight, "out": weight, "turned": weight.t()},
        "conj": complex_.conj(),
        "neg": torch._neg_view(numbers(5)),
        "parameter": torch.nn.Parameter(numbers(3)),
        "frozen": torch.nn.Parameter(counted((2,), torch.int32), requires_grad=False),
        "grad": numbers(2).requires_grad_(),
        "sparse": {
            "coo": sparse.to_sparse(),
            "uncoalesced": coo,
            "csr": wide.to_sparse_csr(),
            "csc": wide.to_sparse_csc(),
            "bsr": wide.to_sparse_bsr((2, 2)),
            "bsc": wide.to_sparse_bsc((2, 2)),
        },
    }


def state_of_one() -> dict[str, Any]:
    """Every kind of leaf and container."""
    point = Point([1, torch.arange(2)], "y")
    point.hidden = {"z": None}
    odd = {"": 1, "a.b": torch.ones(1), "\ud800ü\n": torch.ones(2), 3: 1.5, None: True}
    return {
        "model": OrderedDict([("weight", numbers(4, 3)), ("layers.0.bias", numbers(3))]),
        "tensors": _tensors(),
        "arrays": _arrays(),
        "values": [
            None,
            True,
            -1,
            1 << 100,
            0.1,
            -0.0,
            float("inf"),
            1 - 2j,
            "é\ud800",
            b"\x00\xff",
        ],
        "more": [
            torch.bfloat16,
            torch.device("cuda", 1),
            torch.Size([2, 3]),
            Color.BLUE,
            Level.HIGH,
        ],
        "containers": [
            (1, (2,), ()),
            defaultdict(list, {"a": [torch.arange(3)]}),
            Pair(1, [2]),
            Moment(torch.tensor(3), {"x": Pair(None, ())}),
            point,
        ],
        "keys": {**odd, True: 2, (1, ("x", None)): torch.ones(3), -2.5: 0},
        "x": torch.arange(5),
    }


def state_of_library() -> dict[str, Any]:
    """Values of the standard library."""
    moment = datetime.datetime(2026, 10, 25, 2, 30, 15, 123456, fold=1)
    hour = datetime.timedelta(hours=1)
    return {
        "sets": [{1, "a", (2.5, None, frozenset({b"x"}))}, set(), frozenset({moment, 1j})],
        "times": [
            moment,
            moment.replace(tzinfo=datetime.timezone.utc),
            moment.replace(tzinfo=datetime.timezone(hour, "here")),
            moment.date(),
            datetime.time(1, 2, 3, 4, tzinfo=datetime.timezone(-hour)),
            -hour,
        ],
        "numbers": [decimal.Decimal("-0.10"), fractions.Fraction(1 << 70, 3), uuid.UUID(int=7)],
        "ranges": [range(9, 0, -2), slice(None, 5)],
        "namespace": {"x": argparse.Namespace(tags={"b"}, w=torch.arange(2))},
    }


LAYOUTS: dict[str, Placement] = {"rows": Shard(0), "columns": Shard(1), "copies": Replicate()}


def state_of_two(rank: int) -> dict[str, Any]:
    """One rank's part, in a group of two. Tensors of `wholes_of_two` are distributed."""
    wholes = wholes_of_two()
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    start, stop = ((0, 2), (2, 7))[rank]
    box = ShardMetadata([start, 0], [stop - start, 3], f"rank:{rank}/cpu")
    shard = LocalShard(wholes["sharded"][start:stop].clone(), box)
    distributed: dict[str, Any] = {
        name: distribute_tensor(wholes[name], mesh, [placement])
        for name, placement in LAYOUTS.items()
    }
    distributed["parameter"] = torch.nn.Parameter(distribute_tensor(numbers(5), mesh, [Shard(0)]))
    distributed["sharded"] = init_from_local_shards([shard], 7, 3)
    return {"model": distributed, **own_of_two(rank)}


def wholes_of_two() -> dict[str, torch.Tensor]:
    return {
        "rows": numbers(7, 5),
        "columns": counted((3, 5), torch.bfloat16),
        "copies": counted((2, 2), torch.int64),
        "parameter": torch.nn.Parameter(numbers(5)),
        "sharded": numbers(7, 3),
    }


def own_of_two(rank: int) -> dict[str, Any]:
    """What is not distributed: the same on both ranks, of their own, or on one of them alone."""
    return {
        "optimizer": {"step": torch.tensor(12.0), "lr": 0.001},
        "rng": torch.full((16,), rank + 1, dtype=torch.uint8),
        "position": {"file": 10 * rank, "name": f"rank {rank}"},
        f"stage {rank}": {"w": numbers(2, 2) + rank},
    }
