"""Modules, optimizers and other objects with `state_dict` in a state, for every door."""

from __future__ import annotations

import collections
import copy
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import torchrelay as tr
from tests.support.ranks import RankPool
from torchrelay.describing.snapshot import capture
from torchrelay.errors import MismatchError, UnsupportedLeafError
from torchrelay.state.objects import flatten_objects
from torchrelay.state.tree import unflatten


class Average:
    """An average of a model's weights; copies in place what it is told."""

    def __init__(self, model: nn.Module) -> None:
        self.kept = [p.detach().clone() for p in model.parameters()]
        self.count = 0

    def update(self, model: nn.Module) -> None:
        self.count += 1
        for mine, new in zip(self.kept, model.parameters(), strict=True):
            mine.lerp_(new.detach(), 0.5)

    def state_dict(self) -> dict[str, Any]:
        return {"kept": self.kept, "count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for mine, new in zip(self.kept, state["kept"], strict=True):
            mine.copy_(new)
        self.count = state["count"]


class Position:
    """Of a data loader: how much it has to say changes."""

    def __init__(self) -> None:
        self.rest: list[int] = []

    def state_dict(self) -> dict[str, Any]:
        return {"rest": list(self.rest)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.rest = list(state["rest"])


class Parts(NamedTuple):
    model: nn.Module
    optimizers: list[torch.optim.Optimizer]


def network(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 3, bias=False))


def job(seed: int, model: nn.Module | None = None) -> dict[str, Any]:
    """Objects in dicts, lists, tuples and namedtuples."""
    model = network(seed) if model is None else model
    first, *rest = model.parameters()
    optimizers = [
        torch.optim.AdamW([first], lr=0.05 * (seed + 1)),
        torch.optim.SGD(rest, lr=0.1, momentum=0.5),
    ]
    schedulers = tuple(torch.optim.lr_scheduler.StepLR(one, 2 + seed) for one in optimizers)
    position = Position()
    position.rest = list(range(3 + seed))
    return {
        "parts": Parts(model, optimizers),
        "beside": {"schedulers": schedulers, "average": Average(model)},
        "position": [position, seed],
        "epoch": seed,
    }


def train(state: dict[str, Any], steps: int) -> list[float]:
    parts: Parts = state["parts"]
    losses = []
    for step in range(steps):
        torch.manual_seed(step)
        loss = parts.model(torch.randn(4, 6)).square().mean()
        for optimizer in parts.optimizers:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in parts.optimizers:
            optimizer.step()
        for scheduler in state["beside"]["schedulers"]:
            scheduler.step()
        state["beside"]["average"].update(parts.model)
        losses.append(loss.item())
    return losses + [float(one.sum()) for one in state["beside"]["average"].kept]


def recover_a_job(rank: int, group: Any, atomic: bool, steps_before: int) -> Any:
    mine = job(rank)
    with tr.Relay(group, timeout=30) as relay:
        if rank == 0:
            train(mine, 3)
            relay.send(mine, to=1, step=3)
        else:
            train(mine, steps_before)
            model = mine["parts"].model
            places = [p.data_ptr() for p in model.parameters()]
            got = relay.recv(0, into=mine, step=3, atomic=atomic)
            assert got.state is mine and got.report.unexpected_keys == got.report.missing_keys == ()
            assert places == [p.data_ptr() for p in model.parameters()]
            assert mine["epoch"] == 0 and mine["position"][1] == 0
            assert mine["position"][0].rest == [0, 1, 2]
            assert mine["beside"]["average"].count == 3
    return train(mine, 3)


@pytest.mark.parametrize("atomic", [True, False])
@pytest.mark.parametrize("steps_before", [0, 2])
def test_a_relay_moves_a_job_of_nested_objects_in_one_transfer(
    pool2: RankPool, atomic: bool, steps_before: int
) -> None:
    """Into a new job (its optimizers have no state yet), or one that is under way."""
    there, here = pool2.run(recover_a_job, atomic, steps_before, timeout=120)
    assert there == here


@pytest.mark.parametrize("atomic", [True, False])
@pytest.mark.parametrize("steps_before", [0, 2])
def test_a_checkpoint_holds_a_job_of_nested_objects(
    tmp_path: Path, atomic: bool, steps_before: int
) -> None:
    first, other = job(0), job(1)
    train(first, 3)
    train(other, steps_before)
    with tr.Checkpointer(tmp_path) as held:
        held.save(3, first)
        loaded = held.load(into=other, atomic=atomic)
    assert loaded.state is other and other["epoch"] == 0
    assert other["position"][0].rest == [0, 1, 2] and other["beside"]["average"].count == 3
    assert train(first, 3) == train(other, 3)


@pytest.mark.parametrize("steps_before", [0, 1, 4])
def test_an_optimizer_with_lists_in_its_state(tmp_path: Path, steps_before: int) -> None:
    """LBFGS has lists of tensors, with None in them where it has not come to yet."""

    def begin(seed: int) -> tuple[nn.Module, torch.optim.LBFGS]:
        model = network(seed)
        return model, torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=1, history_size=6)

    def steps(model: nn.Module, optimizer: torch.optim.LBFGS, count: int) -> list[float]:
        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss: torch.Tensor = model(torch.ones(4, 6)).square().mean()
            loss.backward()
            return loss

        return [optimizer.step(closure).item() for _ in range(count)]

    first, other = begin(0), begin(1)
    steps(*first, 2)
    steps(*other, steps_before)
    with tr.Checkpointer(tmp_path) as held:
        held.save(2, first)
        held.load(into=other)
    assert steps(*first, 3) == steps(*other, 3)


