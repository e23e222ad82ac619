"""Sender and receivers agree on who has the state; where a sender cannot know, it says so."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

import torchrelay as tr
from tests.support.faults import CHUNK, verdict, weights
from tests.support.ways import by, every_way, patched
from torchrelay.errors import RelayError
from torchrelay.transports.protocol import wire
from torchrelay.transports.protocol.machines.peers import Peer, Stage, outcome
from torchrelay.transports.protocol.receiver import Receiving
from torchrelay.transports.protocol.sender import Sending

OLD, LONG = 100, 25.0
STILL = 2.5  # seconds that a receiver stands still: longer than a sender waits for its last word


def runs_out_of_time(wait: Callable[[], object]) -> AbstractContextManager[None]:
    """Within: a sender that has told all there is to tell waits, and then has no time left."""
    original = Sending._trail

    def trail(sending: Sending, peer: Peer) -> None:
        original(sending, peer)
        wait()
        sending._deadline.hasten(0.0)

    return patched(Sending, _trail=trail)


def stands_still(store: dist.Store, then: Callable[..., None]) -> AbstractContextManager[None]:
    """Within: a receiver that has it all tells `store` so, and waits before it goes on."""

    def goodbye(receiving: Receiving, message: wire.Message) -> None:
        if isinstance(message, wire.Done):
            store.set(HAS_IT_ALL, "")
            time.sleep(STILL)
            then()
        GOODBYE(receiving, message)

    return patched(Receiving, _goodbye=goodbye)


def fail() -> None:
    raise MemoryError("after all")


GOODBYE = Receiving._goodbye
HAS_IT_ALL = "the receiver has all data"


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
    """The receiver stands still with all data in its hands, past the sender's deadline."""
    relay, live = tr.Relay(group, chunk_bytes=CHUNK), weights(OLD)
    store = group.get_group_store()
    if rank == 0:
        with runs_out_of_time(lambda: store.wait([HAS_IT_ALL], timedelta(seconds=LONG))):
            first = report_of(lambda: relay.send(weights(1), 1, timeout=LONG))
        dist.barrier(group)
        second = relay.send(weights(2), 1, timeout=LONG)
        third = relay.send(weights(3), 1, timeout=LONG)
        return first.receivers, first.failed, list(first.unknown), second.settled, third.settled

    with stands_still(store, (lambda: None) if gets_it else fail):
        try:
            relay.recv(0, into=live, timeout=LONG)
        except MemoryError:
            assert not gets_it
    now = int(verdict(live, OLD, 1))
    dist.barrier(group)
    relay.recv(0, into=live, timeout=LONG)
    relay.recv(0, into=live, timeout=LONG)
    return now, verdict(live, 3)


@pytest.mark.parametrize(("way", "gets_it"), [("host", True), ("group", True), ("channel", False)])
def test_a_receiver_that_may_have_the_state_is_unknown_until_it_tells(
    pool2: Any, way: str, gets_it: bool
) -> None:
    ours, theirs = pool2.run(by, way, late_receiver, gets_it, timeout=60, fresh_group=True)
    assert ours == ((), {}, [1], {1: gets_it}, {}), ours
    assert theirs == (1, 3)


def test_the_error_says_that_a_receiver_may_have_it() -> None:
    peer = Peer(3, 7, stage=Stage.ACCEPTED, trailed=True)
    peer.give_up("not done after 2 s", late=True)
    fault = outcome([peer], sent="5 of 5 bytes sent", step=None, phase="data")
    assert isinstance(fault, tr.TransferTimeoutError)
    assert "rank 3 not done after 2 s, and may have the state" in fault.message
    peer.settle(wire.Done())
    assert outcome([peer], sent="", step=None, phase="data") is None


def test_what_was_not_told_all_cannot_have_it() -> None:
    for stage, trailed in ((Stage.JOINED, False), (Stage.ACCEPTED, False)):
        peer = Peer(3, 7, stage=stage, trailed=trailed)
        peer.give_up("lost")
        assert peer.stage is Stage.FAILED
