"""Faults of live transfers: each test is a promise that an earlier design of the protocol broke."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from threading import Barrier
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DeviceMesh, DTensor, Shard

import torchrelay as tr
from tests.support.faults import CHUNK, Outcome, attempt, received, verdict, weights
from tests.support.messages import altering
from tests.support.ways import by, patched
from torchrelay.describing.snapshot import Snapshot
from torchrelay.transports.protocol.receiver import Receiving
from torchrelay.transports.protocol.sender import Sending
from torchrelay.transports.protocol.serving import Serving
from torchrelay.transports.wire.messages import Confirmed, Digests, Go, Offer

OLD, NEW = 100, 1
LONG = 25.0


# A failure of the sender


def unreadable(rank: int, group: Any) -> Any:
    """A chunk of the state cannot be read when its turn comes."""
    relay = tr.Relay(group, chunk_bytes=CHUNK, timeout=LONG)
    live = weights(OLD)
    if rank == 1:
        return received(relay, 0, live, OLD, NEW, LONG), received(relay, 0, live, OLD, 2, LONG)

    def fail(*args: Any) -> Any:
        raise RuntimeError("the memory is not there any more")

    begun = time.monotonic()
    with patched(Snapshot, view=fail, read=fail), pytest.raises(RuntimeError, match="not there"):
        relay.send(weights(NEW), 1, step=NEW)
    seconds = time.monotonic() - begun
    return Outcome("RuntimeError", "", seconds), attempt(lambda: relay.send(weights(2), 1, step=2))


@pytest.mark.parametrize("way", ["tcp", "ring"])
def test_a_sender_that_fails_while_it_serves_tells_its_receiver_at_once(
    pool2: Any, way: str
) -> None:
    (ours, after), (theirs, again) = pool2.run(by, way, unreadable, fresh_group=True)
    assert theirs.error == "PeerAbortedError" and "not there" in theirs.text, theirs
    assert theirs.weights == OLD and max(ours.seconds, theirs.seconds) < LONG / 4
    assert after.error is None and again.weights == 2


UNSENT = {"Offer": Offer, "Go": Go, "Confirmed": Confirmed, "Digests": Digests}


def unsent(rank: int, group: Any, name: str) -> Any:
    """There is no memory for one of the sender's messages."""
    relay = tr.Relay(group, chunk_bytes=CHUNK, timeout=LONG, verify="all")
    live = weights(OLD)
    if rank == 1:
        return received(relay, 0, live, OLD, NEW, LONG), received(relay, 0, live, OLD, 2, LONG)

    def alter(message: Any) -> Any:
        if isinstance(message, UNSENT[name]):
            raise MemoryError("for a message")
        return message

    with (
        altering(alter),
        pytest.raises((MemoryError, tr.errors.PeerLostError), match="for a message"),
    ):
        relay.send(weights(NEW), 1, step=NEW)
    return attempt(lambda: relay.send(weights(2), 1, step=2))


@pytest.mark.parametrize(
    ("way", "name"),
    [("tcp", "Offer"), ("tcp", "Go"), ("tcp", "Confirmed"), ("memory", "Digests")],
)
def test_an_error_while_a_message_is_sent_reaches_the_receiver_at_once(
    pool2: Any, way: str, name: str
) -> None:
    after, (theirs, again) = pool2.run(by, way, unsent, name, fresh_group=True)
    assert theirs.error == "PeerAbortedError" and "for a message" in theirs.text, theirs
    assert theirs.weights == OLD and theirs.seconds < LONG / 4
    assert after.error is None and again.weights == 2


# Gathers


def senders() -> DeviceMesh:
    """Made by all ranks at once."""
    return DeviceMesh("cpu", [0, 1])


def shard(mesh: DeviceMesh, seed: int, rank: int) -> dict[str, Any]:
    """The part of a state that one of two senders has."""
    rows = full(seed).chunk(2)[rank]
    return {"w": DTensor.from_local(rows, mesh, [Shard(0)], run_check=False), "seed": seed}


def full(seed: int) -> torch.Tensor:
    return torch.randn(64, 32, generator=torch.Generator().manual_seed(seed))


def seed_of(live: dict[str, Any], *seeds: int) -> int | str:
    found = (n for n in seeds if live["seed"] == n and torch.equal(live["w"], full(n)))
    return next(found, "torn")