def an_object_alone(rank: int, group: Any) -> None:
    state = job(rank)
    model, optimizers = state["parts"]
    with tr.Relay(group, timeout=30) as relay:
        for one in (model, optimizers[0], [optimizers, model]):
            if rank == 0:
                train(state, 1)
                relay.send(one, to=1)
                relay.send(one, to=1)
            else:
                assert relay.recv(0, into=one).state is one
                plain = relay.recv(0).state
                mine = unflatten(*flatten_objects(one)[0])
                torch.testing.assert_close(plain, mine, rtol=0, atol=0)


def test_an_object_or_a_list_of_them_is_a_state(pool2: RankPool) -> None:
    pool2.run(an_object_alone, timeout=120)


# FSDP2: two replicas of two ranks each.


@cache
def square() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))


def sharded_job(seed: int, mesh: DeviceMesh) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01 * (seed + 1))


def train_sharded(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> list[float]:
    losses = []
    for step in range(steps):
        torch.manual_seed(100 * (dist.get_rank() % 2) + step)
        loss = model(torch.randn(4, 6)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


class App:
    """torch's pattern for applications: model and optimizer behind one `state_dict`."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.both = model, optimizer

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(*self.both)
        return {"model": model, "optimizer": optimizer}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_state_dict(
            *self.both,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )


def recover_a_shard(rank: int, group: Any, form: str, atomic: bool, steps_before: int) -> Any:
    replica, mesh = rank // 2, square()["shard"]
    model, optimizer = sharded_job(replica, mesh)
    app = App(model, optimizer)
    train_sharded(model, optimizer, 3 if replica == 0 else steps_before)
    state: Any = {"model": model, "optimizer": optimizer, "step": 3}
    if form == "state dicts":
        state = app.state_dict()
    elif form == "raw":
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    elif form == "application":
        state = {"app": app}
    with tr.Relay(group, timeout=30) as relay:
        if replica == 0:
            relay.send(state, to=rank + 2, step=3)
        else:
            got = relay.recv(rank - 2, into=state, step=3, atomic=atomic)
            if form == "state dicts":
                app.load_state_dict(got.state)
            elif form == "raw":
                optimizer.load_state_dict(got.state["optimizer"])
    for one in optimizer.state.values():
        assert isinstance(one["exp_avg"], DTensor) and one["exp_avg"].device_mesh == mesh
        assert not isinstance(one["step"], DTensor)
    return train_sharded(model, optimizer, 3)


@pytest.mark.parametrize("atomic", [True, False])
@pytest.mark.parametrize(
    ("form", "steps_before"),
    [
        ("objects", 0),
        ("objects", 2),
        ("state dicts", 0),
        ("raw", 2),
        ("application", 0),
        ("application", 2),
    ],
)
def test_fsdp2_with_adamw_trains_on_after_one_transfer(
    pool4: RankPool, form: str, atomic: bool, steps_before: int
) -> None:
    losses = pool4.run(recover_a_shard, form, atomic, steps_before, timeout=180)
    assert losses[:2] == losses[2:]


def load_a_shard(rank: int, group: Any, folder: str, form: str, atomic: bool) -> Any:
    mesh = square()["shard"]
    model, optimizer = sharded_job(0, mesh)
    train_sharded(model, optimizer, 3)

    def state(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
        app = App(model, optimizer)
        return {"jobs": [{"m": model, "o": optimizer}] if form == "objects" else (app,)}

    with tr.Checkpointer(folder, group=group, timeout=30) as held:
        held.save(3, state(model, optimizer))
        other = sharded_job(1, mesh)
        held.load(into=state(*other), atomic=atomic)
    for one in other[1].state.values():
        assert isinstance(one["exp_avg"], DTensor) and not isinstance(one["step"], DTensor)
    return train_sharded(model, optimizer, 3), train_sharded(*other, 3)


@pytest.mark.parametrize("atomic", [True, False])
@pytest.mark.parametrize("form", ["objects", "application"])
def test_a_checkpoint_of_nested_fsdp2_objects(
    pool4: RankPool, tmp_path: Path, form: str, atomic: bool
) -> None:
    for saved, loaded in pool4.run(load_a_shard, str(tmp_path), form, atomic, timeout=180):
        assert saved == loaded


# What is an object, and what is not.


def test_taking_objects_apart_leaves_a_state_as_it_is() -> None:
    model = network(0)
    inner = {"w": torch.ones(2)}
    state = {"a": [model, inner], "kind": nn.Linear, "n": 1}
    flat, objects = flatten_objects(state)
    plain: Any = unflatten(*flat)
    assert state["a"] == [model, inner] and list(objects) == [("a", 0)]
    assert list(plain["a"][0]) == list(model.state_dict())
    assert plain["a"][1]["w"] is inner["w"] and plain["kind"] is nn.Linear


def test_what_an_object_has_in_it_is_its_own_affair() -> None:
    class Nested(Position):
        def state_dict(self) -> dict[str, Any]:
            return {"inner": Position()}

    with pytest.raises(tr.errors.UnsupportedLeafError, match=r"\['a'\]\['inner'\]"):
        capture({"a": Nested()}, objects=True)
    with pytest.raises(tr.errors.UnsupportedLeafError):
        capture({"a": Position()})


def test_a_state_in_itself_is_refused(tmp_path: Path) -> None:
    state: dict[str, Any] = {"model": network(0)}
    state["again"] = state
    with (
        tr.Checkpointer(tmp_path) as held,
        pytest.raises(tr.errors.UnsupportedLeafError, match="nested"),
    ):
        held.save(0, state)


def test_an_object_that_cannot_tell_its_state_is_named(tmp_path: Path) -> None:
    class Broken(Position):
        def state_dict(self) -> dict[str, Any]:
            raise RuntimeError("not now")

    with tr.Checkpointer(tmp_path) as held:
        with pytest.raises(tr.errors.UnsupportedLeafError, match="not now") as caught:
            held.save(0, {"a": [Broken()]})
        assert caught.value.path == "['a'][0]"


def test_an_object_that_nothing_is_stored_for_is_extra(tmp_path: Path) -> None:
    with tr.Checkpointer(tmp_path) as held:
        held.save(0, {"w": torch.ones(2)})
        into = {"w": torch.zeros(2), "at": Position()}
        with pytest.raises(tr.errors.MismatchError, match=r"not offered: \['at'\]"):
            held.load(into=into)
        assert not into["w"].any()
        assert held.load(into=into, strict=False).report.missing_keys == ("['at']",)


def test_an_optimizer_takes_less_than_it_has(tmp_path: Path) -> None:
    """One that has made steps becomes as new as the one that was saved."""
    model, other = network(0), network(1)
    new = torch.optim.AdamW(model.parameters(), lr=0.5)
    old = torch.optim.AdamW(other.parameters())
    other(torch.ones(6)).sum().backward()
    old.step()
    before = copy.deepcopy(other.state_dict())
    with tr.Checkpointer(tmp_path) as held:
        held.save(0, {"o": new})
        held.load(into={"o": old})
    assert not old.state and old.param_groups[0]["lr"] == 0.5
    torch.testing.assert_close(before, other.state_dict())


class Raises:
    """Has attributes that raise something else than AttributeError when they are looked at."""

    @property
    def state_dict(self) -> object:
        raise RuntimeError("not now")

    load_state_dict = state_dict


class RaisesLater:
    def state_dict(self) -> dict[str, int]:
        return {"x": 1}

    @property
    def load_state_dict(self) -> object:
        raise KeyError("never")


@pytest.mark.parametrize("kind", [Raises, RaisesLater])
def test_an_attribute_that_raises_is_refused_by_path(tmp_path: Path, kind: type) -> None:
    states: list[Any] = [{"a": [1, kind()]}, {"a": [1, collections.deque([kind()])]}]
    for step, state in enumerate(states):
        with tr.Checkpointer(tmp_path) as checkpointer:
            with pytest.raises(UnsupportedLeafError) as caught:
                checkpointer.save(step, state)
            assert (caught.value.path or "").startswith("['a'][1]")
            checkpointer.save(step, {"a": [1, {"x": 2}]})
            # A destination inside of another type is a leaf like any other.
            with pytest.raises(MismatchError if step else UnsupportedLeafError):
                checkpointer.load(state)
