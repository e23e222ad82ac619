"""A rank that is another process than it was: replaced after its end, or renumbered by a quorum.

Between transfers a process keeps memory of other ones. It belongs to a process, not to a rank.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support.members import Members
from tests.support.quorums import (
    buffers_here,
    join_transport,
    receive,
    recover,
    send,
    sit,
)
from tests.support.ways import WAYS, patched
from torchrelay.errors import DigestError, PeerLostError
from torchrelay.transports.routes import memory
from torchrelay.transports.routes.host.ring import MappedRing, MappedRings


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


# Digests are the second guard: with `verify` they also cover memory that the kernel copies


def takes_other_memory(here: Any, metadata: str) -> str:
    """Receive, with the memory of some other process in the place of the sender's."""
    original = MappedRings.take

    def take(rings: MappedRings, *args: Any, **options: Any) -> MappedRing:
        ring = original(rings, *args, **options)
        ring.tensor = torch.full_like(ring.tensor, 7)
        return ring

    with patched(MappedRings, take=take), patched(memory, read=lambda pid, batch: None):
        try:
            receive(here, 0, metadata, 1)
        except DigestError:
            return "noticed"
        return "taken"


def sends_in_vain(here: Any) -> bool:
    try:
        send(here, [1], 1, 1.0)
    except PeerLostError:
        return True
    return False


@pytest.mark.parametrize("way", ["memory", "ring"])
def test_memory_of_another_process_does_not_have_the_senders_digests(way: str) -> None:
    with Members(2) as (sender, receiver):
        for member in (sender, receiver):
            member.call(join_transport, way, True)
        metadata = sender.call(sit, 0, 2)
        receiver.call(sit, 1, 2)
        sender.begin(sends_in_vain)
        receiver.begin(takes_other_memory, metadata)
        assert receiver.end() == "noticed"
        assert sender.end()
        assert recover(sender, receiver, 2, 2.0) == {2.0}
