"""Processes that die or stand still at every phase of a transfer, real ones.

After each: whoever lives got an answer in time, weights are old or new, and the next transfer on
what is left of the group is right. A scene is a way and a phase of it; scenes of all ways share
their processes, which take longer to start than to play.
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
from tests.support.ways import WAYS, by, every_way, taking

OLD = 100  # seed of the weights that a receiver starts with
LONG = 25.0  # a deadline that no healthy call comes near to
SHORT = 1.2
START = 90.0  # for processes to start on a busy machine


# Killed: one survivor, and a victim for each scene

Kill = tuple[str, str]  # way, phase


def receivers_die(rank: int, group: Any, scenes: list[Kill]) -> list[Outcome]:
    """Rank 0 sends to one receiver after another; each is killed at its own phase."""
    count = len(scenes)
    if rank == 0:
        outcomes = []
        for peer in range(1, count + 2):
            with taking(scenes[(peer - 1) % count][0]):
                outcomes.append(sent(tr.Relay(group, chunk_bytes=CHUNK), peer, peer, LONG))
        return outcomes
    way, phase = scenes[(rank - 1) % count]
    with taking(way):
        relay = tr.Relay(group, chunk_bytes=CHUNK)
        hold = held_at(RECEIVER[way][phase], "there") if rank <= count else None
        with hold or contextlib.nullcontext():
            return [received(relay, 0, weights(OLD), OLD, rank, 60)]


def senders_die(rank: int, group: Any, scenes: list[tuple[str, str, bool]]) -> list[Outcome]:
    """Rank 0 receives from one sender after another; each but the last is killed at its phase."""
    count = len(scenes)
    if rank == 0:
        live, seed, outcomes = weights(OLD), OLD, []
        for peer in range(1, count + 2):
            way, _, atomic = scenes[(peer - 1) % count]
            with taking(way):
                relay = tr.Relay(group, chunk_bytes=CHUNK)
                out = received(relay, peer, live, seed, peer, LONG, atomic=atomic)
            seed = out.weights if isinstance(out.weights, int) else seed
            outcomes.append(out)
        return outcomes
    way, phase, _ = scenes[(rank - 1) % count]
    with taking(way):
        relay = tr.Relay(group, chunk_bytes=CHUNK)
        hold = held_at(SENDER[way][phase], "there") if rank <= count else None
        with hold or contextlib.nullcontext():
            return [sent(relay, rank, 0, 60)]


def kill_each(ranks: Ranks, count: int) -> None:
    for victim in range(1, count + 1):
        ranks.wait_reached(victim, "there", START)
        ranks.kill(victim)


EVERY_PHASE = [pytest.mark.slow, pytest.mark.timeout(300)]


def every(spots: dict[str, dict[str, Any]]) -> list[Any]:
    return [
        pytest.param([(way, phase) for phase in spots[way]], marks=EVERY_PHASE, id=f"every-{way}")
        for way in WAYS
    ]


@pytest.mark.parametrize(
    "scenes",
    [
        pytest.param(
            [
                ("memory", "joined"),
                ("tcp", "data"),
                ("memory", "data"),
                ("ring", "data"),
                ("tcp", "commit"),
                ("tcp", "done"),
                ("memory", "pass on"),
            ],
            id="some",
        ),
        *every(RECEIVER),
    ],
)
def test_sender_survives_receivers_killed(scenes):
    with Ranks(receivers_die, len(scenes) + 2, scenes) as ranks:
        kill_each(ranks, len(scenes))
        ours, last = ranks.results(60, ranks=[0, len(scenes) + 1])
    for (way, phase), out in zip(scenes, ours, strict=False):
        if phase == "call":  # it has not come: nothing tells a dead receiver from a late one
            assert out.error == "TransferTimeoutError" and "did not join" in out.text, (way, out)
            assert out.seconds < LONG + GRACE, (way, out)
            continue
        assert out.seconds < LONG, (way, phase, out)
        if phase == "pass on":  # it has said that it is done
            assert out.error is None, (way, phase, out)
        else:
            assert out.error == "PeerLostError" and "rank" in out.text, (way, phase, out)
    assert ours[-1].error is None
    assert last[0].error is None and last[0].weights == len(scenes) + 1


@pytest.mark.parametrize(
    "scenes",
    [
        pytest.param(
            [
                ("tcp", "data", True),
                ("memory", "data", True),
                ("ring", "data", True),
                ("memory", "end", True),
                ("tcp", "data", False),
                ("tcp", "confirm", True),
                ("memory", "confirm", False),
                ("tcp", "confirmed", True),
                ("ring", "data", False),
            ],
            id="some",
        ),
        *(
            pytest.param(
                [(way, phase, atomic) for phase in SENDER[way]],
                marks=EVERY_PHASE,
                id=f"every-{way}-{atomic}",
            )
            for way in WAYS
            for atomic in (True, False)
        ),
    ],
)
def test_receiver_survives_senders_killed(scenes):
    with Ranks(senders_die, len(scenes) + 2, scenes) as ranks:
        kill_each(ranks, len(scenes))
        outcomes = ranks.results(60, ranks=[0])[0]
    before: int | str = OLD
    for index, (scene, out) in enumerate(zip(scenes, outcomes, strict=False)):
        way, phase, atomic = scene
        begun = ["data", "confirm", "confirmed"]
        if way in ("memory", "ring"):  # it begins with the offer
            begun.append("go")
        assert out.seconds < LONG, (scene, out)
        if out.error is None:
            assert phase in ("confirmed", "end") and out.weights == index + 1, (scene, out)
        elif out.error == "TornStateError":
            assert not atomic and phase in begun, (scene, out)
            assert "connection lost" in out.text or "memory is gone" in out.text
        else:
            assert out.error == "PeerLostError", (scene, out)
            assert out.weights == before, (scene, out)
        before = out.weights
        if phase == "end":
            assert out.error is None
    assert outcomes[-1].error is None and outcomes[-1].weights == len(scenes) + 1


READS = ((1, True), (15, True), (6, False))  # of about twenty reads, and whether atomic


def read_from_the_dead(rank: int, group: Any) -> Any:
    """Rank 0 reads from one sender after another, each of which dies between two of its reads."""
    relay = tr.Relay(group, chunk_bytes=CHUNK)
    if rank:
        return sent(relay, rank, 0, 60)
    live, outcomes = weights(OLD), []
    for peer, (number, atomic) in enumerate(READS, 1):
        with held_at(RECEIVER["memory"]["data"]._replace(nth=number), f"read {peer}"):
            outcomes.append(received(relay, peer, live, OLD, peer, LONG, atomic=atomic))
    last = len(READS) + 1
    return outcomes, received(relay, last, live, OLD, last, LONG)


def test_a_sender_that_dies_while_it_is_read_from():
    with Ranks(by, len(READS) + 2, "memory", read_from_the_dead) as ranks:
        for victim in range(1, len(READS) + 1):
            ranks.wait_reached(0, f"read {victim}", START)
            ranks.kill(victim)
            ranks.release(0)
        outcomes, after = ranks.results(60, ranks=[0])[0]
    for (number, atomic), out in zip(READS, outcomes, strict=True):
        assert out.seconds < LONG
        if atomic:
            assert out.error == "PeerLostError" and out.weights == OLD, (number, out)
        else:
            assert out.error == "TornStateError" and out.weights == "torn", (number, out)
    assert after.error is None and after.weights == len(READS) + 1


# Stopped: the same two ranks through many scenes on one group


Stop = tuple[str, int, str, bool]  # way, victim, phase, atomic


def stopped_scenes(rank: int, group: Any, scenes: list[Stop]) -> list[Any]:
    live, seed, outcomes = weights(OLD), OLD, []
    relays = {}
    for way in WAYS:
        with taking(way):
            relays[way] = tr.Relay(group, chunk_bytes=CHUNK)
    for number, (way, victim, phase, atomic) in enumerate(scenes):
        relay = relays[way]
        faulty, healthy = 1000 + number, 2000 + number
        spot = (SENDER, RECEIVER)[victim][way][phase]
        hold = held_at(spot, "there") if rank == victim else contextlib.nullcontext()
        with taking(way), hold:
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


def play(ranks: Ranks, scenes: list[Stop]) -> list[Any]:
    for _, victim, _, _ in scenes:
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


def check_stopped(scenes: list[Stop]) -> None:
    with Ranks(stopped_scenes, 2, scenes) as ranks:
        played = play(ranks, scenes)
    for scene, ((sender, sent_again), (receiver, got_again)) in zip(scenes, played, strict=True):
        _, victim, phase, atomic = scene
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
        if phase in ("end", "pass on"):
            assert new, (scene, receiver)
        elif phase in ("call", "joined", "accepted", "capture", "go", "confirm"):
            assert not new, (scene, receiver)
        assert sent_again.error is None and got_again.error is None, (scene, sent_again, got_again)
        assert got_again.weights >= 2000, (scene, got_again)


@pytest.mark.slow
def test_stopped_and_continued():
    """Some of `test_stopped_at_every_phase`, which takes long: those that differ most by way."""
    check_stopped(
        [
            ("tcp", 0, "data", True),
            ("memory", 0, "data", True),
            ("tcp", 0, "confirm", False),
            ("memory", 0, "confirm", False),
            ("memory", 1, "joined", True),
            ("tcp", 1, "data", False),
            ("tcp", 0, "data", False),
            ("tcp", 0, "go", True),
            ("tcp", 1, "accepted", True),
            ("memory", 1, "data", True),
            ("ring", 1, "data", False),
            ("memory", 1, "done", True),
        ]
    )


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("atomic", [True, False])
@pytest.mark.parametrize("victim", [0, 1])
@every_way
def test_stopped_at_every_phase(way, victim, atomic):
    check_stopped([(way, victim, phase, atomic) for phase in (SENDER, RECEIVER)[victim][way]])


# Several receivers: in a chain, or each for itself


FANS = (
    ("tcp", [1, 2, 3], 1),
    ("tcp", [2, 4, 3], 4),
    ("tcp", [2, 3, 5], 5),
    ("memory", [2, 6, 3], 6),
    ("ring", [7, 2, 3], 7),
)
"""Way, receivers and the one that is killed: in a chain the first, the middle, the last."""


def fan_loses_one(rank: int, group: Any) -> list[Outcome]:
    live, seed, outcomes = weights(OLD), OLD, []
    for number, (way, receivers, victim) in enumerate(FANS):
        with taking(way):
            relay = tr.Relay(group, chunk_bytes=CHUNK, join_window=20, verify=bool(number))
            if rank == 0:
                outcomes.append(sent(relay, number, receivers, LONG))
            elif rank in receivers:
                hold = held_at(RECEIVER[way]["data"], "there") if rank == victim else None
                with hold or contextlib.nullcontext():
                    outcomes.append(received(relay, 0, live, seed, number, 60))
                seed = number
    with taking("tcp"):
        relay = tr.Relay(group, chunk_bytes=CHUNK, join_window=20)
        if rank in (2, 3):
            outcomes.append(received(relay, 0, live, seed, 77, LONG))
        elif rank == 0:
            reached("told", hold=True)
            with held_at(SENDER["tcp"]["data"], "there"):
                sent(relay, 77, [2, 3], LONG)
    return outcomes


def test_a_dead_rank_among_several_fails_nobody_else():
    with Ranks(fan_loses_one, 8) as ranks:
        for _, _, victim in FANS:
            ranks.wait_reached(victim, "there", START)
            ranks.kill(victim)
        ranks.wait_reached(0, "told", START)
        ranks.release(0)
        ranks.wait_reached(0, "there", START)
        ranks.kill(0)
        outcomes = ranks.results(60, ranks=[2, 3])
    for out in outcomes:
        for number, one in enumerate(out[: len(FANS)]):
            assert one.error is None and one.weights == number, (number, out)
            assert one.seconds < LONG
        # The sender's own death is everybody's.
        assert out[-1].error == "PeerLostError" and out[-1].weights == len(FANS) - 1, out


STOPS = (("tcp", 1), ("tcp", 2), ("tcp", 3), ("memory", 2), ("ring", 3))


def fan_stops_one(rank: int, group: Any) -> list[Any]:
    live, seed, outcomes = weights(OLD), OLD, []
    relays = {}
    for way in WAYS:
        with taking(way):
            relays[way] = tr.Relay(group, chunk_bytes=CHUNK, join_window=1.0)
    for number, (way, victim) in enumerate(STOPS):
        relay = relays[way]
        healthy = [peer for peer in (1, 2, 3) if peer != victim]
        faulty, meanwhile, after = number * 10, number * 10 + 1, number * 10 + 2
        steps = []
        with taking(way):
            if rank == 0:
                steps.append(sent(relay, faulty, [1, 2, 3], LONG))
                steps.append(sent(relay, meanwhile, healthy, LONG))
            else:
                hold = held_at(RECEIVER[way]["data"], "there") if rank == victim else None
                with hold or contextlib.nullcontext():
                    steps.append(received(relay, 0, live, seed, faulty, LONG))
                if rank != victim:
                    steps.append(received(relay, 0, live, faulty, meanwhile, LONG))
            reached("over", hold=True)
            if rank == 0:
                steps.append(sent(relay, after, [1, 2, 3], LONG))
            else:
                before = meanwhile if rank != victim else steps[0].weights
                assert verdict(live, before) == before, "changed behind our back"
                steps.append(received(relay, 0, live, before, after, LONG))
                seed = after
        outcomes.append(steps)
    return outcomes


def test_a_stopped_rank_among_several_delays_nobody_else():
    with Ranks(fan_stops_one, 4) as ranks:
        for _, victim in STOPS:
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
    for number, (way, victim) in enumerate(STOPS):
        scene = [result[number] for result in results]
        healthy = tuple(rank for rank in (1, 2, 3) if rank != victim)
        first = scene[0][0]
        # Where the last word was on its way to it when it stopped, it may have the state.
        assert (first.failed + first.unknown, first.receivers) == ((victim,), healthy), (way, scene)
        # A window to find out, some to judge, and far from the deadline.
        assert first.seconds < 8, scene
        for rank in (0, *healthy):
            assert [out.error for out in scene[rank]] == [None] * 3, (way, scene)
        before = number * 10 - 8 if number else OLD
        ends = [("PeerAbortedError", before)]
        if first.unknown:
            ends.append((None, number * 10))
        assert (scene[victim][0].error, scene[victim][0].weights) in ends, (way, scene)
        assert scene[victim][-1].weights == number * 10 + 2, (way, scene)
        for rank in healthy:
            assert [out.weights for out in scene[rank]] == [number * 10 + n for n in range(3)]
        assert scene[0][2].failed == (), scene
