"""A first start is not a recovery that is impossible: a job must not begin at step 0 because its
steps cannot be reached."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import torchrelay as tr
from tests.keeper.jobs import end_keepers
from tests.recovery.test_recover import Job, damage, saved
from tests.support.access import access
from tests.support.ranks import RankPool

TOKEN = "correct-horse-battery-staple"


def why_not(**options: Any) -> tr.errors.RelayError:
    """The error of a recovery that is not a first start."""
    before = Job().model.state_dict()
    job = Job()
    with pytest.raises(tr.errors.RelayError) as caught:
        tr.recover(into=job.state(), no_dist=True, timeout=20, **options)
    after = job.model.state_dict()
    assert all(torch.equal(value, after[name]) for name, value in before.items())
    return caught.value


def test_sources_that_are_empty_are_a_first_start(tmp_path: Path) -> None:
    job = f"first-{os.getpid()}"
    (tmp_path / "empty").mkdir()
    try:
        with (
            tr.Checkpointer(tmp_path / "run", no_dist=True) as checkpointer,
            tr.Keeper(job, no_dist=True, timeout=60) as keeper,
        ):
            sources = [keeper, checkpointer, tmp_path / "empty"]
            options: Any = {"sources": sources, "no_dist": True, "timeout": 60}
            assert tr.recover(into=Job().state(), **options) is None
            with pytest.raises(tr.errors.RecoveryError) as caught:  # the caller knows of a step
                tr.recover(into=Job().state(), min_step=1, **options)
        assert str(caught.value).count("there is nothing in it") == 3
    finally:
        end_keepers(job)


def test_a_damaged_step_is_no_first_start(tmp_path: Path) -> None:
    saved(tmp_path, Job())
    damage(tmp_path, 0)
    assert "are not those written" in str(why_not(sources=[tmp_path]))


def test_a_mistyped_path_is_no_first_start(tmp_path: Path) -> None:
    saved(tmp_path / "run", Job())
    fault = why_not(sources=[tmp_path / "rum"])
    assert "no such directory" in str(fault).lower() and "rum" in str(fault)
    (tmp_path / "file").write_text("")
    assert "file" in str(why_not(sources=[tmp_path / "file"]))


def test_an_endpoint_that_does_not_answer_is_no_first_start(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
    assert url in str(why_not(sources=[url, tmp_path / "empty"]))


def test_a_wrong_token_is_no_first_start() -> None:
    with tr.serve(Job().state(), step=1, no_dist=True, timeout=60, **access(token=TOKEN)) as made:
        assert "token" in str(why_not(sources=[made.url], **access(token="another-" + TOKEN)))


def test_steps_that_are_too_old_are_no_first_start(tmp_path: Path) -> None:
    saved(tmp_path, Job())
    assert "min_step" in str(why_not(sources=[tmp_path], min_step=5))


def start_together(rank: int, group: Any, root: str) -> tuple[str, str]:
    """Both ranks' sources are empty; then those of rank 1 alone hold a damaged step."""
    mine = Path(root) / str(rank)
    mine.mkdir()
    found = []
    with tr.Relay(group, timeout=60) as relay:
        sources = [mine, relay.peer(1 - rank)]
        for _ in range(2):
            dist.barrier(group)
            try:
                got = tr.recover(into=Job().state(), sources=sources, group=group, timeout=60)
                found.append("a first start" if got is None else f"step {got.step}")
            except tr.errors.RelayError as fault:
                found.append(type(fault).__name__)
            if rank == 1 and len(found) == 1:
                saved(mine, Job())
                damage(mine, 0)
            dist.barrier(group)
    return found[0], found[1]


def test_ranks_agree_whether_it_is_a_first_start(pool2: RankPool, tmp_path: Path) -> None:
    (first, second), (other, another) = pool2.run(start_together, str(tmp_path), timeout=100)
    assert first == other == "a first start"
    assert second == another == "RecoveryError"
