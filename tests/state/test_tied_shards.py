"""Tied parameters of a sharded module travel and rest once, and come back tied."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import torchrelay as tr
from tests.support.ranks import RankPool
from torchrelay.planning.stored import stored_tensors

SMALL = 3  # rows of the tied weight: fewer than four ranks, so that some have nothing of it


class Tied(nn.Module):
    def __init__(self, rows: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(rows, 4)
        self.body = nn.Linear(4, 4)
        self.head = nn.Linear(4, rows, bias=False)
        self.head.weight = self.embed.weight


def sharded(rows: int, value: float, mesh: DeviceMesh | None = None) -> Tied:
    model = Tied(rows)
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.copy_(torch.arange(parameter.numel()).view_as(parameter) + value + number)
    fully_shard(model, mesh=mesh or init_device_mesh("cpu", (dist.get_world_size(),)))
    return model


def holds(model: nn.Module, rows: int, value: float) -> bool:
    wanted, same = Tied(rows), True
    for number, (name, parameter) in enumerate(wanted.named_parameters()):
        whole = torch.arange(parameter.numel()).view_as(parameter) + value + number
        found = model.get_parameter(name)
        assert isinstance(found, DTensor)
        same = same and torch.equal(found.full_tensor(), whole)
    return same and model.head.weight is model.embed.weight


def is_tied(state: dict[str, torch.Tensor]) -> bool:
    one, other = state["embed.weight"], state["head.weight"]
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def saved(rank: int, group: Any, place: str, rows: int) -> list[Any]:
    """Save, and look at what was stored; load new tensors, and into a model of these ranks."""
    with tr.Checkpointer(f"{place}/{rows}", group=group, timeout=60) as checkpointer:
        checkpointer.save(1, {"model": sharded(rows, 1)})
        names = [tensor.name for tensor in stored_tensors(checkpointer.record(1))]
        new = checkpointer.load().state["model"]
        model = sharded(rows, 9)
        checkpointer.load({"model": model})
        return [names, is_tied(new), holds(model, rows, 1)]


STORED = ["model.body.bias", "model.body.weight", "model.embed.weight"]


def test_they_are_stored_once_and_come_back_tied(
    pool2: RankPool, pool4: RankPool, tmp_path: Path
) -> None:
    for rows in (8, SMALL):
        for pool in (pool2, pool4):
            place = str(tmp_path / str(pool.world_size))
            for names, *right in pool.run(saved, place, rows, timeout=90):
                assert sorted(names) == STORED
                assert right == [True, True]


def loaded(rank: int, group: Any, place: str, rows: int) -> bool:
    with tr.Checkpointer(f"{place}/{rows}", group=group, timeout=60) as checkpointer:
        model = sharded(rows, 9)
        checkpointer.load({"model": model})
        return holds(model, rows, 1)


def test_they_come_back_tied_on_other_numbers_of_ranks(
    pool2: RankPool, pool4: RankPool, tmp_path: Path
) -> None:
    for rows in (8, SMALL):
        pool4.run(saved, str(tmp_path), rows, timeout=90)
        assert pool2.run(loaded, str(tmp_path), rows, timeout=90) == [True, True]
        with tr.Checkpointer(tmp_path / str(rows)) as checkpointer:
            plain = Tied(rows)
            checkpointer.load({"model": plain})
            assert plain.head.weight is plain.embed.weight
            assert plain.head.weight.flatten().tolist() == [1.0 + n for n in range(4 * rows)]
            assert is_tied(checkpointer.load().state["model"])
            names = checkpointer.export_hf(tmp_path / f"hf-{rows}")
        exported = load_file(tmp_path / f"hf-{rows}" / names[0])
        assert sorted(f"model.{name}" for name in exported) == STORED


def served(rank: int, group: Any, rows: int) -> list[Any]:
    """Serve on all ranks, and pull on each of them alone."""
    model = sharded(rows, 1)
    with tr.serve({"model": model}, step=1, group=group, timeout=60) as endpoint:
        pulled = tr.pull(endpoint.url, timeout=60)
        tied, nbytes = is_tied(pulled.state["model"]), pulled.report.bytes
        into = sharded(rows, 9)
        tr.pull(endpoint.url, into={"model": into}, group=group, timeout=60)
        dist.barrier(group)
    return [tied, nbytes, holds(into, rows, 1)]


@pytest.mark.slow
def test_they_are_pulled_once(pool2: RankPool, pool4: RankPool) -> None:
    for rows in (8, SMALL):
        nbytes = sum(4 * parameter.numel() for parameter in Tied(rows).parameters())
        for pool in (pool2, pool4):
            found = pool.run(served, rows, timeout=100)
            assert found == [[True, nbytes, True]] * pool.world_size


def relayed(rank: int, group: Any, rows: int) -> list[Any]:
    """Ranks 0 and 1 send a model, ranks 2 and 3 have one like it: from the counterpart alone, from
    both ranks, and from both into new tensors."""
    meshes = [DeviceMesh("cpu", ranks) for ranks in ([0, 1], [2, 3])]
    sends = rank < 2
    model = sharded(rows, 1 if sends else 9, meshes[rank // 2])
    found: list[Any] = []
    with tr.Relay(group, timeout=60) as relay:
        if sends:
            relay.send({"model": model}, to=[rank + 2], step=1)
            relay.send({"model": model}, to=[2, 3], step=2)
            relay.send({"model": model}, to=[2, 3], step=3)
            return []
        relay.recv(rank - 2, into={"model": model}, step=1)
        found.append(holds(model, rows, 1))
        model = sharded(rows, 9, meshes[1])
        relay.recv([0, 1], into={"model": model}, step=2)
        found.append(holds(model, rows, 1))
        got = relay.recv([0, 1], step=3)
        nbytes = sum(4 * parameter.numel() for parameter in Tied(rows).parameters())
        return [*found, is_tied(got.state["model"]), got.report.bytes == nbytes]


def test_they_are_sent_once(pool4: RankPool) -> None:
    for rows in (8, 1):
        found = pool4.run(relayed, rows, timeout=100, fresh_group=True)
        assert found[2:] == [[True] * 4] * 2
