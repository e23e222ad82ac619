"""A rank whose file system does not show a step yet: no rank waits for it alone, and none starts
from the beginning."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import torchrelay as tr
from tests.support.ranks import RankPool

ROOT = Path(__file__).parents[2]
PATIENCE = 60.0


def resume(checkpointer: tr.Checkpointer, group: Any) -> tuple[str, int]:
    """As the guides do it: the step, or the error."""
    state: dict[str, Any] = {"w": torch.zeros(4), "step": 0}
    try:
        got = tr.recover(into=state, sources=[checkpointer], group=group, timeout=PATIENCE)
    except tr.errors.RelayError as fault:
        assert state["step"] == 0 and not state["w"].any()
        return type(fault).__name__, 0
    return "" if got is not None else "a first start", state["step"]


def start(rank: int, group: Any, root: str, lags: int) -> list[tuple[str, int]]:
    """A first start; a start at which one rank does not see the step; one at which both do."""
    found = []
    with tr.Checkpointer(root, group=group, timeout=PATIENCE) as checkpointer:
        found.append(resume(checkpointer, group))
        checkpointer.save(3, {"w": torch.ones(4), "step": 3})
        store = checkpointer._store
        dist.barrier(group)
        with pytest.MonkeyPatch.context() as lagging:
            if rank == lags:
                lagging.setattr(store, "steps", list)
            assert (checkpointer.latest() is None) == (rank == lags)
            found.append(resume(checkpointer, group))  # ranks that do not meet have another error
        found.append(resume(checkpointer, group))
    return found


@pytest.mark.parametrize("lags", [0, 1])
def test_ranks_decide_together(pool2: RankPool, tmp_path: Path, lags: int) -> None:
    one, other = pool2.run(start, str(tmp_path / "run"), lags, timeout=100)
    assert one == other
    assert one == [("a first start", 0), ("RecoveryError", 0), ("", 3)]


def test_no_page_or_example_has_one_rank_decide_alone() -> None:
    """Whether a job resumes is decided by all ranks, and pages are copied."""
    alone = re.compile(r"if .*\.(latest|steps)\(\)")
    pages = [ROOT / "README.md", *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/**/*.py")]
    assert len(pages) > 20
    assert [str(page) for page in pages if alone.search(page.read_text())] == []
