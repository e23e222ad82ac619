"""A sender that cannot send tells the receivers that wait, and the next call is right."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

import torchrelay as tr
from tests.support.faults import CHUNK, Outcome, attempt, received, sent, weights
from tests.support.ways import by, every_way
from torchrelay.dropin import PGTransport

OLD, LONG = 100, 30.0
SOON = 15.0  # seconds: far from a deadline, and enough for a busy machine


def odd() -> int:
    return 0


CALLS: dict[str, Callable[[tr.Relay, Any], Any]] = {
    "a lambda": lambda relay, to: relay.send({"w": torch.ones(3), "f": odd}, to),
    "an object": lambda relay, to: relay.send({"o": object()}, to),
    "a leaf of another kind": lambda relay, to: relay.send({"s": {1, 2}}, to),
    "a step": lambda relay, to: relay.send(weights(1), to, step=-1),
    "a route": lambda relay, to: relay.send(weights(1), to, route="hots"),
    "a timeout": lambda relay, to: relay.send(weights(1), to, timeout=0),
    "a join timeout": lambda relay, to: relay.send(weights(1), to, join_timeout=-1),
    "progress": lambda relay, to: relay.send(weights(1), to, progress=3),
}


def refused(rank: int, group: Any, to: list[int]) -> list[tuple[Outcome, Outcome]]:
    """Each refused call is followed by one that must be right."""
    relay, live, now, outcomes = (
        tr.Relay(group, chunk_bytes=CHUNK, timeout=LONG),
        weights(OLD),
        OLD,
        [],
    )
    for number, call in enumerate(CALLS.values()):
        if rank == 0:
            first = attempt(lambda call=call: call(relay, to))
        else:
            first = attempt(lambda: relay.recv(0, into=live))
        dist.barrier(group)
        if rank == 0:
            second = sent(relay, number, to, LONG)
        else:
            second = received(relay, 0, live, now, number, LONG)
            now = number
        outcomes.append((first, second))
    return outcomes


def check(results: list[list[tuple[Outcome, Outcome]]]) -> None:
    for name, *ranks in zip(CALLS, *results, strict=True):
        sender = ranks[0][0]
        for first, second in ranks[1:]:
            assert first.error == "PeerAbortedError", (name, first)
            assert str(sender.error) in first.text, (name, sender, first)
            assert first.seconds < SOON, (name, first)
            assert second.error is None, (name, second)
        assert sender.seconds < SOON and ranks[0][1].error is None, (name, ranks[0])


@every_way
def test_a_receiver_hears_at_once_that_the_state_is_refused(pool2: Any, way: str) -> None:
    check(pool2.run(by, way, refused, [1], timeout=90, fresh_group=True))


def test_all_receivers_hear_at_once_that_the_state_is_refused(pool4: Any) -> None:
    check(pool4.run(refused, [3, 1, 2], timeout=90, fresh_group=True))


def dropin(rank: int, group: Any) -> str:
    transport = PGTransport(group, timedelta(seconds=LONG), torch.device("cpu"))
    begun = time.monotonic()
    try:
        if rank == 0:
            transport.send_checkpoint([1], {"f": odd})
        else:
            transport.recv_checkpoint(0)
    except tr.RelayError as fault:
        return f"{type(fault).__name__} {time.monotonic() - begun < SOON} {fault.message}"
    return "no error"


def test_a_receiver_of_the_dropin_hears_at_once_that_the_state_is_refused(pool2: Any) -> None:
    ours, theirs = pool2.run(dropin, fresh_group=True)
    assert ours.startswith("UnsupportedLeafError True"), ours
    assert theirs.startswith("PeerAbortedError True") and "UnsupportedLeafError" in theirs, theirs


def nobody_waits(rank: int, group: Any) -> Any:
    """A refusal that nobody waited for is not told to those who come later."""
    relay, live = tr.Relay(group, chunk_bytes=CHUNK), weights(OLD)
    first = attempt(lambda: relay.send({"f": odd}, 1, timeout=LONG)) if rank == 0 else None
    dist.barrier(group)
    if rank == 0:
        return first, sent(relay, 1, 1, LONG)
    return None, received(relay, 0, live, OLD, 1, LONG)


@pytest.mark.parametrize("way", ["group", "host"])
def test_who_comes_after_a_refusal_gets_the_next_state(pool2: Any, way: str) -> None:
    (first, ours), (_, theirs) = pool2.run(by, way, nobody_waits, fresh_group=True)
    assert first.error == "UnsupportedLeafError" and first.seconds < SOON
    assert ours.error is None and theirs.error is None and theirs.weights == 1
