"""A process group that is configured again after each quorum, as torchft's are: `Relay` and the
drop-in follow it, whoever has which rank by then."""

from __future__ import annotations

import contextlib
import itertools
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

import torchrelay as tr
from tests.support.members import Member, Members
from tests.support.quorums import SECONDS, buffers_here, state_of, values_in
from tests.support.torchft_files import MISSING, find_torchft
from tests.support.ways import WAYS, taking
from torchrelay.coordination.groups import current_group
from torchrelay.dropin import PGTransport
from torchrelay.errors import UsageError

_quorums = itertools.count(1)
needs_torchft = pytest.mark.skipif(not find_torchft(), reason=MISSING)
both_apis = pytest.mark.parametrize("api", ["Relay", "PGTransport"])


# In the members


def begin(here: Any, api: str, way: str, protocol: str = "relay") -> None:
    """Make a group that is not configured yet, and what sends and receives through it."""
    find_torchft()
    from torchft.process_group import ProcessGroupGloo

    here.taking = contextlib.ExitStack()
    here.taking.enter_context(taking(way))
    here.group = ProcessGroupGloo(timeout=timedelta(seconds=SECONDS))
    limit = timedelta(seconds=SECONDS)
    if api == "Relay":
        here.relay, here.transport = tr.Relay(here.group, timeout=SECONDS), None
    else:
        options: Any = {"protocol": protocol}
        here.transport = PGTransport(here.group, limit, torch.device("cpu"), **options)


def configure(here: Any, port: int, quorum: int, rank: int, size: int) -> None:
    here.group.configure(f"127.0.0.1:{port}/quorum-{quorum}", str(rank), rank, size)


def send(here: Any, to: list[int], value: float) -> None:
    if here.transport is None:
        here.relay.send(state_of(value), to)
    else:
        here.transport.send_checkpoint(to, state_of(value))


def receive(here: Any, source: int) -> set[float]:
    if here.transport is None:
        return values_in(here.relay.recv(source).state)
    return values_in(here.transport.recv_checkpoint(source))


# In the test


@pytest.fixture
def port() -> Any:
    """Of a store that outlives the members."""
    store: Any = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield int(store.port)
    del store


def recover(port: int, members: list[Member], value: float) -> list[set[float]]:
    """A quorum of these members, in the order of their ranks, whose rank 0 sends to the others."""
    quorum, size = next(_quorums), len(members)
    for rank, one in enumerate(members):
        one.begin(configure, port, quorum, rank, size)
    for one in members:
        one.end()
    sender, *receivers = members
    sender.begin(send, list(range(1, size)), value)
    for one in receivers:
        one.begin(receive, 0)
    sender.end()
    return [one.end() for one in receivers]


@needs_torchft
@both_apis
@pytest.mark.parametrize("way", WAYS)
def test_members_that_were_renumbered(port: int, api: str, way: str) -> None:
    with Members(3) as (first, second, last):
        for member in (first, second, last):
            member.call(begin, api, way)
        for value, sender in enumerate((first, second, first), 1):
            assert recover(port, [sender, last], float(value)) == [{float(value)}]
        assert recover(port, [last, second, first], 9.0) == [{9.0}] * 2


@needs_torchft
@both_apis
@pytest.mark.parametrize("way", WAYS)
def test_a_member_that_was_replaced(port: int, api: str, way: str) -> None:
    with (group := Members(2)) as (first, last):
        for member in (first, last):
            member.call(begin, api, way)
        assert recover(port, [first, last], 1.0) == [{1.0}]
        first.kill()
        second = group.another()
        second.call(begin, api, way)
        assert recover(port, [second, last], 2.0) == [{2.0}]
        assert recover(port, [second, last], 3.0) == [{3.0}]


@needs_torchft
def test_memory_that_was_mapped_in_a_quorum_is_let_go_in_the_next(port: int) -> None:
    """The processes stay, and have other ids in each group."""
    with Members(2) as (sender, receiver):
        for member in (sender, receiver):
            member.call(begin, "Relay", "ring")
        for value in (1.0, 2.0, 3.0):
            assert recover(port, [sender, receiver], value) == [{value}]
        assert receiver.call(buffers_here, 1) == 1


@needs_torchft
def test_a_message_of_torchs_protocol_is_awaited_on_the_group_of_the_moment(port: int) -> None:
    """The receive that was posted for it on the group before never ends."""
    with Members(2) as (sender, receiver):
        sender.call(begin, "PGTransport", "tcp", "torch")
        receiver.call(begin, "PGTransport", "tcp")
        for member, rank in ((sender, 0), (receiver, 1)):
            member.begin(configure, port, -1, rank, 2)
        sender.end()
        receiver.end()
        receiver.call(gives_up, 0)
        for value in (1.0, 2.0):
            assert recover(port, [sender, receiver], value) == [{value}]


def gives_up(here: Any, source: int) -> None:
    """Wait for a checkpoint that never comes."""
    usual, here.transport._timeout = here.transport._timeout, 0.3
    with pytest.raises(tr.errors.TransferTimeoutError):
        here.transport.recv_checkpoint(source)
    here.transport._timeout = usual


@needs_torchft
def test_a_group_before_its_first_quorum_is_named() -> None:
    from torchft.process_group import ProcessGroupGloo

    relay = tr.Relay(ProcessGroupGloo(timeout=timedelta(seconds=SECONDS)))
    with pytest.raises(UsageError, match="ProcessGroupGloo is not configured yet"):
        relay.recv(0)


@needs_torchft
def test_a_group_that_does_not_tell_its_rank_is_refused() -> None:
    """Every process would take itself for rank 0, and no receiver would be met."""
    from torchft.process_group import ProcessGroupBabyGloo

    group = ProcessGroupBabyGloo(timeout=timedelta(seconds=SECONDS))
    group._world_size = 2  # as after `configure`, which starts a process
    with pytest.raises(UsageError, match="ProcessGroupBabyGloo does not tell the rank"):
        tr.Relay(group).recv(0)


class Wrapper:
    def __init__(self, behind: Any) -> None:
        self.parent = behind

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 1


def test_the_group_behind_wrappers_is_found() -> None:
    inner = Wrapper(None)
    assert current_group(inner) is inner
    assert current_group(Wrapper(Wrapper(inner))) is inner
    assert current_group(Wrapper("a name")).parent == "a name"
