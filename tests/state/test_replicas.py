"""What counts as a replica: only what the state says is one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from tests.support.ranks import RankPool
from torchrelay.coordination.groups import members_of
from torchrelay.describing.at_rest import describe
from torchrelay.state.replicas import DeclaredReplicas


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.module = torch.nn.Linear(2, 2)  # a name that wrappers use, too
        self.norm = torch.nn.BatchNorm1d(2)
        self.synced = torch.nn.BatchNorm1d(2)
        self.register_buffer("table", torch.ones(3))
        self.tied = self.module.weight


def found(state: Any, *named: str) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Kind and ranks of the replicas of a state, by name."""
    described = describe(state)
    declared = DeclaredReplicas(described.objects, named, members_of)
    pairs = zip(described.names, map(declared.of, described.paths), strict=True)
    return {name: tuple(one) for name, one in pairs if one is not None}


def stepped(net: torch.nn.Module, kind: Any = torch.optim.AdamW) -> torch.optim.Optimizer:
    optimizer: torch.optim.Optimizer = kind(net.parameters(), lr=0.1)
    for one in net.parameters():
        one.grad = torch.ones_like(one)
    optimizer.step()
    return optimizer


MODEL = {
    "tied": "parameter",  # the first name of module.weight
    "module.bias": "parameter",
    "norm.weight": "parameter",
    "norm.bias": "parameter",
    "norm.num_batches_tracked": "buffer",
    "synced.weight": "parameter",
    "synced.bias": "parameter",
    "synced.running_mean": "buffer",
    "synced.running_var": "buffer",
    "synced.num_batches_tracked": "buffer",
    "table": "buffer",
}


def in_a_wrapped_module(rank: int, group: Any) -> None:
    everyone = tuple(range(2))
    net = DistributedDataParallel(Net(), process_group=group)
    net.module.synced.__class__ = torch.nn.SyncBatchNorm  # which is refused without a GPU
    state = {"model": net, "optimizer": stepped(net), "rng": torch.get_rng_state(), "at": [rank]}
    expected = {f"model.{name}": (kind, everyone) for name, kind in MODEL.items()}
    expected |= {
        f"optimizer.state.{n}.{key}": ("optimizer state", everyone)
        for n in range(6)
        for key in ("step", "exp_avg", "exp_avg_sq")
    }
    assert found(state) == expected, found(state).keys() ^ expected.keys()
    # The same module, in another wrapper, alone, or within others.
    compiled = torch.compile(net)
    assert found({"model": compiled}).keys() == {f"model.{name}" for name in MODEL}
    assert found(net).keys() == MODEL.keys()
    outer = torch.nn.ModuleDict({"a": net, "own": torch.nn.Linear(2, 2)})
    assert found(outer).keys() == {f"a.{name}" for name in MODEL}
    bare = {"bare": net.module, "wrapped": net}
    assert {name for name in found(bare) if name.startswith("bare")} == {
        f"bare.{name}" for name, kind in MODEL.items() if kind == "parameter"
    }


def test_a_wrapped_module_and_its_optimizer(pool2: RankPool) -> None:
    pool2.run(in_a_wrapped_module)


def in_groups(rank: int, group: Any) -> None:
    pairs = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    net = DistributedDataParallel(torch.nn.Linear(2, 2), process_group=pairs[rank % 2])
    ranks = (rank % 2, rank % 2 + 2)
    assert set(found({"stage": net}).values()) == {("parameter", ranks)}


def test_the_ranks_are_those_of_its_process_group(pool4: RankPool) -> None:
    pool4.run(in_groups)


def with_ignored(rank: int, group: Any) -> None:
    net = Net()
    ignored = ["norm.weight", "table"]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(net, ignored)
    wrapped = DistributedDataParallel(net, process_group=group)
    state = {"model": wrapped, "optimizer": stepped(wrapped, torch.optim.Adagrad)}
    names = found(state)
    own = ["norm.weight", "table", "synced.running_mean", "synced.running_var"]
    assert {f"model.{one}" for one in MODEL} - names.keys() == {f"model.{one}" for one in own}
    number = [name for name, _ in net.named_parameters()].index("norm.weight")
    assert f"optimizer.state.{number}.sum" not in names
    assert f"optimizer.state.{number + 1}.sum" in names


def test_what_the_wrapper_ignores_is_no_replica(pool2: RankPool) -> None:
    pool2.run(with_ignored)


@pytest.fixture
def net() -> Iterator[Net]:
    yield Net()


def test_without_a_wrapper_nothing_counts(net: Net) -> None:
    state = {"model": net, "optimizer": stepped(net), "dict": net.state_dict(), "w": torch.ones(2)}
    assert found(state) == {}


def test_what_the_caller_names_counts(net: Net) -> None:
    state = {"model": net.state_dict(), "rng": torch.get_rng_state(), "extra": {"a": torch.ones(2)}}
    names = found(state, "model", "extra.*")
    assert set(names.values()) == {("named", ())}
    assert "rng" not in names and {"model.table", "extra.a"} <= names.keys()
