"""What one rank alone has saved, and others want to load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import torchrelay as tr
from tests.support.ranks import RankPool


def load_what_one_rank_has(rank: int, group: Any, root: str) -> list[str]:
    """Rank 0 alone saves a scheduler, and later a whole state; all ranks want to load them."""
    told = []
    with tr.Checkpointer(root, timeout=60) as ckpt:
        own = {"scheduler": {"last": 5, "lr": torch.ones(2)}} if rank == 0 else {}
        ckpt.save(1, {"w": torch.ones(3), **own})
        ckpt.save(2, {"w": torch.ones(3)} if rank == 0 else {})
        for step, into in (
            (1, {"w": torch.zeros(3), "scheduler": {"last": 0, "lr": torch.zeros(2)}}),
            (2, {"w": torch.zeros(3)}),
        ):
            with pytest.raises(tr.errors.MismatchError) as caught:
                ckpt.load(into, step=step)
            told.append(str(caught.value))
    return told


def test_a_state_that_only_rank_0_saved_says_so_at_load_on_the_others(
    pool2: RankPool, tmp_path: Path
) -> None:
    for scheduler, state in pool2.run(load_what_one_rank_has, str(tmp_path), timeout=90):
        for text, path in ((scheduler, "['scheduler']['last']"), (state, "['w']")):
            assert "only rank 0 saved" in text and path in text and "rank 1" in text, text
