"""Processes that die or stand still at every phase of a transfer, real ones.

After each: whoever lives got an answer in time, weights are old or new, and the next transfer on
what is left of the group is right.
"""

from __future__ import annotations

import contextlib
from typing import Any

import pytest

import torchrelay as tr
from tests.support.faults import (
    CHUNK,
    GRACE,
    RECEIVER,
    SENDER,
    Outcome,
    held_at,
    received,
    sent,
    verdict,
    weights,
)
from tests.support.ranks import Ranks, reached

OLD = 100  # seed of the weights that a receiver starts with
LONG = 25.0  # a deadline that no healthy call comes near to
SHORT = 1.2
START = 90.0  # for processes to start on a busy machine


# Killed: one survivor, and a victim for each phase


def receivers_die(rank: int, group: Any, phases: list[str]) -> list[Outcome]:
    """Rank 0 sends to one receiver after another; each is killed at its own phase."""
    relay = tr.Relay(group, chunk_bytes=CHUNK)
    if rank == 0:
        return [sent(relay, peer, peer, LONG) for peer in range(1, len(phases) + 2)]
    if rank > len(phases):
        live = weights(OLD)
        return [received(relay, 0, live, OLD, rank, 60)]
    with held_at(RECEIVER[phases[rank - 1]], "there"):
        received(relay, 0, weights(OLD), OLD, rank, 60)
    return []


def senders_die(rank: int, group: Any, phases: list[str], atomic: bool) -> list[Outcome]:
    """Rank 0 receives from one sender after another; each but the last is killed at its phase."""
    relay = tr.Relay(group, chunk_bytes=CHUNK)
    if rank == 0:
        live, seed, outcomes = weights(OLD), OLD, []
        for peer in range(1, len(phases) + 2):
            out = received(relay, peer, live, seed, peer, LONG, atomic=atomic)
            seed = out.weights if isinstance(out.weights, int) else seed
            outcomes.append(out)
        return outcomes
    hold = held_at(SENDER[phases[rank - 1]], "there") if rank <= len(phases) else None
    with hold or contextlib.nullcontext():
        return [sent(relay, rank, 0, 60)]


def kill_each(ranks: Ranks, count: int) -> None:
    for victim in range(1, count + 1):
        ranks.wait_reached(victim, "there", START)
        ranks.kill(victim)


EVERY_PHASE = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.mark.parametrize(
    "phases",
    [
        pytest.param(["joined", "data", "commit", "pass on"], id="some"),
        pytest.param(list(RECEIVER), marks=EVERY_PHASE, id="every"),
    ],
)
def test_sender_survives_receivers_killed(phases):
    with Ranks(receivers_die, len(phases) + 2, phases) as ranks:
        kill_each(ranks, len(phases))
        ours, last = ranks.results(60, ranks=[0, len(phases) + 1])
    for phase, out in zip(phases, ours, strict=False):
        assert out.seconds < LONG, (phase, out)
        if phase == "pass on":  # it has said that it is done
            assert out.error is None, (phase, out)
        else:
            assert out.error == "PeerLostError" and "rank" in out.text, (phase, out)
    assert ours[-1].error is None
    assert last[0].error is None and last[0].weights == len(phases) + 1


@pytest.mark.parametrize("atomic", [True, False])
@pytest.mark.parametrize(
    "phases",
    [
        pytest.param(["data", "trailer", "fin"], id="some"),
        pytest.param(list(SENDER), marks=EVERY_PHASE, id="every"),
    ],
)
def test_receiver_survives_senders_killed(phases, atomic):
    with Ranks(senders_die, len(phases) + 2, phases, atomic) as ranks:
        kill_each(ranks, len(phases))
        outcomes = ranks.results(60, ranks=[0])[0]
    before: int | str = OLD
    for index, (phase, out) in enumerate(zip(phases, outcomes, strict=False)):
        seed = index + 1
        assert out.seconds < LONG, (phase, out)
        if out.error is None:
            assert phase in ("trailer sent", "fin") and out.weights == seed, (phase, out)
        elif out.error == "TornStateError":
            assert not atomic and phase in ("data", "trailer", "trailer sent"), (phase, out)
            assert "connection lost" in out.text
        else:
            assert out.error == "PeerLostError", (phase, out)
            assert out.weights == before, (phase, out)
        before = out.weights
        if phase == "fin":
            assert out.error is None
    assert outcomes[-1].error is None and outcomes[-1].weights == len(phases) + 1


