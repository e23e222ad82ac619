"""A rank that is another process than it was: replaced after its end, or renumbered by a quorum.

Between transfers a process keeps memory of other ones. It belongs to a process, not to a rank.
"""

from __future__ import annotations

import contextlib
import time
from datetime import timedelta
from typing import Any

import pytest
import torch

from tests.support.members import Member, Members
from tests.support.torchft_files import find_interface
from tests.support.ways import WAYS, taking

SECONDS = 30.0
ROWS, COLUMNS = 600, 2000


def gapped(value: float) -> torch.Tensor:
    """A tensor that no process can read where it lies."""
    return torch.full((ROWS, COLUMNS), value)[:, ::2]


def state_of(value: float) -> dict[str, Any]:
    return {"gapped": gapped(value), "whole": torch.full((300_000,), value), "value": value}


def values_in(state: dict[str, Any]) -> set[float]:
    """All values in a state: one, if it is whole."""
    tensors = [state["gapped"], state["whole"]]
    return {value for one in tensors for value in one.unique().tolist()} | {state["value"]}


class Seat:
    """A torchft process group as its transport sees it: a rank in the quorum of the moment."""

    def __init__(self) -> None:
        self._rank, self._size = 0, 1

    def sit(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size


# In the members


def join_transport(here: Any, way: str) -> None:
    """Make a `RelayTransport` that takes this way alone."""
    find_interface()
    from torchrelay.integrations.torchft import RelayTransport

    here.taking = contextlib.ExitStack()
    here.taking.enter_context(taking(way))
    here.seat = Seat()
    here.transport = RelayTransport(here.seat, timedelta(seconds=SECONDS))


def sit(here: Any, rank: int, size: int) -> str:
    here.seat.sit(rank, size)
    metadata: str = here.transport.metadata()
    return metadata


def send(here: Any, to: list[int], step: int, value: float) -> None:
    here.transport.send_checkpoint(to, step, state_of(value), timedelta(seconds=SECONDS))


def buffers_here(here: Any, count: int) -> int:
    """The number of other processes' buffers that are mapped here; waits until it is `count`."""
    ends = time.monotonic() + SECONDS
    while True:
        with open("/proc/self/maps") as maps:
            found = sum("memfd:torchrelay-arena" in line for line in maps)
        if found == count or time.monotonic() > ends:
            return found
        time.sleep(0.01)


def receive(here: Any, source: int, metadata: str, step: int) -> set[float]:
    got = here.transport.recv_checkpoint(source, metadata, step, timedelta(seconds=SECONDS))
    return values_in(got)


# Quorums: process memory, its rings and connections


def recover(sender: Member, receiver: Member, step: int, value: float) -> set[float]:
    """A quorum of two, whose rank 0 sends to its rank 1; what came of it there."""
    metadata = sender.call(sit, 0, 2)
    receiver.call(sit, 1, 2)
    sender.begin(send, [1], step, value)
    receiver.begin(receive, 0, metadata, step)
    sender.end()
    found: set[float] = receiver.end()
    return found


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
