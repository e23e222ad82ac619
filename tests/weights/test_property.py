"""Random trainers and workers on real ranks: after every update, exactly the published bits."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch.distributed as dist

from tests.support.rounds import rounds
from tests.weights.random_jobs import TIMEOUT, Follower, make_groups, random_job, serve, trained
from torchrelay.deadlines import Deadline

SEEDS = 96  # all of them in `make test-slow`
AT_ONCE = 4


def publish(endpoint: Any, state: object, step: int) -> None:
    """Publish a step, again while a server has not heard yet that a reader has finished."""
    deadline = Deadline(TIMEOUT)
    while (pending := endpoint.publish(state, step=step)).skipped is not None:
        assert "is read by" in pending.skipped and not deadline.passed, pending.skipped
        time.sleep(0.1)
    pending.result(TIMEOUT)


def follow(rank: int, group: Any, seed: int) -> int:
    """One job from beginning to end; how many updates were exact."""
    job = random_job(seed)
    make_groups(job)
    trains, exact = rank < job.trainers, 0
    endpoint = serve(job) if trains else None
    urls: list[Any] = [None]
    if endpoint is not None:
        urls = [endpoint.url]
    dist.broadcast_object_list(urls, src=0)
    followers: dict[Any, Follower] = {}
    last: dict[Any, int] = {}  # the version that each worker has
    for version in range(len(job.changes)):
        if version and endpoint is not None:
            publish(endpoint, trained(job, version), version)
        dist.barrier()
        for worker in job.workers:
            if rank not in worker.ranks or version not in worker.updates:
                continue
            follower = followers.get(worker)
            if follower is None or version == worker.returns:
                follower = followers[worker] = Follower(job, worker, urls)
                last.pop(worker, None)
            got = follower.subscription.update(at_least=version)
            assert (got.step, follower.wrong(version)) == (version, []), f"{job}"
            assert got.state is follower.into
            if job.same_state(last.get(worker), version):
                assert got.report.bytes == 0, f"{job}"
            last[worker] = version
            again = follower.subscription.update()
            assert (again.step, again.report.bytes) == (version, 0), f"{job}"
            exact += 1
        dist.barrier()
    for follower in followers.values():
        follower.subscription.close()
    if endpoint is not None:
        endpoint.close()
    dist.barrier()
    return exact


@pytest.mark.parametrize("first", range(0, rounds(SEEDS, 24), AT_ONCE))
def test_random_workers_have_exactly_what_was_published(pool4: Any, first: int) -> None:
    for seed in range(first, first + AT_ONCE):
        print(f"seed {seed}: {random_job(seed)}")
        assert sum(pool4.run(follow, seed, timeout=TIMEOUT)) > 0
