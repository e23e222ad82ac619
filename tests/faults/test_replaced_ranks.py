"""A rank that is another process than it was: replaced after its end, or renumbered by a quorum.

Between transfers a process keeps memory of other ones. It belongs to a process, not to a rank.
"""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import torch.distributed as dist

import torchrelay as tr
from tests.support.members import Members
from tests.support.quorums import (
    SECONDS,
    buffers_here,
    join_transport,
    openings_end,
    openings_here,
    receive,
    recover,
    send,
    sit,
    state_of,
    values_in,
)
from tests.support.ways import every_way, patched, taking
from torchrelay.errors import DigestError, PeerLostError
from torchrelay.transports.routes import memory
from torchrelay.transports.routes.host.ring import MappedRing, MappedRings


@every_way
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


@every_way
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


# On GPUs: contiguous tensors are opened by the receiver, strided ones come through the ring

needs_gpu = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="no GPU here: run it where there is one"
)
gpu_ways = pytest.mark.parametrize("way", ["cuda_ipc", "memory", "ring", "tcp"])


@needs_gpu
@gpu_ways
def test_a_replica_on_a_gpu_that_was_replaced(way: str) -> None:
    with (group := Members(2)) as (first, last):
        for member in (first, last):
            member.call(join_transport, way, True, "cuda")
        assert recover(first, last, 1, 1.0) == {1.0}
        first.kill()
        second = group.another()
        second.call(join_transport, way, True, "cuda")
        assert recover(second, last, 2, 2.0) == {2.0}
        assert recover(second, last, 3, 3.0) == {3.0}


@needs_gpu
@gpu_ways
def test_replicas_on_a_gpu_that_were_renumbered(way: str) -> None:
    with Members(3) as (first, second, last):
        for member in (first, second, last):
            member.call(join_transport, way, True, "cuda")
        for step, sender in enumerate((first, second, first, second), 1):
            assert recover(sender, last, step, float(step)) == {float(step)}


@needs_gpu
def test_gpu_memory_of_a_replica_that_has_ended_is_closed() -> None:
    with Members(2) as (first, last):
        for member in (first, last):
            member.call(join_transport, "cuda_ipc", True, "cuda")
        assert recover(first, last, 1, 1.0) == {1.0}
        assert last.call(openings_here) > 0
        first.kill()
        assert last.call(openings_end)


# A group with a store, in which a process takes the place of another one: `Relay` stays


class StoreGroup:
    """A rank of a job that starts single processes again. Its store outlives them."""

    def __init__(self, port: int, rank: int) -> None:
        store: Any = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
        self._store, self._rank = store, rank

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return 2

    def get_group_store(self) -> Any:
        return self._store


def join_store(here: Any, way: str, port: int, rank: int) -> None:
    here.taking = contextlib.ExitStack()
    here.taking.enter_context(taking(way))
    here.relay = tr.Relay(StoreGroup(port, rank), timeout=SECONDS)


def relay_sends(here: Any, value: float) -> None:
    here.relay.send(state_of(value), 1)


def relay_receives(here: Any) -> set[float]:
    return values_in(here.relay.recv(0).state)


@every_way
def test_a_process_that_was_started_again_under_its_rank(way: str) -> None:
    store: Any = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with (group := Members(2)) as (first, last):
        first.call(join_store, way, store.port, 0)
        last.call(join_store, way, store.port, 1)
        for value in (1.0, 2.0, 3.0):
            first.begin(relay_sends, value)
            last.begin(relay_receives)
            first.end()
            assert last.end() == {value}
            first.kill()
            first = group.another()
            first.call(join_store, way, store.port, 0)


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
            member.call(join_transport, way, "all")
        metadata = sender.call(sit, 0, 2)
        receiver.call(sit, 1, 2)
        sender.begin(sends_in_vain)
        receiver.begin(takes_other_memory, metadata)
        assert receiver.end() == "noticed"
        assert sender.end()
        assert recover(sender, receiver, 2, 2.0) == {2.0}
