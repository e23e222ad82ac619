"""The same step with the same content, published twice: readers keep it whatever comes next."""

from __future__ import annotations

import resource
from typing import Any

import pytest
import torch

import torchrelay as tr
from tests.support.ranks import RankPool
from torchrelay.errors import RelayError

TIMEOUT = 60
NUMEL = 1 << 18
LIMIT = 16 << 20  # bytes of a file: the group's store is one, and is to stay below
GROWN = LIMIT // 4 + 1


def state_of(rank: int, numel: int = NUMEL) -> dict[str, Any]:
    return {f"x{rank}": torch.full((numel,), float(rank + 1))}


def publish_twice_then_fail(rank: int, group: Any) -> tuple[list[int], list[int]]:
    """Rank 1 has no memory for its part of a third step, when rank 0 has staged its own. Returns
    the steps that are listed afterwards, and the one that readers get."""
    with tr.serve(state_of(rank), step=1, timeout=TIMEOUT) as endpoint:
        endpoint.publish(state_of(rank), step=1).result(TIMEOUT)
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        if rank == 1:  # it holds for files of memory too
            resource.setrlimit(resource.RLIMIT_FSIZE, (LIMIT, limits[1]))
        try:
            with pytest.raises((MemoryError, RelayError)):
                endpoint.publish(state_of(rank, GROWN), step=2).result(TIMEOUT)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        listed = [one["step"] for one in endpoint.status()["steps"]]
        got = tr.pull(endpoint.url, group=group, timeout=20)
        endpoint.publish(state_of(rank, GROWN), step=3).result(TIMEOUT)
        later = tr.pull(endpoint.url, group=group, timeout=20)
        return listed, [got.step, later.step]


def test_a_failed_publish_leaves_a_step_that_was_published_twice(pool2: RankPool) -> None:
    for listed, got in pool2.run(publish_twice_then_fail, timeout=2 * TIMEOUT):
        assert listed == [1] and got == [1, 3]


def test_readers_keep_a_step_that_was_published_twice() -> None:
    """A reader of the newest step is not cut off by the next one: it is the step before then."""
    state = state_of(0)
    with tr.serve(state, step=1, timeout=TIMEOUT) as endpoint:
        endpoint.publish(state, step=1).result(TIMEOUT)
        endpoint.publish(state_of(1), step=2).result(TIMEOUT)
        assert sorted(one["step"] for one in endpoint.status()["steps"]) == [1, 2]
        got = tr.pull(
            endpoint.url, step=1, timeout=20, options=tr.options.PullOptions(same_host=False)
        )
        assert torch.equal(got.state["x0"], state["x0"])