def blank() -> dict[str, Any]:
    return {"w": full(OLD), "seed": OLD}


def gathered(relay: tr.Relay, live: dict[str, Any], **options: Any) -> Outcome:
    out = attempt(lambda: relay.recv([0, 1], into=live, **options))
    return out._replace(weights=seed_of(live, OLD, NEW, 2))


def trained_on(rank: int, group: Any, when: str) -> Any:
    """Rank 1 trains on between the selection of boxes and their copy, or before the commit."""
    relay, mesh = tr.Relay(group, timeout=LONG, verify="all", join_window=3.0), senders()
    dist.barrier(group)
    if rank == 2:
        live = blank()
        return gathered(relay, live, step=NEW), gathered(relay, live, step=2)
    state, again = shard(mesh, NEW, rank), shard(mesh, 2, rank)
    original = getattr(Serving, when)

    def trains(self: Serving, *args: Any) -> Any:
        with torch.no_grad():
            state["w"].to_local().add_(1)
        return original(self, *args)

    with patched(Serving, **{when: trains}) if rank == 1 else nullcontext():
        out = attempt(lambda: relay.send(state, 2, step=NEW))
    return out, attempt(lambda: relay.send(again, 2, step=2))


@pytest.mark.parametrize("when", ["_outgoing_of", "confirm"])
@pytest.mark.parametrize("way", ["tcp", "memory", "ring"])
def test_a_gather_of_a_state_that_is_trained_on_is_an_error_on_all_sides(
    pool3: Any, way: str, when: str
) -> None:
    (other, _), (trainer, _), (theirs, again) = pool3.run(by, way, trained_on, when, timeout=90)
    assert theirs.error == "PeerAbortedError" and theirs.weights == OLD, theirs
    assert "changed" in theirs.text and trainer.error == "StateError", (theirs, trainer)
    assert other.error in ("PeerLostError", "PeerRefusedError"), other
    assert again.error is None and again.weights == 2, again


def two_at_once(rank: int, group: Any, steps: bool, rounds: int) -> Any:
    """Two gathers at once, of two states that each of two ranks sends."""
    relay, mesh = tr.Relay(group, timeout=LONG, join_window=3.0), senders()
    found = []
    both = Barrier(2)
    original = Sending._described

    def beside(self: Sending, state: object) -> Any:
        # Calls that do not overlap on a rank are calls one after the other, which only a step
        # tells apart.
        both.wait(LONG)
        return original(self, state)

    for _ in range(rounds):
        dist.barrier(group)

        def one(seed: int) -> Any:
            step = seed if steps else None
            if rank < 2:
                return attempt(lambda: relay.send(shard(mesh, seed, rank), 2, step=step)).error
            live = blank()
            out = gathered(relay, live, step=step)
            return out.error, out.weights

        with patched(Sending, _described=beside), ThreadPoolExecutor(2) as pool:
            found.append(list(pool.map(one, (NEW, 2))))
    return found


@pytest.mark.parametrize("steps", [True, False])
def test_two_gathers_at_once_never_mix_two_states(pool3: Any, steps: bool) -> None:
    found = pool3.run(two_at_once, steps, 4, timeout=120)
    for result in found[2]:
        if steps:
            assert result == [(None, NEW), (None, 2)], found
        for error, seed in result:
            assert seed == OLD if error else seed in (NEW, 2), found
            assert error in (None, "StepMismatchError", "PeerAbortedError"), found


class Interrupt(BaseException):
    """Stands for KeyboardInterrupt, which would end the worker."""


PLACES = ("_meet", "_fit", "_accept", "_fetch", "_confirm", "_commit")


def ended(rank: int, group: Any, place: str, fault: type[BaseException]) -> Any:
    """A gather from rank 0 ends at some place; the next calls are a plain and a gathering one."""
    relay = tr.Relay(group, timeout=LONG)
    if rank == 0:
        first = attempt(lambda: relay.send(weights(NEW), 1))
        return first, *(attempt(lambda: relay.send(weights(2), 1)).error for _ in range(2))
    live = weights(OLD)
    original = getattr(Receiving, place)

    def ends(self: Receiving, *args: Any) -> Any:
        if place == "_meet":
            original(self, *args)
        raise fault("here")

    with patched(Receiving, **{place: ends}), pytest.raises(fault):
        relay.recv([0], into=live)
    old = verdict(live, OLD)
    plain = relay.recv(0).state
    relay.recv([0], into=live)
    return old, verdict(plain, 2), verdict(live, 2)


