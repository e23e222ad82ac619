"""A rank that is another process than it was: replaced after its end, or renumbered by a quorum.

Between transfers a process keeps memory of other ones. It belongs to a process, not to a rank.
"""

from __future__ import annotations

import pytest

from tests.support.members import Members
from tests.support.quorums import buffers_here, join_transport, recover
from tests.support.ways import WAYS


@pytest.mark.parametrize("way", WAYS)
def test_a_replica_that_was_replaced(way: str) -> None:
    with (group := Members(2)) as (first, last):
        for member in (first, last):
            member.call(join_transport, way)
        assert recover(first, last, 1, 1.0) == {1.0}
        first.kill()
        second = group.another()
        second.call(join_transport, way)
        assert recover(second, last, 2, 2.0) == {2.0}
        assert recover(second, last, 3, 3.0) == {3.0}


@pytest.mark.parametrize("way", WAYS)
def test_replicas_that_were_renumbered(way: str) -> None:
    with Members(3) as (first, second, last):
        for member in (first, second, last):
            member.call(join_transport, way)
        for step, sender in enumerate((first, second, first, second), 1):
            assert recover(sender, last, step, float(step)) == {float(step)}


def test_the_memory_of_a_replica_that_has_ended_is_let_go() -> None:
    """Without another transfer: its successor may need it."""
    with Members(3) as (first, second, last):
        for member in (first, second, last):
            member.call(join_transport, "ring")
        for step, sender in enumerate((first, second), 1):
            recover(sender, last, step, float(step))
        assert last.call(buffers_here, 2) == 2
        first.kill()
        assert last.call(buffers_here, 1) == 1
        second.kill()
        assert last.call(buffers_here, 0) == 0
