"""A save compares what ranks hold in common by all of its bytes, and says which ranks differ."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import torchrelay as tr
from tests.support.ranks import RankPool
from torchrelay.results import Differing


def flip(tensor: torch.Tensor, bit: int = 3) -> None:
    """Flips one bit of a tensor, whatever its dtype is."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    local.detach().view(-1).view(torch.uint8)[bit // 8].bitwise_xor_(1 << bit % 8)


def in_ddp(rank: int, group: Any, folder: str) -> None:
    torch.manual_seed(0)
    net = DistributedDataParallel(torch.nn.Linear(300, 300), process_group=group)
    optimizer = torch.optim.AdamW(net.parameters())
    net(torch.ones(2, 300)).sum().backward()
    optimizer.step()
    own = torch.zeros(100_000)
    own[123 + rank] = rank + 1  # mostly zero, as an error feedback is
    state = {"model": net, "optimizer": optimizer, "rng": torch.full((8,), rank), "own": own}
    with tr.Checkpointer(folder, group=group) as checkpointer:
        assert checkpointer.save(1, state).differing == ()
        before = net.module.weight.detach().clone()
        if rank == 1:
            flip(net.module.weight)
            flip(optimizer.state[net.module.bias]["exp_avg"])
        report = checkpointer.save_async(2, state).result()
        found = (
            Differing("model.weight", "parameter", (0, 1)),
            Differing("optimizer.state.1.exp_avg", "optimizer state", (0, 1)),
        )
        assert report.differing == found
        assert "replicas differ: model.weight (parameter) on ranks 0, 1" in str(report)
        mine = net.module.weight.detach().clone()
        assert torch.equal(mine, before) == (rank == 0)
        checkpointer.load(state, step=2)  # both are kept: each rank has its own again
        assert torch.equal(net.module.weight, mine)
        assert own[123 + rank] == rank + 1 and own.sum() == rank + 1
        checkpointer.load(state, step=1)
        assert torch.equal(net.module.weight, before)


def test_ddp(pool2: RankPool, tmp_path: Path) -> None:
    pool2.run(in_ddp, str(tmp_path))


def with_distributed_tensors(rank: int, group: Any, folder: str) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    whole = torch.arange(35.0).reshape(7, 5)
    state = {
        "hsdp": distribute_tensor(whole, mesh, [Replicate(), Shard(0)]),
        "all": distribute_tensor(whole + 1, mesh, [Replicate(), Replicate()]),
        "tp": distribute_tensor(whole + 2, mesh, [Shard(1), Replicate()]),
        "sharded": distribute_tensor(whole + 3, mesh, [Shard(0), Shard(1)]),
        "rng": torch.full((8,), rank),
    }
    with tr.Checkpointer(folder, group=group) as checkpointer:
        assert checkpointer.save(1, state).differing == ()
        if rank == 1:
            flip(state["all"])
        if rank == 3:
            flip(state["hsdp"])
            flip(state["sharded"])
        expected = (
            Differing("all", "DTensor", (1,)),
            Differing("hsdp", "DTensor", (1, 3)),  # ranks 0 and 2 have the other shard
        )
        for step in (2, 3):  # the second one finds a plan that is known
            assert checkpointer.save(step, state).differing == expected
        loaded = checkpointer.load(step=2).state
    assert torch.equal(loaded["all"], whole + 1)  # the value of the most
    assert torch.equal(loaded["hsdp"], whole)  # of two, that of the lowest rank
    assert torch.equal(loaded["tp"], whole + 2)
    with tr.Checkpointer(folder, group=group) as checkpointer:
        if rank == 1:
            flip(state["all"])
        if rank == 0:
            flip(state["all"])
        assert checkpointer.save(4, state).differing[0] == Differing("all", "DTensor", (0,))
        assert torch.equal(checkpointer.load(step=4).state["all"], whole + 1)
        torch.distributed.barrier(group)


def test_distributed_tensors(pool4: RankPool, tmp_path: Path) -> None:
    pool4.run(with_distributed_tensors, str(tmp_path))


def in_hsdp(rank: int, group: Any, folder: str) -> None:
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    net = fully_shard(torch.nn.Linear(5, 7), mesh=mesh)
    optimizer = torch.optim.AdamW(net.parameters())
    net(torch.ones(2, 5)).sum().backward()
    optimizer.step()
    state = {"model": net, "optimizer": optimizer}
    with tr.Checkpointer(folder, group=group) as checkpointer:
        assert checkpointer.save(1, state).differing == ()
        if rank == 2:
            flip(optimizer.state[net.weight]["exp_avg_sq"])
            flip(optimizer.state[net.bias]["step"])
        assert checkpointer.save(2, state).differing == (
            Differing("optimizer.state.0.exp_avg_sq", "DTensor", (0, 2)),
            Differing("optimizer.state.1.step", "optimizer state", (2,)),
        )
    with tr.Checkpointer(folder + "-part", group=mesh["shard"].get_group()) as checkpointer:
        if rank < 2:
            assert checkpointer.save(1, state).differing == ()  # no rank has a replica


def test_hsdp(pool4: RankPool, tmp_path: Path) -> None:
    pool4.run(in_hsdp, str(tmp_path))


def in_a_part_of_the_ranks(rank: int, group: Any, folder: str) -> None:
    """A mesh that not all ranks are in."""
    some = DeviceMesh("cpu", [1, 3])
    tensor = DTensor.from_local(torch.ones(3), some, [Replicate()], run_check=False)
    with tr.Checkpointer(folder, group=group) as checkpointer:
        assert checkpointer.save(1, {"w": tensor}).differing == ()
        if rank == 3:
            flip(tensor)
        assert checkpointer.save(2, {"w": tensor}).differing == (Differing("w", "DTensor", (1, 3)),)
        assert torch.equal(checkpointer.load(step=2).state["w"], torch.ones(3))


def test_a_mesh_that_some_ranks_are_not_in(pool4: RankPool, tmp_path: Path) -> None:
    pool4.run(in_a_part_of_the_ranks, str(tmp_path))
