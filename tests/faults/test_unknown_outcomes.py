"""Sender and receivers agree on who has the state; where a sender cannot know, it says so."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch.distributed as dist

import torchrelay as tr
from tests.support.faults import CHUNK, verdict, weights
from tests.support.members import Members
from tests.support.quorums import join_transport, sit
from tests.support.ways import by, every_way, patched
from torchrelay.errors import RelayError
from torchrelay.transports.meeting.directory import identity_from_text
from torchrelay.transports.meeting.last_transfers import LastTransfers
from torchrelay.transports.protocol.peers import Peer, Stage, outcome
from torchrelay.transports.protocol.receiver import Receiving
from torchrelay.transports.protocol.serving import Serving

OLD, LONG = 100, 25.0
STILL = 1.2  # seconds that a receiver stands still: longer than a sender waits past its deadline


def runs_out_of_time(wait: Callable[[], object]) -> AbstractContextManager[None]:
    """Within: a sender that has confirmed its state waits, and then has no time left."""
    original = Serving.confirm

    def confirm(serving: Serving, peer: Any) -> None:
        original(serving, peer)
        wait()
        serving._call.deadline.hasten(0.0)

    return patched(Serving, confirm=confirm)


def stands_still(then: Callable[[], None]) -> AbstractContextManager[None]:
    """Within: a receiver that has been told to commit waits before it does."""
    original = Receiving._commit

    def commit(receiving: Receiving, *args: Any) -> Any:
        time.sleep(STILL)
        then()
        return original(receiving, *args)

    return patched(Receiving, _commit=commit)


def fail() -> None:
    raise MemoryError("after all")


def report_of(call: Callable[[], tr.Report]) -> tr.Report:
    try:
        return call()
    except RelayError as fault:
        assert isinstance(fault.report, tr.Report), fault
        return fault.report


def late_sender(rank: int, group: Any) -> Any:
    """The sender stands still while its receiver finishes."""
    relay, live = tr.Relay(group, chunk_bytes=CHUNK), weights(OLD)
    if rank == 0:
        with runs_out_of_time(lambda: time.sleep(0.5)):
            report = report_of(lambda: relay.send(weights(1), 1, timeout=LONG))
        return report.receivers, report.failed, report.unknown
    relay.recv(0, into=live, timeout=LONG)
    return verdict(live, OLD, 1)


@every_way
def test_a_sender_that_stood_still_believes_what_it_was_told_meanwhile(
    pool2: Any, way: str
) -> None:
    assert pool2.run(by, way, late_sender, fresh_group=True) == [((1,), {}, {}), 1]


def late_receiver(rank: int, group: Any, gets_it: bool) -> Any:
    """The receiver stands still before its commit, past the sender's deadline."""
    relay, live = tr.Relay(group, chunk_bytes=CHUNK), weights(OLD)
    if rank == 0:
        with runs_out_of_time(lambda: None):
            first = report_of(lambda: relay.send(weights(1), 1, timeout=LONG))
        dist.barrier(group)
        second = relay.send(weights(2), 1, timeout=LONG)
        third = relay.send(weights(3), 1, timeout=LONG)
        return first.receivers, first.failed, list(first.unknown), second.settled, third.settled

    with stands_still((lambda: None) if gets_it else fail):
        try:
            relay.recv(0, into=live, timeout=LONG)
        except MemoryError:
            assert not gets_it
    now = verdict(live, OLD, 1)
    dist.barrier(group)
    relay.recv(0, into=live, timeout=LONG)
    relay.recv(0, into=live, timeout=LONG)
    return now, verdict(live, 3)


@pytest.mark.parametrize("gets_it", [True, False])
@pytest.mark.parametrize("way", ["memory", "tcp"])
def test_a_receiver_that_may_have_the_state_is_unknown_until_it_tells(
    pool2: Any, way: str, gets_it: bool
) -> None:
    ours, theirs = pool2.run(by, way, late_receiver, gets_it, timeout=60, fresh_group=True)
    assert ours == ((), {}, [1], {1: gets_it}, {}), ours
    assert theirs == (1 if gets_it else OLD, 3)


def test_the_error_says_that_a_receiver_may_have_it() -> None:
    peer = Peer(3, Stage.CONFIRMED)
    peer.give_up("not done after 2 s", timed_out=True)
    fault = outcome([peer], sent="5 of 5 bytes sent", step=None, phase="data")
    assert isinstance(fault, tr.errors.TransferTimeoutError)
    assert "rank 3 not done after 2 s, and may have the state" in fault.message


@pytest.mark.parametrize("stage", [Stage.OFFERED, Stage.ACCEPTED, Stage.ACTIVE])
def test_a_receiver_that_was_not_told_to_commit_cannot_have_it(stage: Stage) -> None:
    peer = Peer(3, stage)
    peer.give_up("lost")
    assert peer.stage is Stage.FAILED


# A receiver is a process: a quorum may give its rank to another one


def sends_and_does_not_know(here: Any) -> list[int]:
    with runs_out_of_time(lambda: None):
        report = report_of(lambda: here.transport._relay.send(weights(1), 1, timeout=LONG))
    return [int(rank) for rank in report.unknown]


def sends_to(here: Any, ranks: list[int]) -> dict[int, bool]:
    return dict(here.transport._relay.send(weights(2), ranks, timeout=LONG).settled)


def takes(here: Any, metadata: str, late: bool) -> None:
    here.transport._quorum.known.give(0, identity_from_text(metadata, 0))
    with stands_still(lambda: None) if late else nullcontext():
        here.transport._relay.recv(0, timeout=LONG)


def test_an_outcome_is_that_of_a_process_whatever_its_rank_is() -> None:
    with Members(3) as (sender, receiver, other):
        for member in (sender, receiver, other):
            member.call(join_transport, "memory")
        metadata = sender.call(sit, 0, 2)
        receiver.call(sit, 1, 2)
        sender.begin(sends_and_does_not_know)
        receiver.begin(takes, metadata, True)
        assert sender.end() == [1]
        receiver.end()
        for rank, member in ((1, other), (2, receiver)):
            member.call(sit, rank, 3)
        sender.call(sit, 0, 3)
        for ranks, members, settled in (
            ([1], [other], {}),
            ([1, 2], [other, receiver], {2: True}),
            ([2], [receiver], {}),
        ):
            sender.begin(sends_to, ranks)
            for member in members:
                member.begin(takes, metadata, False)
            assert sender.end() == settled
            for member in members:
                member.end()


def test_few_of_the_outcomes_of_processes_that_are_gone_are_kept() -> None:
    last = LastTransfers()
    for number in range(2 * LastTransfers.MOST):
        last.note(number.to_bytes(16, "big"), b"transfer")
    assert len(last._known) == LastTransfers.MOST
    assert last.find((2 * LastTransfers.MOST - 1).to_bytes(16, "big")) == b"transfer"
