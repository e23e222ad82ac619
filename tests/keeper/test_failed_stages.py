"""A stage that fails on one rank fails on the others at once, and the next one succeeds."""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

import torchrelay as tr
from tests.keeper.jobs import TIMEOUT, end_keepers, keeper_of
from tests.support.ranks import RankPool
from torchrelay.errors import RelayError

JOB = f"failed-{os.getpid()}"
NUMEL = 1 << 18
LIMIT = 16 << 20  # bytes of a file: the group's store is one, and is to stay below
GROWN = LIMIT // 4 + 1


@pytest.fixture(autouse=True)
def ended() -> Iterator[None]:
    yield
    end_keepers(JOB)


def state_of(rank: int, value: int, numel: int = NUMEL) -> dict[str, Any]:
    return {"x": torch.full((numel,), float(value + rank)), "step": value}


def come_back(rank: int, keeper: tr.Keeper, numel: int = NUMEL) -> int:
    into = state_of(rank, 0, numel)
    got = tr.recover(into=into, sources=[keeper], group=dist.group.WORLD, timeout=TIMEOUT)
    assert bool((into["x"] == got.step + rank).all())
    return got.step


def stage_with_no_memory_on(rank: int, group: Any, job: str, lacking: int) -> str:
    """One rank gets no memory for a state that has grown."""
    keeper = keeper_of(rank, job, ["a", "b"], copies=0)
    keeper.stage(1, state_of(rank, 1)).result(TIMEOUT)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == lacking:  # it holds for files of memory too
        resource.setrlimit(resource.RLIMIT_FSIZE, (LIMIT, limits[1]))
    try:
        with pytest.raises((MemoryError, RelayError)) as fault:
            keeper.stage(2, state_of(rank, 2, GROWN)).result(TIMEOUT)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert come_back(rank, keeper) == 1
    keeper.stage(3, state_of(rank, 3, GROWN)).result(TIMEOUT)
    assert come_back(rank, keeper, GROWN) == 3
    keeper.close()
    return str(fault.value)


@pytest.mark.parametrize("lacking", [0, 1])
def test_a_rank_without_memory_is_named_by_all(pool2: RankPool, lacking: int) -> None:
    told = pool2.run(stage_with_no_memory_on, JOB, lacking, timeout=2 * TIMEOUT)
    assert all("no arena" in text for text in told)
    assert f"rank {lacking}" in told[1 - lacking]


def lose_a_keeper_amid_a_stage(rank: int, group: Any, job: str) -> str:
    keeper = keeper_of(rank, job, ["a", "b"], copies=0)
    keeper.stage(1, state_of(rank, 1)).result(TIMEOUT)
    stager = keeper._publisher
    hashed = stager._show._hashed

    def lose(*args: Any) -> Any:
        assert keeper.pid is not None
        os.kill(keeper.pid, signal.SIGKILL)
        return hashed(*args)

    if rank == 1:
        stager._show._hashed = lose  # type: ignore[method-assign]
    with pytest.raises(tr.errors.EndpointError) as fault:
        keeper.stage(2, state_of(rank, 2)).result(TIMEOUT)
    if rank == 1:
        stager._show._hashed = hashed  # type: ignore[method-assign]
    keeper.stage(3, state_of(rank, 3)).result(TIMEOUT)
    assert come_back(rank, keeper) == 3
    keeper.close()
    return str(fault.value)


def test_a_keeper_that_is_lost_amid_a_stage_is_named_by_all(pool2: RankPool) -> None:
    for told in pool2.run(lose_a_keeper_amid_a_stage, JOB, timeout=2 * TIMEOUT):
        assert "the keeper was lost" in told and "rank 1" in told


def stage_different_steps(rank: int, group: Any, job: str) -> None:
    keeper = keeper_of(rank, job, copies=0)
    with pytest.raises(tr.errors.UsageError, match=r"different calls \(.*step 1[01]"):
        keeper.stage(10 + rank, state_of(rank, 10))
    keeper.stage(12, state_of(rank, 12)).result(TIMEOUT)
    assert come_back(rank, keeper) == 12
    keeper.close()


def test_ranks_that_name_different_steps_are_refused(pool2: RankPool) -> None:
    pool2.run(stage_different_steps, JOB, timeout=2 * TIMEOUT)
