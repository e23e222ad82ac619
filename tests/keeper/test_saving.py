"""A checkpointer with a keeper: a save is staged once, in memory that outlives the worker."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import torchrelay as tr
from tests.keeper.jobs import TIMEOUT, end_keepers, keeper_of
from tests.support.fsdp_job import fsdp_job, train, whole
from tests.support.ranks import RankPool, Ranks, reached, run_ranks, tell

JOB = f"saving-{os.getpid()}"


@pytest.fixture(autouse=True)
def ended() -> Iterator[None]:
    yield
    end_keepers(JOB)


def save_and_stage(rank: int, group: Any, job: str, folder: str) -> Any:
    """Save step 2, and stage others before it is written; what is in memory and on disk then."""
    from torchrelay.stores.writer.client import WriterSave

    write, staged = WriterSave.write_staged, threading.Event()

    def write_later(*words: Any) -> None:
        assert staged.wait(TIMEOUT)
        write(*words)

    state = fsdp_job(1)
    keeper = keeper_of(rank, job, ["a", "b"], copies=0)
    checkpointer = tr.Checkpointer(folder, keeper=keeper, timeout=TIMEOUT)
    train(state, 1)
    keeper.stage(1, state).result(TIMEOUT)
    train(state, 1)
    kept = whole(state)
    WriterSave.write_staged = write_later  # type: ignore[method-assign]
    pending = checkpointer.save_async(2, state)
    arena = checkpointer._saver.writer._arena
    steps = [one["step"] for one in keeper.status()["steps"]]
    for step in range(3, 8):  # into every slot that there is
        train(state, 1)
        keeper.stage(step, state).result(TIMEOUT)
    staged.set()
    pending.result(TIMEOUT)
    WriterSave.write_staged = write  # type: ignore[method-assign]
    for step in range(8, 11):
        keeper.stage(step, state).result(TIMEOUT)
    checkpointer.verify(2)
    slots = keeper.status()["staged_bytes"], keeper.status()["most_bytes"]
    back = fsdp_job(3)
    checkpointer.load(back, step=2)
    got = tr.recover(into=fsdp_job(5), sources=[keeper], group=dist.group.WORLD, timeout=TIMEOUT)
    checkpointer.close()
    keeper.close()
    right = all(torch.equal(kept[name], value) for name, value in whole(back).items())
    return right, arena is None, steps, got.step, slots


def test_a_save_is_staged_in_the_keeper_and_written_from_there(
    pool2: RankPool, tmp_path: Path
) -> None:
    for right, alone, steps, newest, (now, most) in pool2.run(
        save_and_stage, JOB, str(tmp_path), timeout=2 * TIMEOUT
    ):
        assert right and alone
        assert 1 in steps and newest == 10
        assert now == most  # the memory that a save had in between is used again


def die_while_writing(rank: int, group: Any, job: str, folder: str) -> None:
    from torchrelay.stores.writer.client import WriterSave

    state = fsdp_job(1)
    keeper = keeper_of(rank, job)
    checkpointer = tr.Checkpointer(folder, keeper=keeper, timeout=TIMEOUT)
    train(state, 1)
    checkpointer.save(1, state)
    train(state, 1)
    WriterSave.write_staged = lambda *_: reached("writing", hold=True)  # type: ignore[assignment]
    checkpointer.save_async(2, state)
    keeper._publisher.settle(TIMEOUT)
    tell(whole(state))
    reached("staged", hold=True)


def come_back(rank: int, group: Any, job: str, folder: str) -> Any:
    state = fsdp_job(7)
    keeper = keeper_of(rank, job)
    with tr.Checkpointer(folder, keeper=keeper, timeout=TIMEOUT) as checkpointer:
        on_disk = checkpointer.steps()
        sources = [keeper, checkpointer]
        got = tr.recover(into=state, sources=sources, group=dist.group.WORLD, timeout=TIMEOUT)
        found = whole(state)
        checkpointer.save_async(got.step, state).result(TIMEOUT)
        on_disk_then = checkpointer.steps()
    keeper.close()
    return got.step, got.report.source, found, on_disk, on_disk_then


def test_a_worker_killed_while_a_save_is_written_comes_back_to_it(tmp_path: Path) -> None:
    with Ranks(die_while_writing, 2, JOB, str(tmp_path)) as workers:
        for rank in range(2):
            workers.wait_reached(rank, "staged", TIMEOUT)
        state = workers.told(0)[0]
        for rank in range(2):
            workers.kill(rank)
    for step, source, found, before, after in run_ranks(
        come_back, 3, JOB, str(tmp_path), timeout=2 * TIMEOUT
    ):
        assert (step, source, before, after) == (2, f"keeper {JOB}", [1], [1, 2])
        assert all(torch.equal(found[name], state[name]) for name in state)


def test_a_keeper_that_is_lost_costs_no_save(tmp_path: Path) -> None:
    """The step is written from memory that this process has too."""
    keeper = tr.Keeper(JOB, no_dist=True, timeout=TIMEOUT)
    state = {"x": torch.arange(100_000.0), "step": 1}
    with tr.Checkpointer(tmp_path, no_dist=True, keeper=keeper) as checkpointer:
        assert checkpointer.prepare(state) > 0
        pending = checkpointer.save_async(1, state)
        keeper.end()
        pending.result(TIMEOUT)
        checkpointer.save_async(2, state).result(TIMEOUT)  # closed, as far as this one knows
        for step in (1, 2):
            checkpointer.verify(step)
