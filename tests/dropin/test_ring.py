"""Eight ranks in a ring exchange states through `Relay` and both protocols of the drop-in."""

from __future__ import annotations

from datetime import timedelta
from itertools import product
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed._shard.sharded_tensor import (
    Shard,
    ShardedTensor,
    ShardMetadata,
    init_from_local_shards,
)
from torch.distributed._shard.sharded_tensor.metadata import ShardedTensorMetadata, TensorProperties
from torch.distributed.checkpoint._pg_transport import PGTransport as StockTransport
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate

import torchrelay as tr
from torchrelay.dropin import PGTransport

WORLD = 8
CPU = torch.device("cpu")
TIMEOUT = timedelta(seconds=30)


def model_state(rank: int) -> dict[str, Any]:
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(10, 20), nn.ReLU(), nn.Linear(20, 10))
    return dict(model.state_dict())


def mixed_state(rank: int) -> dict[str, Any]:
    torch.manual_seed(rank)
    mesh = init_device_mesh("cpu", (WORLD,))
    return {
        "weights": model_state(rank),
        "dtensor": DTensor.from_local(torch.randn(10, 10), mesh, [Replicate()]),
        "text": f"rank {rank}",
        "nested": {"tensor": torch.randn(1, 2), "value": 42 + rank},
        "list": [1, 2, rank],
    }


def sharded_state(rank: int) -> dict[str, Any]:
    rows = 8
    local = torch.arange(rank * rows * 4, (rank + 1) * rows * 4, dtype=torch.float32)
    metadata = ShardMetadata([rank * rows, 0], [rows, 4], f"rank:{rank}/cpu")
    shard = Shard(local.reshape(rows, 4), metadata)
    return {
        "sharded": init_from_local_shards([shard], rows * WORLD, 4),
        "scalar": torch.tensor(float(rank)),
    }


STATES = {"model": model_state, "mixed": mixed_state, "sharded": sharded_state}
TORCH_STATES = ("model", "mixed")  # torch's protocol has no ShardedTensors


def same(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, ShardedTensor):
        mine, theirs = a.local_shards(), b.local_shards()
        return isinstance(b, ShardedTensor) and all(
            torch.equal(x.tensor, y.tensor) and x.metadata.shard_offsets == y.metadata.shard_offsets
            for x, y in zip(mine, theirs, strict=True)
        )
    if isinstance(a, DTensor):
        return (
            isinstance(b, DTensor)
            and a.placements == b.placements
            and a.device_mesh == (b.device_mesh)
            and torch.equal(a.to_local(), b.to_local())
        )
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    return type(a) is type(b) and a == b


class RelayEnds:
    """`Relay` behind the two calls that the ring makes."""

    def __init__(self, group: Any) -> None:
        self.relay = tr.Relay(group, timeout=30)

    def send_checkpoint(self, ranks: list[int], state: object) -> None:
        self.relay.send(state, ranks)

    def recv_checkpoint(self, rank: int) -> object:
        return self.relay.recv(rank, shards="as_sent").state


def ends(kind: str, group: Any) -> Any:
    if kind == "relay":
        return RelayEnds(group)
    if kind == "stock":
        return StockTransport(group, TIMEOUT, CPU)
    return PGTransport(group, TIMEOUT, CPU, protocol=kind.removeprefix("dropin-"))


def ring(rank: int, group: Any, kind: str, content: str) -> bool:
    """Send to the next rank, receive from the one before; true if that is what it sent."""
    make = STATES[content]
    transport = ends(kind, group)
    state = make(rank)
    before, after = (rank - 1) % WORLD, (rank + 1) % WORLD
    if rank == 0:
        transport.send_checkpoint([after], state)
        got = transport.recv_checkpoint(before)
    else:
        got = transport.recv_checkpoint(before)
        transport.send_checkpoint([after], state)
    return _check(got, before, rank, content)


def _check(got: Any, before: int, rank: int, content: str) -> bool:
    if content != "sharded":
        return same(STATES[content](before), got)
    local = got["sharded"].local_shards()[0]
    start = before * 32
    values = torch.arange(start, start + 32, dtype=torch.float32).reshape(8, 4)
    return (
        torch.equal(local.tensor, values)
        and list(local.metadata.shard_offsets) == [before * 8, 0]
        and local.metadata.placement.rank() == rank
        and got["scalar"].item() == before
    )


@pytest.mark.parametrize(
    ("kind", "content"),
    [
        *product(("relay", "dropin-relay"), STATES),
        *product(("dropin-torch",), TORCH_STATES),
    ],
)
def test_ring(pool8: Any, kind: str, content: str) -> None:
    assert pool8.run(ring, kind, content, timeout=60) == [True] * WORLD


def with_stock(rank: int, group: Any, sender: str, receiver: str, content: str) -> bool:
    """Rank 0 sends by one implementation, rank 1 receives by another."""
    # All ranks make both: torch makes groups for a mesh where there are GPUs, which is collective.
    state, sent = STATES[content](rank), STATES[content](0)
    if rank == 0:
        ends(sender, group).send_checkpoint([1], state)
    elif rank == 1:
        return same(sent, ends(receiver, group).recv_checkpoint(0))
    return True


@pytest.mark.parametrize("content", TORCH_STATES)
@pytest.mark.parametrize(
    ("sender", "receiver"),
    [("stock", "dropin-relay"), ("stock", "dropin-torch"), ("dropin-torch", "stock")],
)
def test_talks_to_a_stock_peer(pool8: Any, sender: str, receiver: str, content: str) -> None:
    assert pool8.run(with_stock, sender, receiver, content, timeout=60, fresh_group=True) == (
        [True] * WORLD
    )


def replica_shard(rank: int, values: torch.Tensor) -> ShardedTensor:
    """The first of two shards, as the first rank of any replica has it. No collective call."""
    boxes = [
        ShardMetadata([0, 0], [8, 4], f"rank:{rank}/cpu"),
        ShardMetadata([8, 0], [8, 4], f"rank:{rank + 2}/cpu"),
    ]
    metadata = ShardedTensorMetadata(boxes, torch.Size([16, 4]), TensorProperties(torch.float32))
    return ShardedTensor._init_from_local_shards_and_global_metadata(
        [Shard(values, boxes[0])], metadata
    )


def in_place(rank: int, group: Any, sender: str) -> bool:
    """A replica's tensors are filled where they lie. Torch's protocol has no ShardedTensors."""
    sharded = sender == "dropin-relay"
    values = torch.arange(32, dtype=torch.float32).reshape(8, 4)
    if rank == 0:
        state: dict[str, Any] = {**model_state(0), "step": 7}
        if sharded:
            state["sharded"] = replica_shard(0, values)
        ends(sender, group).send_checkpoint([1], state)
    elif rank == 1:
        mine: dict[str, Any] = {**model_state(1), "step": 0}
        shard = torch.zeros(8, 4)
        if sharded:
            mine["sharded"] = replica_shard(1, shard)
        got: Any = PGTransport(group, TIMEOUT, CPU, lambda: mine).recv_checkpoint(0)
        return (
            got["step"] == 7
            and all(got[k].data_ptr() == mine[k].data_ptr() for k in model_state(0))
            and same(model_state(0), {k: got[k] for k in model_state(0)})
            and torch.equal(shard, values if sharded else torch.zeros(8, 4))
        )
    return True


@pytest.mark.parametrize("sender", ["stock", "dropin-torch", "dropin-relay"])
def test_in_place(pool8: Any, sender: str) -> None:
    assert pool8.run(in_place, sender, timeout=60, fresh_group=True) == [True] * WORLD