# Stopped: the same two ranks through many scenes on one group


def stopped_scenes(rank: int, group: Any, scenes: list[tuple[int, str, bool]]) -> list[Any]:
    relay = tr.Relay(group, chunk_bytes=CHUNK)
    live, seed, outcomes = weights(OLD), OLD, []
    for number, (victim, phase, atomic) in enumerate(scenes):
        faulty, healthy = 1000 + number, 2000 + number
        spot = (SENDER, RECEIVER)[victim][phase]
        with held_at(spot, "there") if rank == victim else contextlib.nullcontext():
            if rank == 0:
                out = sent(relay, faulty, 1, SHORT)
            else:
                out = received(relay, 0, live, seed, faulty, SHORT, atomic=atomic)
        reached("over", hold=True)
        # Both sides are back, and what was late has come.
        if rank == 0:
            again = sent(relay, healthy, 1, LONG)
        else:
            later = verdict(live, seed, faulty)
            assert later == out.weights, f"changed behind our back: {out} -> {later}"
            again = received(relay, 0, live, seed, healthy, LONG)
            seed = healthy
        outcomes.append((out, again))
        reached("next", hold=True)
    return outcomes


def play(ranks: Ranks, scenes: list[tuple[int, str, bool]]) -> list[Any]:
    for victim, _, _ in scenes:
        survivor = 1 - victim
        ranks.wait_reached(victim, "there", START)
        ranks.stop(victim)
        ranks.wait_reached(survivor, "over")
        ranks.cont(victim)
        ranks.release(victim)
        ranks.wait_reached(victim, "over")
        for step in ("next", None):
            for rank in (0, 1):
                ranks.release(rank)
            if step:
                for rank in (0, 1):
                    ranks.wait_reached(rank, step)
    return list(zip(*ranks.results(30), strict=True))


def check_stopped(scenes: list[tuple[int, str, bool]]) -> None:
    with Ranks(stopped_scenes, 2, scenes) as ranks:
        played = play(ranks, scenes)
    for scene, ((sender, sent_again), (receiver, got_again)) in zip(scenes, played, strict=True):
        victim, phase, atomic = scene
        survivor = (receiver, sender)[victim]
        assert survivor.seconds < SHORT + GRACE, (scene, survivor)
        assert sender.error in (None, "TransferTimeoutError", "PeerLostError"), (scene, sender)
        new = receiver.error is None
        if new:
            assert receiver.weights not in ("torn", OLD), (scene, receiver)
        elif receiver.error == "TornStateError":
            assert not atomic, (scene, receiver)
        else:
            assert receiver.error in ("TransferTimeoutError", "PeerAbortedError"), (scene, receiver)
            assert receiver.weights != "torn"
        # Who has said that all is in place cannot take it back; who has not must not claim it.
        if phase in ("fin", "pass on"):
            assert new, (scene, receiver)
        elif phase in ("call", "joined", "accepted", "capture", "go", "trailer"):
            assert not new, (scene, receiver)
        assert sent_again.error is None and got_again.error is None, (scene, sent_again, got_again)
        assert got_again.weights >= 2000, (scene, got_again)


def test_stopped_and_continued():
    check_stopped(
        [
            (0, "capture", True),
            (0, "data", True),
            (0, "trailer", False),
            (0, "fin", True),
            (1, "call", True),
            (1, "joined", True),
            (1, "data", False),
            (1, "done", True),
        ]
    )


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("atomic", [True, False])
@pytest.mark.parametrize("victim", [0, 1])
def test_stopped_at_every_phase(victim, atomic):
    check_stopped([(victim, phase, atomic) for phase in (SENDER, RECEIVER)[victim]])


# Several receivers in a chain


CHAINS = ([1, 2, 3], [2, 4, 3], [2, 3, 5])
"""Receivers of three transfers. In each one rank is killed: the first, the middle, the last."""
VICTIMS = (1, 4, 5)


