"""`torchrelay diff --expect-frozen`: paths that must not change, whatever others do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import torchrelay as tr
from tests.support.commands import command


def states() -> tuple[dict[str, Any], dict[str, Any]]:
    before = {"backbone": {"w": torch.ones(300), "n": 1}, "head": {"w": torch.ones(3)}, "step": 1}
    after = {"backbone": {"w": torch.ones(300), "n": 1}, "head": {"w": torch.zeros(3)}, "step": 2}
    return before, after


@pytest.fixture
def save(tmp_path: Path) -> Any:
    def saved(before: object, after: object) -> tuple[str, str]:
        with tr.Checkpointer(tmp_path, no_dist=True) as checkpointer:
            checkpointer.save(1, before)
            checkpointer.save(2, after)
        return str(tmp_path / "step-1"), str(tmp_path / "step-2")

    return saved


def test_what_is_not_frozen_may_change(save: Any) -> None:
    one, other = save(*states())
    assert command("diff", one, other, "--values").returncode == 1
    done = command("diff", one, other, "--expect-frozen", "backbone")
    assert done.returncode == 0 and done.stdout.endswith("\n0 frozen paths changed\n")


def test_one_bit_of_a_frozen_tensor(save: Any) -> None:
    before, after = states()
    after["backbone"]["w"].view(torch.int32)[123] ^= 1
    one, other = save(before, after)
    done = command("diff", one, other, "--expect-frozen", "backbone.*", "--expect-frozen", "nose")
    assert done.returncode == 1
    assert "1 of 300 elements" in done.stdout
    assert done.stdout.endswith("\n1 frozen path changed: backbone.w\n")
    facts = json.loads(command("diff", one, other, "--expect-frozen", "backbone", "--json").stdout)
    assert facts["thawed"] == ["backbone.w"]
    assert [one["path"] for one in facts["distances"]] == ["backbone.w"]


@pytest.mark.parametrize(
    ("change", "path"),
    [
        (lambda after: after["backbone"].pop("w"), "backbone.w"),
        (lambda after: after["backbone"].update(extra=torch.ones(1)), "backbone.extra"),
        (lambda after: after["backbone"].update(w=torch.ones(3, 100)), "backbone.w"),
        (lambda after: after["backbone"].update(n=2), "backbone.n"),
    ],
)
def test_structure_and_values_are_frozen_too(save: Any, change: Any, path: str) -> None:
    before, after = states()
    change(after)
    done = command("diff", *save(before, after), "--expect-frozen", "backbone")
    assert done.returncode == 1 and f"1 frozen path changed: {path}\n" in done.stdout


def test_a_pattern_that_matches_nothing_is_refused(save: Any) -> None:
    done = command("diff", *save(*states()), "--expect-frozen", "bakcbone.*")
    assert done.returncode == 2
    assert "--expect-frozen bakcbone.* matches no path; the state has backbone" in done.stderr
