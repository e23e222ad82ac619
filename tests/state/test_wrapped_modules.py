"""A module that torch.compile or DistributedDataParallel has wrapped is stored, served and sent
under the names that it has without the wrappers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import torchrelay as tr
from tests.support.ranks import RankPool
from torchrelay.planning.stored import stored_tensors

NAMES = ["extra._extra_state", "extra.scale", "layers.0.bias", "layers.0.weight", "module.weight"]


class Extra(nn.Module):
    """Has something beside its tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))
        self.note = "new"

    def get_extra_state(self) -> Any:
        return {"note": self.note}

    def set_extra_state(self, state: Any) -> None:
        self.note = state["note"]


class Model(nn.Module):
    """One of its own parts has a name like that of a wrapper's."""

    def __init__(self, value: float = 0.0) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(3, 3)])
        self.module = nn.Linear(3, 2, bias=False)
        self.extra = Extra()
        with torch.no_grad():
            for number, parameter in enumerate(self.parameters()):
                parameter.fill_(value + number)
        self.extra.note = f"of {value}"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x) * self.extra.scale
        return self.module(x)


def layers_compiled(model: Model) -> Model:
    model.layers[0] = torch.compile(model.layers[0])
    return model


WRAPPERS: dict[str, Callable[[Model], nn.Module]] = {
    "plain": lambda model: model,
    "compiled": torch.compile,
    "layers": layers_compiled,
    "ddp": DistributedDataParallel,
    "ddp of compiled": lambda model: DistributedDataParallel(torch.compile(model)),
    "compiled ddp": lambda model: torch.compile(DistributedDataParallel(layers_compiled(model))),
}


@pytest.fixture(scope="module", autouse=True)
def group() -> Iterator[None]:
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def job(way: str, value: float) -> tuple[Model, dict[str, Any]]:
    """A model, and a state of it in its wrappers with an optimizer that has made a step."""
    model = Model(value)
    wrapped = WRAPPERS[way](model)
    optimizer = torch.optim.AdamW(wrapped.named_parameters(), lr=0.1)
    for number, parameter in enumerate(model.parameters()):
        parameter.grad = torch.full_like(parameter, value + number)
    optimizer.step()
    return model, {"model": wrapped, "optimizer": optimizer}


def facts(model: Model, state: dict[str, Any]) -> tuple[list[float], str, list[float]]:
    moments = [held["exp_avg"].mean().item() for held in state["optimizer"].state.values()]
    return [p.mean().item() for p in model.parameters()], model.extra.note, moments


@pytest.mark.parametrize("there", WRAPPERS)
def test_they_are_stored_without_prefixes_and_loaded_either_way(there: str, tmp_path: Path) -> None:
    model, state = job(there, 5)
    with tr.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, state)
        tree = checkpointer.load(step=1).state
        assert sorted(tree["model"]) == NAMES
        named = [name for name in NAMES if "_extra" not in name]
        assert sorted(tree["optimizer"]["param_groups"][0]["param_names"]) == named
        names = {tensor.name for tensor in stored_tensors(checkpointer.record(1))}
        assert {f"model.{name}" for name in named} <= names
        for here in WRAPPERS:
            other, into = job(here, 8)
            own = list(into["optimizer"].param_groups[0]["param_names"])
            checkpointer.load(into)
            assert facts(other, into) == facts(model, state), here
            assert into["optimizer"].param_groups[0]["param_names"] == own, here


@pytest.mark.parametrize("there", WRAPPERS)
def test_a_state_dict_with_prefixes_fills_a_module(there: str, tmp_path: Path) -> None:
    """A dict is kept as it is. As a module's state it counts without the names of wrappers."""
    model, state = job(there, 5)
    with tr.Checkpointer(tmp_path) as checkpointer:
        dicts = {name: held.state_dict() for name, held in state.items()}
        checkpointer.save(1, dicts)
        assert list(checkpointer.load(step=1).state["model"]) == list(dicts["model"])
        for here in WRAPPERS:
            other, into = job(here, 8)
            own = list(into["optimizer"].param_groups[0]["param_names"])
            checkpointer.load(into)
            assert facts(other, into) == facts(model, state), here
            assert into["optimizer"].param_groups[0]["param_names"] == own, here


def test_served_and_pulled() -> None:
    model, state = job("compiled ddp", 5)
    with tr.serve(state, step=1, timeout=60) as endpoint:
        assert sorted(tr.pull(endpoint.url, timeout=60).state["model"]) == NAMES
        other, into = job("layers", 8)
        tr.pull(endpoint.url, into=into, timeout=60)
    assert facts(other, into) == facts(model, state)


def relayed(rank: int, group: Any, there: str, here: str) -> Any:
    model, state = job(here if rank else there, 8 if rank else 5)
    with tr.Relay(group, timeout=30) as relay:
        for step, source in enumerate((0, [0])):
            if rank:
                relay.recv(source, into=state, step=step)
            else:
                relay.send(state, to=[1], step=step)
    return facts(model, state)


def test_sent_and_received(pool2: RankPool) -> None:
    for there, here in (("compiled", "plain"), ("plain", "layers"), ("ddp", "compiled ddp")):
        one, other = pool2.run(relayed, there, here, timeout=60)
        assert one == other


def test_what_a_wrapped_module_lacks_is_named(tmp_path: Path) -> None:
    _, state = job("ddp", 5)
    with tr.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"model": state["model"].module.layers})
        with pytest.raises(tr.errors.MismatchError, match=r"layers\.0\.weight"):
            checkpointer.load({"model": state["model"]})