def chain_loses_one(rank: int, group: Any) -> list[Outcome]:
    relay = tr.Relay(group, chunk_bytes=CHUNK, join_window=20)
    unverified = tr.Relay(group, chunk_bytes=CHUNK, join_window=20, verify=False)
    live, seed, outcomes = weights(OLD), OLD, []
    for number, chain in enumerate(CHAINS):
        if rank == 0:
            outcomes.append(sent(unverified if number == 0 else relay, number, chain, LONG))
        elif rank in chain:
            hold = held_at(RECEIVER["data"], "there") if rank == VICTIMS[number] else None
            with hold or contextlib.nullcontext():
                out = received(relay, 0, live, seed, number, 60)
            outcomes.append(out)
            seed = number
    if rank in (2, 3):
        outcomes.append(received(relay, 0, live, seed, 77, LONG))
    elif rank == 0:
        with held_at(SENDER["data"], "there"):
            sent(relay, 77, [2, 3], LONG)
    return outcomes


def test_a_dead_rank_in_a_chain_fails_nobody_else():
    with Ranks(chain_loses_one, 6) as ranks:
        for victim in VICTIMS:
            ranks.wait_reached(victim, "there", START)
            ranks.kill(victim)
        ranks.wait_reached(0, "there", START)
        ranks.kill(0)
        outcomes = ranks.results(60, ranks=[2, 3])
    for out in outcomes:
        for number, one in enumerate(out[:3]):
            assert one.error is None and one.weights == number, (number, out)
            assert one.seconds < LONG
        # The sender's own death is everybody's.
        assert out[3].error == "PeerLostError" and out[3].weights == 2, out


def chain_stops_one(rank: int, group: Any) -> list[Any]:
    relay = tr.Relay(group, chunk_bytes=CHUNK, join_window=1.0)
    live, seed, outcomes = weights(OLD), OLD, []
    for victim in (1, 2, 3):
        healthy = [peer for peer in (1, 2, 3) if peer != victim]
        faulty, meanwhile, after = victim * 10, victim * 10 + 1, victim * 10 + 2
        steps = []
        if rank == 0:
            steps.append(sent(relay, faulty, [1, 2, 3], LONG))
            steps.append(sent(relay, meanwhile, healthy, LONG))
        else:
            with held_at(RECEIVER["data"], "there") if rank == victim else contextlib.nullcontext():
                steps.append(received(relay, 0, live, seed, faulty, LONG))
            if rank != victim:
                steps.append(received(relay, 0, live, faulty, meanwhile, LONG))
        reached("over", hold=True)
        if rank == 0:
            steps.append(sent(relay, after, [1, 2, 3], LONG))
        else:
            before = meanwhile if rank != victim else seed
            assert verdict(live, before) == before, "changed behind our back"
            steps.append(received(relay, 0, live, before, after, LONG))
            seed = after
        outcomes.append(steps)
    return outcomes


def test_a_stopped_rank_in_a_chain_delays_nobody_else():
    with Ranks(chain_stops_one, 4) as ranks:
        for victim in (1, 2, 3):
            ranks.wait_reached(victim, "there", START)
            ranks.stop(victim)
            for rank in {0, 1, 2, 3} - {victim}:
                ranks.wait_reached(rank, "over")
            ranks.cont(victim)
            ranks.release(victim)
            ranks.wait_reached(victim, "over")
            for rank in range(4):
                ranks.release(rank)
        results = ranks.results(30)
    for victim in (1, 2, 3):
        scene = [result[victim - 1] for result in results]
        healthy = tuple(rank for rank in (1, 2, 3) if rank != victim)
        first = scene[0][0]
        assert first.failed == (victim,) and first.receivers == healthy, scene
        # A window to find out, some to judge, and far from the deadline.
        assert first.seconds < 8, scene
        for rank in (0, *healthy):
            assert [out.error for out in scene[rank]] == [None] * 3, scene
        assert scene[victim][0].error == "PeerAbortedError", scene
        assert scene[victim][-1].weights == victim * 10 + 2, scene
        for rank in healthy:
            assert [out.weights for out in scene[rank]] == [victim * 10 + n for n in range(3)]
        assert scene[0][2].failed == (), scene
