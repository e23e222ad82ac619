"""Receivers of a quorum, which has no store, pass chunks on: the sender sends one copy."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist

import torchrelay as tr
from tests.support.faults import CHUNK, same, weights
from tests.support.members import Members
from tests.support.quorums import join_transport, recover_all
from tests.support.storeless import Storeless
from tests.support.ways import by

LONG = 25.0


@pytest.mark.parametrize("receivers", [2, 3])
def test_the_sender_of_a_quorum_sends_one_copy(receivers: int) -> None:
    with Members(receivers + 1) as members:
        for one in members:
            one.call(join_transport, "tcp")
        (sent, nbytes), found = recover_all(members, 1, 1.0)
    assert found == [{1.0}] * receivers
    assert nbytes <= sent < 1.1 * nbytes


def test_a_quorum_that_renumbers_passes_chunks_on_between_its_own_members() -> None:
    """Every process has had every rank: an address is not that of a rank."""
    with Members(3) as (first, second, third):
        for one in (first, second, third):
            one.call(join_transport, "tcp")
        turns = ([first, second, third], [third, first, second], [second, first, third])
        for step, members in enumerate(turns, 1):
            (sent, nbytes), found = recover_all(members, step, float(step))
            assert found == [{float(step)}] * 2
            assert nbytes <= sent < 1.1 * nbytes


def test_a_replica_that_was_replaced_takes_its_place_in_the_chain() -> None:
    with (group := Members(3)) as (first, second, third):
        for one in (first, second, third):
            one.call(join_transport, "tcp")
        recover_all([first, second, third], 1, 1.0)
        second.kill()
        another = group.another()
        another.call(join_transport, "tcp")
        (sent, nbytes), found = recover_all([first, another, third], 2, 2.0)
    assert found == [{2.0}] * 2
    assert nbytes <= sent < 1.1 * nbytes


def without_a_store(rank: int, group: Any) -> Any:
    store = dist.PrefixStore("ours", group.get_group_store())
    relay = tr.Relay(Storeless(group), timeout=LONG, chunk_bytes=CHUNK, store=store)
    if rank == 0:
        report = relay.send(weights(1), [1, 2, 3])
        return report.traffic.bytes, report.bytes
    return same(relay.recv(0).state, weights(1))


def test_a_group_of_another_library_has_a_chain(pool4: Any) -> None:
    (sent, nbytes), *right = pool4.run(by, "tcp", without_a_store, fresh_group=True)
    assert right == [True] * 3
    assert nbytes <= sent < 1.1 * nbytes
