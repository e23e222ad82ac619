"""The harness that other tests stand on: results, failures, hangs, phases."""

from __future__ import annotations

import os
import sys
import time

import pytest
import torch
import torch.distributed as dist

from tests.support.forks import servers
from tests.support.ranks import (
    START_SECONDS,
    Exited,
    Killed,
    RankFailed,
    RankPool,
    Ranks,
    RanksTimedOut,
    reached,
    run_ranks,
)


def _sum(rank, group, base):
    value = torch.tensor([base + rank])
    dist.all_reduce(value, group=group)
    return rank, int(value), os.getpid()


def _fail_on_one(rank, group):
    if rank == 1:
        raise ValueError("the reason is here")
    dist.recv(torch.zeros(1), src=1, group=group)


def _sleep_on_one(rank, group):
    if rank == 1:
        time.sleep(600)
    return rank


def _leave_on_purpose(rank, group):
    if rank == 1:
        os._exit(7)
    return rank


def _phases(rank, group):
    reached("begun")
    reached("middle", hold=True)
    return rank


def _unpicklable(rank, group):
    return lambda: None


def _tensor(rank, group):
    return torch.full((3,), float(rank))


def _unmatched_message(rank, group):
    if rank == 0:
        group.send([torch.zeros(1)], 1, 0)
    return group is dist.group.WORLD


def test_results_come_back_by_rank():
    got = run_ranks(_sum, 2, 10)
    assert [(rank, total) for rank, total, _ in got] == [(0, 21), (1, 21)]
    assert len({pid for _, _, pid in got} | {os.getpid()}) == 3


def _has_imported(conn, name):
    conn.send(name in sys.modules)


def test_children_have_imported_what_they_need():
    """Whatever else of what tests import has a server of its own in mind."""
    ours, theirs = servers.Pipe()
    process = servers.Process(target=_has_imported, args=(theirs, "tests.support.preloaded"))
    process.start()
    assert ours.poll(START_SECONDS) and ours.recv()
    process.join(10)


def test_deliberate_exit_is_a_result():
    assert run_ranks(_leave_on_purpose, 2, expect_exit={1: 7}) == [0, Exited(7)]


def test_phases_hold_and_kill():
    with Ranks(_phases, 2) as ranks:
        for rank in range(2):
            ranks.wait_reached(rank, "begun")
            ranks.wait_reached(rank, "middle")
        ranks.kill(1)
        ranks.stop(0)
        ranks.release(0)
        assert ranks.processes[0].is_alive()
        ranks.cont(0)
        assert ranks.results(20) == [0, Killed]
    assert not any(p.is_alive() for p in ranks.processes)


def test_pool_survives_failure_hang_and_bad_result():
    with RankPool(2, forks=True) as pool:
        first = pool.run(_sum, 1)
        assert pool.run(_sum, 1) == first
        assert [t.tolist() for t in pool.run(_tensor)] == [[0.0] * 3, [1.0] * 3]

        with pytest.raises(RankFailed, match="the reason is here") as failed:
            pool.run(_fail_on_one)
        assert next(iter(failed.value.failures)) == 1
        assert "_fail_on_one" in failed.value.failures[1]

        pool.run(_sum, 1)  # so that the workers have imported this module when the second begins
        started = time.monotonic()
        with pytest.raises(RanksTimedOut) as late:
            pool.run(_sleep_on_one, timeout=1)
        assert late.value.running == [1]
        assert "_sleep_on_one" in late.value.stacks[1]
        assert time.monotonic() - started < 60

        with pytest.raises(RankFailed, match="pickle"):
            pool.run(_unpicklable)
        assert [total for _, total, _ in pool.run(_sum, 2)] == [5, 5]


def test_a_dead_worker_is_replaced():
    with RankPool(2, forks=True) as pool:
        before = [pid for _, _, pid in pool.run(_sum, 0)]
        with pytest.raises(RankFailed, match="exit code 7"):
            pool.run(_leave_on_purpose)
        assert not set(before) & {pid for _, _, pid in pool.run(_sum, 0)}


def test_fresh_group_is_apart_from_the_others(pool2):
    assert pool2.run(_unmatched_message, fresh_group=True) == [False, False]
    assert pool2.run(_unmatched_message, fresh_group=True, group_timeout=5) == [False, False]
    assert [total for _, total, _ in pool2.run(_sum, 2)] == [5, 5]
