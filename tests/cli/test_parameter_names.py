"""The state of an optimizer is shown with the names of its parameters, where it has them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import torchrelay as tr
from tests.support.commands import command
from torchrelay.inspection.opened_state import PlainValue
from torchrelay.inspection.parameter_names import parameter_names


def trained(*, named: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
    if named:
        groups = [{"params": [*model[n].named_parameters(f"layer{n}")]} for n in range(2)]
        optimizer = torch.optim.AdamW(groups, lr=0.1)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return model, optimizer


def test_inspect_names_the_parameters_of_an_optimizer(tmp_path: Path) -> None:
    model, optimizer = trained(named=True)
    with tr.Checkpointer(tmp_path / "steps") as checkpointer:
        checkpointer.save(1, {"model": model, "optimizer": optimizer})
    shown = command("inspect", tmp_path / "steps")
    assert shown.returncode == 0, shown.stderr
    for number, name in enumerate(("0.weight", "0.bias", "1.weight", "1.bias")):
        assert f"── {number} (layer{name})" in shown.stdout
    some = command("inspect", tmp_path / "steps", "--include", "*.exp_avg", "--json")
    found = json.loads(some.stdout)
    assert found["parameters"] == {
        "optimizer.state.0": "layer0.weight",
        "optimizer.state.1": "layer0.bias",
        "optimizer.state.2": "layer1.weight",
        "optimizer.state.3": "layer1.bias",
    }
    only = command("inspect", tmp_path / "steps", "--include", "*.exp_avg")
    assert "3 (layer1.bias).exp_avg" in only.stdout


def test_in_a_stock_dcp_directory_too(tmp_path: Path) -> None:
    model, optimizer = trained(named=True)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    dcp.save(state, checkpoint_id=tmp_path / "stock", no_dist=True)
    shown = command("inspect", tmp_path / "stock")
    assert shown.returncode == 0, shown.stderr
    assert "── 2 (layer1.weight)" in shown.stdout


def test_numbers_without_names_stay_numbers(tmp_path: Path) -> None:
    model, optimizer = trained(named=False)
    with tr.Checkpointer(tmp_path / "steps") as checkpointer:
        checkpointer.save(1, {"model": model, "optimizer": optimizer})
    shown = command("inspect", tmp_path / "steps")
    assert shown.returncode == 0 and "── 0 " in shown.stdout and "── 0 (" not in shown.stdout
    assert json.loads(command("inspect", tmp_path / "steps", "--json").stdout)["parameters"] == {}


@pytest.mark.parametrize("root", ["", "optimizers.0.", "a.param_groups.b."])
def test_wherever_the_optimizer_is(root: str) -> None:
    group = f"{root}param_groups.1"
    values = [
        PlainValue(f"{group}.params.0", "7"),
        PlainValue(f"{group}.params.1", "8"),
        PlainValue(f"{group}.params.2", "9", ranks=2),
        PlainValue(f"{group}.param_names.0", "'a.b'"),
        PlainValue(f"{group}.param_names.1", "'" + "x" * 76 + "..."),
        PlainValue(f"{group}.param_names.2", "'c'"),
        PlainValue(f"{root}param_groups.0.params.0", "5"),
        PlainValue(f"{group}.lr", "0.1"),
    ]
    long = "x" * 76 + "..."
    assert parameter_names(values) == {f"{root}state.7": "a.b", f"{root}state.8": long}
