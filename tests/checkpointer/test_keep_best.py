"""`KeepBest`: steps stay by a metric that was passed to their save."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

import torchrelay as tr
from tests.support.commands import command
from tests.support.ranks import RankPool
from torchrelay.errors import UsageError

STATE = {"w": torch.arange(4.0)}
LOSSES = {1: 0.9, 2: 0.4, 3: 0.6, 4: 0.5, 5: 0.8}


def repr_of(value: object) -> str:
    return type(value).__name__


def saved(root: Path, keep: Any, values: dict[int, float], name: str = "loss") -> list[int]:
    with tr.Checkpointer(root, keep=keep) as steps:
        for step, value in values.items():
            steps.save(step, STATE, metrics={name: value})
        return steps.steps()


def test_the_lowest_stay_and_the_newest(tmp_path: Path) -> None:
    assert saved(tmp_path, tr.KeepBest("loss", k=2), LOSSES) == [2, 4, 5]


def test_the_highest_stay(tmp_path: Path) -> None:
    assert saved(tmp_path, tr.KeepBest("loss", k=2, mode="max"), LOSSES) == [1, 5]


def test_together_with_the_last(tmp_path: Path) -> None:
    assert saved(tmp_path, tr.KeepBest("loss") | tr.KeepLast(2), LOSSES) == [2, 4, 5]


def test_of_equal_ones_the_newest(tmp_path: Path) -> None:
    values = {1: 0.5, 2: 0.5, 3: 0.5, 4: 0.9}
    assert saved(tmp_path, tr.KeepBest("loss"), values) == [3, 4]


def test_another_process_knows_the_metrics(tmp_path: Path) -> None:
    """They are in the record of each step, and not in the memory of who saved it."""
    saved(tmp_path, None, LOSSES)
    assert saved(tmp_path, tr.KeepBest("loss", k=2), {6: 0.45}) == [2, 6]


def test_steps_without_the_metric_are_not_the_best(tmp_path: Path) -> None:
    with tr.Checkpointer(tmp_path, keep=tr.KeepBest("loss")) as steps:
        steps.save(1, STATE, metrics={"loss": 3.0})
        steps.save(2, STATE)
        steps.save_async(3, STATE, metrics={"accuracy": 0.1}).result(60)
        assert steps.steps() == [1, 3]
        assert steps.record(3).saved.metrics == {"accuracy": 0.1}


def test_a_loss_that_is_not_finite_costs_no_step(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "torchrelay"):
        assert saved(tmp_path, tr.KeepBest("loss"), {1: float("nan"), 2: 0.5, 3: 0.9}) == [2, 3]
    assert "metric loss is nan" in caplog.text


def test_tensors_are_numbers(tmp_path: Path) -> None:
    with tr.Checkpointer(tmp_path) as steps:
        steps.save(1, STATE, metrics={"loss": torch.tensor(0.25)})  # type: ignore[dict-item]
        assert steps.record(1).saved.metrics == {"loss": 0.25}


def test_a_number_beyond_all_floats_costs_no_step(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "torchrelay"):
        assert saved(tmp_path, None, {1: 10**400, 2: -(10**5000)}) == [1, 2]
    assert "metric loss is inf" in caplog.text


class NoNumber:
    def __float__(self) -> float:
        raise KeyError("no")

    def __repr__(self) -> str:
        raise KeyError("no text either")


@pytest.mark.parametrize(
    "bad",
    [
        *({"loss": "0.5"}, {"loss": None}, {1: 0.5}, [0.5]),
        *({"lo\ud800ss": 0.5}, {10**5000: 0.5}, {"loss": [10**5000]}, {"loss": NoNumber()}),
    ],
    ids=repr_of,
)
def test_what_is_no_metric_is_refused(tmp_path: Path, bad: Any) -> None:
    with tr.Checkpointer(tmp_path) as steps:
        with pytest.raises(UsageError, match="metric"):
            steps.save(1, STATE, metrics=bad)
        assert steps.steps() == []
        steps.save(1, STATE, metrics={"loss": 1})  # and the next save is none the worse


@pytest.mark.parametrize("bad", [{"k": 0}, {"mode": "best"}])
def test_bad_policies(bad: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        tr.KeepBest("loss", **bad)


def test_ls_shows_them(tmp_path: Path) -> None:
    saved(tmp_path, None, {1: 0.5})
    assert "loss 0.5" in command("ls", str(tmp_path)).stdout
    found = json.loads(command("ls", str(tmp_path), "--json").stdout)
    assert found[0]["metrics"] == {"loss": 0.5}


def on_ranks(rank: int, group: Any, root: str) -> dict[str, float]:
    with tr.Checkpointer(root, group=group, timeout=60) as steps:
        steps.save(1, STATE, metrics={"loss": float(rank)})
        return steps.record(1).saved.metrics


def test_those_of_rank_0_count(pool2: RankPool, tmp_path: Path) -> None:
    assert pool2.run(on_ranks, str(tmp_path)) == [{"loss": 0.0}] * 2
