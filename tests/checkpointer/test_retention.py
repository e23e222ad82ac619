"""Retention counts intact steps only, and looks at each of them once."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import torchrelay as tr
from tests.support.ranks import RankPool
from tests.support.s3 import S3
from tests.support.saved import state
from torchrelay.stores.local.root import StepRoot

FEW, MANY = 5, 40
_opened: list[str] = []


def opened_by_a_save(rank: int, group: Any, root: str, retained: int) -> int:
    """How many files of older steps a process opens for one more save."""
    if not _opened:
        sys.addaudithook(_note)
    root = f"{root}/{rank}"
    with tr.Checkpointer(root, no_dist=True, keep=tr.KeepLast(retained)) as ckpt:
        for step in range(retained + 1):
            ckpt.save(step, state(step))
        _opened[:] = ["hooked"]
        ckpt.save(retained + 1, state(0))
        assert ckpt.steps() == list(range(2, retained + 2))
        return len([path for path in _opened if f"step-{retained + 1}" not in path])


def _note(event: str, args: Any) -> None:
    if event in ("open", "os.scandir", "os.listdir") and "step-" in str(args[0]):
        _opened.append(str(args[0]))


def test_a_save_opens_as_many_files_with_many_retained_steps_as_with_few(
    pool2: RankPool, tmp_path: Path
) -> None:
    few, many = (
        pool2.run(opened_by_a_save, str(tmp_path / str(count)), count, timeout=120)[0]
        for count in (FEW, MANY)
    )
    assert many <= few, (few, many)


def test_a_save_lists_the_directory_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once before it begins, and once to see what may go."""
    listed = []
    names = StepRoot.names
    monkeypatch.setattr(StepRoot, "names", lambda self: listed.append(self) or names(self))
    with tr.Checkpointer(tmp_path, no_dist=True, keep=2) as ckpt:
        for step in range(3):
            ckpt.save(step, state(step))
        listed.clear()
        ckpt.save(3, state(3))
        assert len(listed) == 2
        assert ckpt.steps() == [2, 3]


def test_a_save_to_a_bucket_makes_as_many_requests_with_many_retained_steps_as_with_few(
    s3: S3,
) -> None:
    pytest.importorskip("obstore")
    made = []
    for retained in (FEW, MANY):
        with tr.Checkpointer(s3.url(f"run-{retained}"), keep=retained, timeout=60) as ckpt:
            for step in range(retained + 1):
                ckpt.save(step, {"w": torch.ones(3)})
            s3.requests.clear()
            ckpt.save(retained + 1, {"w": torch.ones(3)})
            made.append(len(s3.requests))
            assert ckpt.steps() == list(range(2, retained + 2))
    assert made[1] <= made[0], made


def test_a_step_that_was_checked_is_checked_again_when_the_listing_shows_another(
    tmp_path: Path,
) -> None:
    """Another process replaces a step by one that is not whole."""
    with tr.Checkpointer(tmp_path, no_dist=True, keep=3) as ckpt:
        for step in (1, 2, 3, 4):
            ckpt.save(step, state(step))
        assert ckpt.steps() == [2, 3, 4]
        other = tmp_path / "other"
        (tmp_path / "step-2").rename(other)
        (tmp_path / "step-2").mkdir()
        (tmp_path / "step-2" / "manifest.json").write_bytes((other / "manifest.json").read_bytes())
        ckpt.save(5, state(5))
        assert ckpt.steps() == [2, 3, 4, 5], "three good ones stay, and one that does not count"


def test_the_newest_steps_are_looked_at_each_time(tmp_path: Path) -> None:
    """A restart would take them."""
    with tr.Checkpointer(tmp_path, no_dist=True, keep=2) as ckpt:
        for step in (1, 2):
            ckpt.save(step, state(step))
        os.truncate(tmp_path / "step-2" / "model.safetensors", 9)
        ckpt.save(3, state(3))
        assert ckpt.steps() == [1, 2, 3]


def test_a_step_of_a_bucket_that_another_process_saved_again_counts(s3: S3) -> None:
    pytest.importorskip("obstore")
    with tr.Checkpointer(s3.url("run"), no_dist=True, keep=2, timeout=60) as ckpt:
        for step in (1, 2):
            ckpt.save(step, {"w": torch.ones(3)})
        with tr.Checkpointer(s3.url("run"), no_dist=True, timeout=60) as other:
            other.save(2, {"w": torch.ones(300)}, overwrite=True)
        ckpt.save(3, {"w": torch.ones(3)})
        assert ckpt.steps() == [2, 3]
