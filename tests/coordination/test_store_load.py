"""How many requests waiting ranks make to the group's store, counted in simulated time."""

from __future__ import annotations

import heapq

import pytest

from torchrelay.coordination.group_store import MOST_REQUESTS, POLL, pause_after


def requests(ranks: int, seconds: float) -> list[float]:
    """When ranks that begin to wait at once ask the store."""
    asked: list[float] = []
    todo = [0.0] * ranks
    while todo:
        now = heapq.heappop(todo)
        if now < seconds:
            asked.append(now)
            heapq.heappush(todo, now + pause_after(now, ranks))
    return asked


@pytest.mark.parametrize("ranks", [2, 8, 64, 1024])
def test_ranks_that_wait_leave_the_store_time(ranks: int) -> None:
    asked = requests(ranks, 3.0)
    for second in range(3):
        later = [now for now in asked if second <= now < second + 1]
        # Each of them asks at once, and then in turn.
        assert len(later) <= MOST_REQUESTS + ranks
    assert requests(ranks, 60.0)[-1] > 59, "none is given up"


def test_few_ranks_are_as_fast_as_one() -> None:
    assert pause_after(0.0, 8) == pause_after(0.0, 1) == POLL[0]
    assert pause_after(0.0, 64) < 0.004
