"""Ranks whose roots are not one directory: each call says so, at once and with both paths."""

from __future__ import annotations

import errno
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import torchrelay as tr
from tests.support.ranks import RankPool
from tests.support.ways import patched
from torchrelay.loading import loader
from torchrelay.stores.local import draft
from torchrelay.stores.local.root import StepRoot

SECONDS = 60.0


def told(call: Callable[[], Any]) -> str:
    begun = time.monotonic()
    try:
        call()
    except tr.errors.CheckpointError as fault:
        assert time.monotonic() - begun < SECONDS / 3, "it was found out at the deadline"
        return str(fault)
    return "ok"


def save_apart(rank: int, group: Any, root: str, replicated: bool) -> list[str]:
    """A local directory in place of a shared one. Rank 1 may have nothing of its own to write."""
    state = {"w": torch.ones(4)} if replicated else {"w": torch.full((4,), float(rank))}
    with (
        patched(draft, VISIBLE_SECONDS=0.2),
        tr.Checkpointer(f"{root}/host-{rank}", timeout=SECONDS) as ckpt,
    ):
        found = [
            told(lambda: ckpt.save(1, state)),
            told(lambda: ckpt.save_async(2, state).result(SECONDS)),
        ]
        assert ckpt.steps() == []
    return found


@pytest.mark.parametrize("replicated", [pytest.param(True, marks=pytest.mark.slow), False])
def test_a_save_to_roots_that_are_not_shared_says_so(
    pool2: RankPool, tmp_path: Path, replicated: bool
) -> None:
    for texts in pool2.run(save_apart, str(tmp_path), replicated, timeout=120):
        for text in texts:
            assert "rank 1 does not see" in text and "shared file system" in text, text
            assert f"{tmp_path}/host-0/step-" in text and f"{tmp_path}/host-1" in text, text
    assert list(tmp_path.glob("host-*/step-*")) == []


def load_apart(rank: int, group: Any, root: str) -> list[str]:
    if rank == 0:
        with tr.Checkpointer(f"{root}/host-0", no_dist=True) as ckpt:
            ckpt.save(5, {"w": torch.ones(4)})
    with (
        patched(loader, VISIBLE_SECONDS=0.2),
        tr.Checkpointer(f"{root}/host-{rank}", timeout=SECONDS) as ckpt,
    ):
        return [told(lambda: ckpt.load(step=5)), told(ckpt.load)]


def test_a_load_from_roots_that_are_not_shared_says_so(pool2: RankPool, tmp_path: Path) -> None:
    for texts in pool2.run(load_apart, str(tmp_path), timeout=120):
        for text in texts:
            assert "rank 1 does not see" in text and "shared file system" in text, text
            assert f"{tmp_path}/host-0/step-5" in text and f"{tmp_path}/host-1" in text, text


def load_late(rank: int, group: Any, root: str, looks: int) -> list[int]:
    """Rank 1 sees a step only after a while, as on a network file system right after a save."""
    if rank == 0:
        with tr.Checkpointer(root, no_dist=True) as ckpt:
            ckpt.save(5, {"w": torch.ones(4)})
    found, left, existing = [], looks, StepRoot.existing

    def late(self: StepRoot, step: int) -> Path:
        nonlocal left
        if rank == 1 and left:
            left -= 1
            raise FileNotFoundError(errno.ENOENT, "no such directory", str(self.path))
        return existing(self, step)

    with (
        patched(StepRoot, existing=late),
        patched(loader, PAUSES=(0.001, 0.01)),
        tr.Checkpointer(root, timeout=SECONDS) as ckpt,
    ):
        found.append(ckpt.load(step=5).step)
        left = looks
        found.append(ckpt.load().step)
    return found


def test_a_load_waits_for_a_step_that_a_rank_does_not_see_yet(
    pool2: RankPool, tmp_path: Path
) -> None:
    assert pool2.run(load_late, str(tmp_path), 15, timeout=120) == [[5, 5]] * 2


def test_no_space_says_how_much_the_steps_that_are_retained_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 5_000_000})())
    state = {"w": torch.zeros(1_000_000)}  # 4 MB, and 1 MB is always left free
    for keep, need in ((3, "16,"), (tr.KeepLast(1), "8,"), (None, "never removed")):
        with (
            tr.Checkpointer(tmp_path, no_dist=True, keep=keep) as ckpt,
            pytest.raises(tr.errors.CheckpointError, match=r"no space") as caught,
        ):
            ckpt.save(1, state)
        assert need in str(caught.value) and str(tmp_path) in str(caught.value), caught.value
        assert "keep=" in str(caught.value)