@pytest.mark.parametrize("fault", [ValueError, Interrupt])
@pytest.mark.parametrize("place", PLACES)
def test_a_gather_that_fails_or_is_interrupted_leaves_the_next_calls_right(
    pool2: Any, place: str, fault: type[BaseException]
) -> None:
    (first, *after), theirs = pool2.run(ended, place, fault, fresh_group=True)
    assert theirs == (OLD, 2, 2)
    assert after == [None, None] and first.seconds < LONG / 4, first
    assert first.error == "PeerLostError" and "gave up" in first.text, first


def nobody_came(rank: int, group: Any) -> Any:
    """A send that nobody takes, then a gather that times out, then a pair that fits."""
    relay = tr.Relay(group, timeout=LONG)
    live = weights(OLD)
    early = None
    if rank == 0:
        early = attempt(lambda: relay.send(weights(NEW), 1, timeout=0.5))
    dist.barrier(group)
    if rank == 1:
        early = attempt(lambda: relay.recv([0], into=live, timeout=0.5))
    dist.barrier(group)
    if rank == 0:
        return early.error, attempt(lambda: relay.send(weights(2), 1)).error
    relay.recv([0], into=live)
    return early.error, verdict(live, 2)


def test_a_send_that_nobody_took_and_a_gather_that_timed_out_leave_the_next_pair_right(
    pool2: Any,
) -> None:
    late = "TransferTimeoutError"
    assert pool2.run(nobody_came, fresh_group=True) == [(late, None), (late, 2)]


def leaves(rank: int, group: Any, gathers: bool) -> Any:
    """The receiver looks at the offer and has no time left."""
    relay = tr.Relay(group, timeout=LONG)
    if rank == 0:
        return attempt(lambda: relay.send(weights(NEW), 1))

    def slow(self: Any, *args: Any) -> Any:
        raise tr.errors.TransferTimeoutError("no time left")

    with patched(Receiving, _fit=slow):
        return attempt(lambda: relay.recv([0] if gathers else 0))


@pytest.mark.parametrize("gathers", [True, False])
def test_the_sender_of_a_receiver_that_left_does_not_wait_for_its_timeout(
    pool2: Any, gathers: bool
) -> None:
    ours, theirs = pool2.run(leaves, gathers, fresh_group=True)
    assert theirs.error == "TransferTimeoutError"
    assert ours.error == "TransferTimeoutError" and "no time left" in ours.text, ours
    assert ours.seconds < LONG / 4


# Arguments, caches


def onto(rank: int, group: Any, device: str) -> Any:
    relay, live = tr.Relay(group, timeout=LONG), weights(OLD)
    if rank == 0:
        return attempt(lambda: relay.send(weights(NEW), 1)).error
    out = attempt(lambda: relay.recv(0, device=device))
    relay.recv(0, into=live)
    return out.error, verdict(live, NEW)


@pytest.mark.parametrize("device", ["meta", "cuda:63"])
def test_a_device_that_has_no_memory_is_refused_before_anything_is_received(
    pool2: Any, device: str
) -> None:
    assert pool2.run(onto, device, fresh_group=True) == [None, ("UsageError", NEW)]


# Cost


def costs(rank: int, group: Any, count: int) -> dict[bool, float]:
    """Seconds of processor time of this rank, plain and gathered; the best of three."""
    relay = tr.Relay(group, timeout=120.0)
    state = {f"layers.{n}": torch.full((64,), float(n)) for n in range(count)}
    into = {name: torch.zeros(64) for name in state}
    best: dict[bool, float] = {}
    for gathers in (False, True) * 3:
        dist.barrier(group)
        begun = time.process_time()
        if rank == 0:
            relay.send(state, 1)
        else:
            relay.recv([0] if gathers else 0, into=into)
        spent = time.process_time() - begun
        best[gathers] = min(spent, best.get(gathers, spent))
    return best


def test_a_gather_costs_at_most_three_times_as_much_as_a_plain_receive(pool2: Any) -> None:
    ours, theirs = pool2.run(costs, 8000, timeout=240, fresh_group=True)
    plain, gathered = (ours[kind] + theirs[kind] for kind in (False, True))
    assert gathered <= 3 * plain, f"{gathered:.3f} s, plain {plain:.3f} s"
