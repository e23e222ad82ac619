"""Modules that have more than tensors, of other kinds and sizes than a new module has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import torchrelay as tr
from tests.support.ways import by


class Scaled(nn.Linear):
    """Keeps a history that grows, as modules with low precision do: nothing before the first
    step, and then what `form` makes of it."""

    def __init__(self, form: str, refuses: bool = False) -> None:
        super().__init__(4, 4)
        self.form, self.refuses = form, refuses
        self.history: list[float] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = 1 / (1 + max(self.history, default=0.0))
        self.history.append(float(x.detach().abs().max()))
        return super().forward(x) * scale

    def get_extra_state(self) -> Any:
        history = torch.tensor(self.history, dtype=torch.float64)
        if self.form == "bytes":
            return history.view(torch.uint8) if self.history else torch.empty(0, dtype=torch.uint8)
        if self.form == "dict":
            return {"history": history, "length": len(self.history)} if self.history else None
        return tuple(self.history)

    def set_extra_state(self, state: Any) -> None:
        if self.form == "bytes":
            state = state.view(torch.float64).tolist()
        elif self.form == "dict":
            state = [] if state is None else state["history"].tolist()
        if self.refuses and len(state) == 3:
            raise RuntimeError("not that one")
        self.history = list(state)


class Model(nn.Module):
    def __init__(self, form: str, refuses: bool = False) -> None:
        super().__init__()
        self.first = Scaled(form)
        self.body = nn.Sequential(nn.ReLU(), Scaled(form, refuses))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.body(self.first(x))
        return found


def job(form: str, seed: int, **how: Any) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = Model(form, **how)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    return {"model": model, "optimizer": optimizer, "epoch": seed}


def train(state: dict[str, Any], steps: range) -> list[float]:
    losses = []
    for step in steps:
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(step)) * (step + 1)
        loss = (state["model"](x) - x).square().mean()
        state["optimizer"].zero_grad()
        loss.backward()
        state["optimizer"].step()
        losses.append(float(loss.detach()))
    return losses


FORMS = ["bytes", "dict", "tuple"]
every_form = pytest.mark.parametrize("form", FORMS)
either = pytest.mark.parametrize("atomic", [True, False])


@every_form
@either
@pytest.mark.parametrize("fresh", [True, False])
def test_a_load_into_a_module_with_another_history(
    tmp_path: Path, form: str, atomic: bool, fresh: bool
) -> None:
    there = job(form, 1)
    train(there, range(5))
    with tr.Checkpointer(tmp_path) as held:
        held.save(1, there)
        here = job(form, 2)
        if not fresh:
            train(here, range(20, 22))  # a history of another length
        parameters = list(here["model"].parameters())
        held.load(into=here, atomic=atomic)
        assert all(map(torch.equal, parameters, there["model"].parameters())), "in place"
        assert here["model"].body[1].history == there["model"].body[1].history
        wanted = train(there, range(5, 9))
        assert train(here, range(5, 9)) == wanted
        # And back to where it was saved: the history is shorter then.
        held.load(into=here, atomic=atomic)
        assert len(here["model"].first.history) == 5
        assert train(here, range(5, 9)) == wanted


@every_form
@either
def test_one_that_refuses_leaves_all_as_it_was(tmp_path: Path, form: str, atomic: bool) -> None:
    there = job(form, 1)
    train(there, range(3))
    here, twin = job(form, 2), job(form, 2)
    for one in (here, twin):
        train(one, range(2))
    here["model"].body[1].refuses = True
    with tr.Checkpointer(tmp_path) as held:
        held.save(1, there)
        error = tr.errors.MismatchError if atomic else tr.errors.TornStateError
        with pytest.raises(error, match="not that one"):
            held.load(into=here, atomic=atomic)
    here["model"].body[1].refuses = False
    if atomic:
        assert here["model"].first.history == twin["model"].first.history
        assert here["model"].body[1].history == twin["model"].body[1].history
        assert train(here, range(5, 8)) == train(twin, range(5, 8))


def test_a_history_that_nobody_saved_is_missed(tmp_path: Path) -> None:
    plain = nn.Linear(4, 4)
    with tr.Checkpointer(tmp_path) as held:
        held.save(1, {"model": plain})
        with pytest.raises(tr.errors.MismatchError, match="_extra_state"):
            held.load(into={"model": Scaled("dict")})
        got = held.load(into={"model": (module := Scaled("bytes"))}, strict=False)
        assert torch.equal(module.weight, plain.weight) and module.history == []
        assert "_extra_state" in "".join([*got.report.unexpected_keys, *got.report.missing_keys])


def test_it_goes_with_what_is_made_besides(tmp_path: Path) -> None:
    there = job("dict", 1)
    train(there, range(3))
    with tr.Checkpointer(tmp_path) as held:
        held.save(1, there)
        module = Model("dict")
        held.load(into={"model": module}, include="model.*", strict=False)
        assert module.first.history == there["model"].first.history


def passes(rank: int, group: Any, form: str, atomic: bool) -> Any:
    relay = tr.Relay(group, timeout=30)
    state = job(form, rank + 1)
    if rank == 0:
        train(state, range(5))
        relay.send(state, 1)
    else:
        train(state, range(20, 22))
        relay.recv(0, into=state, atomic=atomic)
    relay.close()
    return train(state, range(5, 9)), state["model"].first.history


@every_form
@either
def test_a_live_module(pool2: Any, form: str, atomic: bool) -> None:
    one, other = pool2.run(by, "memory", passes, form, atomic)
    assert one == other
