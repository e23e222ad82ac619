"""States of optimizers: which kind of optimizer takes which."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import torchrelay as tr
from torchrelay.state.tree import flatten


def trained(kind: Any, **options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(2, 2)
    optimizer = kind(model.parameters(), lr=0.1, **options)
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    return model, optimizer


@pytest.mark.parametrize("fresh", [True, False])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_the_state_of_another_kind_of_optimizer_is_refused(
    tmp_path: Path, momentum: float, fresh: bool
) -> None:
    _, there = trained(torch.optim.AdamW)
    model, here = trained(torch.optim.SGD, momentum=momentum)
    if fresh:
        here = torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)
    before = flatten(here.state_dict())
    with tr.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"o": there})
        with pytest.raises(
            tr.errors.MismatchError, match="another kind of optimizer than SGD"
        ) as caught:
            checkpointer.load({"o": here})
        assert "['o']['state'][0]['exp_avg']" in str(caught.value)
        assert "['o']['param_groups'][0]['betas']" in str(caught.value)
        assert "no step" not in str(caught.value)  # that is another fault
        assert caught.value.path == "['o']"
        assert before == flatten(here.state_dict())
        checkpointer.load({"o": here}, strict=False)  # as torch would
        assert "betas" in here.param_groups[0]


KINDS = ["Adadelta", "Adagrad", "Adam", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop"]
KINDS += ["SGD", "ASGD"]
ALIKE = [("RAdam", "Adam"), ("RAdam", "NAdam")]  # nothing in the first is foreign to the second


@pytest.mark.parametrize("kind", KINDS)
def test_only_the_state_of_the_same_kind_is_taken(tmp_path: Path, kind: str) -> None:
    """Also with a scheduler's entries, with options of the user's, and with fewer options, as an
    earlier torch would save it."""
    with tr.Checkpointer(tmp_path) as checkpointer:
        _, there = trained(getattr(torch.optim, kind))
        checkpointer.save(1, {"o": there})
        torch.optim.lr_scheduler.StepLR(there, 1)
        there.param_groups[0]["name"] = "all"
        checkpointer.save(2, {"o": there})
        older = there.state_dict()
        del older["param_groups"][0]["foreach"]
        checkpointer.save(3, {"o": older})
        for step in (1, 2, 3):
            checkpointer.load({"o": trained(getattr(torch.optim, kind))[1]}, step=step)
        for other in KINDS:
            if other == kind or (kind, other) in ALIKE:
                continue
            with pytest.raises(tr.errors.MismatchError, match="another kind of optimizer"):
                checkpointer.load({"o": trained(getattr(torch.optim, other))[1]}, step=1)


def test_adam_and_adamw_have_one_state(tmp_path: Path) -> None:
    with tr.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"o": trained(torch.optim.Adam)[1]})
        checkpointer.load({"o": trained(torch.optim.AdamW, amsgrad=True)[1]})
