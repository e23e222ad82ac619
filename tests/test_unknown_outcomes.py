"""Sender and receivers agree on who has the state; where a sender cannot know, it says so."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch.distributed as dist

import torchrelay as tr
from tests.support.faults import CHUNK, verdict, weights
from tests.support.ways import by, every_way, patched
from torchrelay.errors import RelayError
from torchrelay.transports import wire
from torchrelay.transports.peers import Peer, outcome
from torchrelay.transports.receiver import Receiving
from torchrelay.transports.sender import Sending

OLD, LONG = 100, 25.0
STILL = 2.5  # seconds that a receiver stands still: longer than a sender waits for its last word


def runs_out_of_time(pause: float) -> AbstractContextManager[None]:
    """Within: a sender has no time left `pause` seconds after it has told all there is to tell."""
    original = Sending._send_trailers

    def send_trailers(sending: Sending) -> None:
        original(sending)
        if any(peer.trailed for peer in sending.peers.values()):
            time.sleep(pause)
            sending._deadline.hasten(0.0)

    return patched(Sending, _send_trailers=send_trailers)


def stands_still(receiving: Receiving, message: wire.Message) -> None:
    """In place of `_goodbye`: nothing happens for a while before the last word is said."""
    if isinstance(message, wire.Done):
        time.sleep(STILL)
    GOODBYE(receiving, message)


def fails_late(receiving: Receiving, message: wire.Message) -> None:
    if isinstance(message, wire.Done):
        time.sleep(STILL)
        raise MemoryError("after all")
    GOODBYE(receiving, message)


GOODBYE = Receiving._goodbye


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
        with runs_out_of_time(0.5):
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
    if rank == 0:
        with runs_out_of_time(0.0):
            first = report_of(lambda: relay.send(weights(1), 1, timeout=LONG))
        dist.barrier(group)
        second = relay.send(weights(2), 1, timeout=LONG)
        third = relay.send(weights(3), 1, timeout=LONG)
        return first.receivers, first.failed, list(first.unknown), second.settled, third.settled

    with patched(Receiving, _goodbye=stands_still if gets_it else fails_late):
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
    line: Any = None
    peer = Peer(3, line, stage="accepted", trailed=True)
    peer.give_up("not done after 2 s", late=True)
    fault = outcome([peer], sent="5 of 5 bytes sent", step=None, phase="data")
    assert isinstance(fault, tr.TransferTimeoutError)
    assert "rank 3 not done after 2 s, and may have the state" in fault.message
    peer.settle(wire.Done())
    assert outcome([peer], sent="", step=None, phase="data") is None


def test_what_was_not_told_all_cannot_have_it() -> None:
    line: Any = None
    for stage, trailed in (("joined", False), ("accepted", False)):
        peer = Peer(3, line, stage=stage, trailed=trailed)
        peer.give_up("lost")
        assert peer.stage == "failed"
