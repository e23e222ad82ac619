"""Workers that are killed come back from the keepers of their hosts, as many as there are then."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

import torchrelay as tr
from tests.keeper.jobs import (
    TIMEOUT,
    end_keepers,
    keeper_of,
    recover_and_train,
    train_and_stage,
)
from tests.support.fsdp_job import fsdp_job, train, whole
from tests.support.ranks import Ranks, reached, run_ranks, tell

JOB = f"restarts-{os.getpid()}"


@pytest.fixture(autouse=True)
def ended() -> Iterator[None]:
    yield
    end_keepers(JOB)


@pytest.mark.parametrize("hosts", [None, ["a", "b"]], ids=["one host", "two hosts"])
def test_all_workers_are_killed_and_come_back_as_another_number(hosts: list[str] | None) -> None:
    with Ranks(train_and_stage, 2, JOB, 3, hosts) as workers:
        for rank in range(2):
            workers.wait_reached(rank, "staged", TIMEOUT)
        told = workers.told(0)
        for rank in range(2):
            workers.kill(rank)
    state, losses = told
    more = None if hosts is None else ["a", "b", "a", "b"]
    for step, explained, found, went_on in run_ranks(
        recover_and_train, 4, JOB, more, timeout=2 * TIMEOUT
    ):
        assert step == 3
        assert f"keeper {JOB}: step 3; step 3 was taken" in explained
        assert found.keys() == state.keys()
        assert all(torch.equal(found[name], state[name]) for name in state)
        assert went_on == losses


def die_in_mid_stage(rank: int, group: Any, job: str) -> None:
    """Every rank stages step 2; one is killed when a part of it has been copied."""
    from torchrelay.endpoint.publish import host_slots

    state = fsdp_job(1)
    train(state, 1)
    keeper = keeper_of(rank, job)
    keeper.stage(1, state).result(TIMEOUT)
    tell(whole(state))
    train(state, 1)
    copy = host_slots.stage

    def half(copies: Any, arena: Any, **more: Any) -> None:
        copy(copies[: len(copies) // 2], arena, **more)
        reached("half", hold=True)

    if rank == 1:
        host_slots.stage = half
    try:
        keeper.stage(2, state, timeout=3).result(TIMEOUT)
    except tr.errors.RelayError:
        reached("failed", hold=True)


def recovered(rank: int, group: Any, job: str) -> tuple[int, dict[str, torch.Tensor]]:
    state = fsdp_job(9)
    keeper = keeper_of(rank, job)
    got = tr.recover(into=state, sources=[keeper], group=dist.group.WORLD, timeout=TIMEOUT)
    return got.step, whole(state)


def test_a_worker_killed_in_mid_stage_costs_no_staged_step() -> None:
    with Ranks(die_in_mid_stage, 2, JOB) as workers:
        workers.wait_reached(1, "half", TIMEOUT)
        state = workers.told(1)[0]
        workers.kill(1)
        workers.wait_reached(0, "failed", TIMEOUT)
        workers.kill(0)
    for step, found in run_ranks(recovered, 3, JOB, timeout=2 * TIMEOUT):
        assert step == 1
        assert all(torch.equal(found[name], state[name]) for name in state)
