"""One sender, several receivers: what each gets, and what it costs the sender."""

from __future__ import annotations

import random
import threading
import time
from typing import Any

import pytest
import torch

import torchrelay as tr
from tests.support.faults import CHUNK, GRACE, Outcome, received, same, sent, weights
from tests.support.ways import VERIFIED, by, every_way, patched, route_of
from torchrelay.progress import Progress
from torchrelay.transports.routes.tcp import usual_connections
from torchrelay.transports.streams.sockets import DataSocket

TIMEOUT = 30.0
NAP = 4.0


def state_of(nbytes: int) -> dict[str, Any]:
    make = torch.Generator().manual_seed(nbytes)
    return {
        "big": torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=make),
        "matrix": torch.randn(96, 64, generator=make),
        "image": torch.randn(2, 3, 8, 8, generator=make),
        "lr": 0.125,
    }


def layouts(rank: int, nbytes: int) -> dict[str, Any]:
    """Destinations of other strides and offsets on each rank."""
    big = torch.zeros(nbytes, dtype=torch.uint8)
    matrix, image = torch.zeros(96, 64), torch.zeros(2, 3, 8, 8)
    if rank == 2:
        big = torch.zeros(nbytes, 2, dtype=torch.uint8)[:, 1]
        matrix = torch.zeros(64, 96).t()
        image = image.to(memory_format=torch.channels_last)
    elif rank == 3:
        big = torch.zeros(nbytes + 7, dtype=torch.uint8)[7:]
        matrix = torch.zeros(100, 70)[2:98, 3:67]
        image = torch.zeros(8, 8, 3, 2).permute(3, 2, 0, 1)
    return {"big": big, "matrix": matrix, "image": image, "lr": 0.0}


def equal(one: dict[str, Any], other: dict[str, Any]) -> bool:
    tensors = ("big", "matrix", "image")
    return one["lr"] == other["lr"] and all(torch.equal(one[k], other[k]) for k in tensors)


def to_three(rank: int, group: Any, nbytes: int, atomic: bool) -> Any:
    relay = tr.Relay(group, timeout=TIMEOUT)
    seen: list[Progress] = []
    if rank == 0:
        return relay.send(state_of(nbytes), [1, 2, 3], step=5, progress=seen.append), seen
    into = layouts(rank, nbytes)
    got = relay.recv(0, into=into, step=5, atomic=atomic, progress=seen.append)
    assert got.state["big"] is into["big"]
    return got.report, seen, equal(into, state_of(nbytes))


def check_three(results: list[Any], nbytes: int, way: str) -> None:
    (report, seen), *others = results
    assert report.bytes >= nbytes
    if way == "tcp":
        assert report.bytes <= report.traffic.bytes <= 1.1 * report.bytes
        assert report.traffic.messages == len(seen) > 0 and report.verified
        assert report.traffic.connections == usual_connections()
    elif way == "memory":
        assert report.traffic.bytes == report.traffic.messages == 0  # the receivers do it all
    else:
        assert 3 * report.bytes <= report.traffic.bytes <= 3.3 * report.bytes
    assert report.step == 5 and report.route == route_of(way)
    assert report.routes == dict.fromkeys((1, 2, 3), route_of(way))
    assert report.receivers == (1, 2, 3) and report.failed == {} and report.rerouted == ()
    assert {"capture", "join", "data"} <= set(report.seconds)
    assert report.total_seconds > 0
    assert [p.done for p in seen] == sorted(p.done for p in seen)
    assert seen[-1].done == seen[-1].total >= report.bytes
    for rank, (theirs, progress, right) in enumerate(others, 1):
        assert right, rank
        assert theirs.source == 0 and theirs.receivers == ()
        assert theirs.route == route_of(way) and theirs.verified == (way in VERIFIED)
        assert theirs.bytes == report.bytes <= theirs.traffic.bytes <= 1.1 * report.bytes
        assert theirs.unexpected_keys == theirs.missing_keys == ()
        assert progress[-1].done == progress[-1].total
        assert {"call", "join", "data", "commit"} <= set(theirs.seconds)


@every_way
def test_three_receivers_cost_the_sender_the_state_once_at_most(pool4, way):
    nbytes = 24 << 20 if way == "tcp" else 8 << 20
    for atomic in (True, False):
        check_three(pool4.run(by, way, to_three, nbytes, atomic, timeout=60), nbytes, way)


def new_tensors(rank: int, group: Any) -> Any:
    relay = tr.Relay(group, timeout=TIMEOUT, chunk_bytes=CHUNK)
    if rank == 0:
        return relay.send(weights(3), [3, 1, 2])
    return same(relay.recv(0).state, weights(3))


@every_way
def test_new_tensors_in_any_order_of_receivers(pool4, way):
    report, *right = pool4.run(by, way, new_tensors)
    assert report.receivers == (3, 1, 2) and report.step is None
    assert right == [True] * 3


def not_strict(rank: int, group: Any) -> Any:
    relay = tr.Relay(group, timeout=TIMEOUT)
    if rank == 0:
        return relay.send({"a": torch.ones(4), "b": torch.ones(2), "c": [torch.ones(1)]}, [1, 2, 3])
    into = {
        1: {"a": torch.zeros(4), "b": torch.zeros(2), "c": [torch.zeros(1)]},
        2: {"a": torch.zeros(4), "mine": torch.full((3,), 7.0)},
        3: {"mine": torch.full((3,), 7.0)},
    }[rank]
    report = relay.recv(0, into=into, strict=False).report
    kept = "mine" not in into or bool((into["mine"] == 7).all())
    return (
        report.unexpected_keys,
        report.missing_keys,
        kept and ("a" not in into or bool(into["a"].all())),
    )


def test_each_receiver_reports_what_it_lacks_and_has_besides(pool4):
    report, one, two, three = pool4.run(not_strict)
    assert report.failed == {} and report.receivers == (1, 2, 3)
    assert one == ((), (), True)
    assert [len(paths) for paths in two[:2]] == [2, 1] and two[2]
    assert any("b" in path for path in two[0]) and "mine" in two[1][0]
    assert [len(paths) for paths in three[:2]] == [3, 1] and three[2]


def empty(rank: int, group: Any) -> Any:
    relay = tr.Relay(group, timeout=TIMEOUT)
    states: list[Any] = [{}, {"step": 3, "name": "x"}, {"none": torch.empty(0, 5)}]
    if rank == 0:
        return [relay.send(state, [1, 2, 3]).traffic.bytes for state in states]
    return [str(relay.recv(0).state) for _ in states]


@every_way
def test_states_without_bytes(pool4, way):
    ours, *theirs = pool4.run(by, way, empty)
    assert ours == [0, 0, 0]
    assert theirs[0] == theirs[1] == theirs[2]
    assert theirs[0][:2] == ["{}", "{'step': 3, 'name': 'x'}"] and "size=(0, 5)" in theirs[0][2]


def slow_landing(rank: int, group: Any, where: str) -> Any:
    """Rank 2 is slow: longer than the others wait, in the middle of its data or in its commit."""
    relay = tr.Relay(group, timeout=TIMEOUT, chunk_bytes=CHUNK // 4, join_window=1.0)
    torch.distributed.barrier(group=group)  # all come within the window
    if rank == 0:
        return sent(relay, 1, [1, 2, 3], TIMEOUT)
    naps: list[int] = []

    def progress(done: Progress) -> None:
        late = done.done >= done.total if where == "end" else done.done > done.total // 2
        if rank == 2 and late and not naps:
            naps.append(1)
            time.sleep(NAP)

    take, lock = DataSocket.take_chunk, threading.Lock()

    def stands_still(self: DataSocket, *args: Any, **options: Any) -> Any:
        with lock:  # all of its connections
            naps.append(1)
            if len(naps) == 20:
                time.sleep(NAP)
        return take(self, *args, **options)

    live = weights(100)
    if where != "data" or rank != 2:
        return received(relay, 0, live, 100, 1, TIMEOUT, progress=progress)
    with patched(DataSocket, take_chunk=stands_still):
        return received(relay, 0, live, 100, 1, TIMEOUT)


def test_a_receiver_that_is_slow_after_its_last_chunk_is_waited_for(pool4):
    ours, *theirs = pool4.run(by, "tcp", slow_landing, "end", fresh_group=True)
    assert ours.error is None and ours.failed == (), ours
    assert [out.weights for out in theirs] == [1, 1, 1]


@pytest.mark.parametrize(
    ("way", "where"),
    [
        ("tcp", "data"),
        *(pytest.param(way, "middle", marks=pytest.mark.slow) for way in ("tcp", "ring")),
    ],
)
def test_a_receiver_that_stands_still_keeps_no_other(pool4, way, where):
    """Also the one behind it in a chain gets its chunks."""
    ours, one, two, three = pool4.run(by, way, slow_landing, where, fresh_group=True)
    assert ours.error is None and ours.receivers == (1, 2, 3), ours
    assert [out.weights for out in (one, two, three)] == [1, 1, 1]
    # A window to notice, half as much for the next in the chain, and far less than the nap.
    assert max(one.seconds, three.seconds) < 3.5 <= NAP <= two.seconds, (one, two, three)


def one_gives_up(rank: int, group: Any) -> Any:
    relay = tr.Relay(group, timeout=TIMEOUT, chunk_bytes=CHUNK, join_window=5)
    outcomes: list[Outcome] = []
    live, seed = weights(100), 100
    for victim in (1, 2, 3):

        def progress(done: Progress, victim: int = victim) -> None:
            if rank == victim and done.done > done.total // 2:
                raise tr.errors.UsageError("this rank has had enough")

        if rank == 0:
            outcomes.append(sent(relay, victim, [1, 2, 3], TIMEOUT))
        else:
            outcomes.append(received(relay, 0, live, seed, victim, TIMEOUT, progress=progress))
            seed = victim if rank != victim else seed
    return outcomes


@every_way
def test_a_receiver_that_gives_up_holds_up_nobody(pool4, way):
    ours, *theirs = pool4.run(by, way, one_gives_up, fresh_group=True)
    for victim in (1, 2, 3):
        out = ours[victim - 1]
        assert out.error is None and out.failed == (victim,), ours
        assert out.seconds < 3, out  # far less than it takes to be found stuck
        for rank in (1, 2, 3):
            got = theirs[rank - 1][victim - 1]
            assert got.error == ("UsageError" if rank == victim else None), (victim, rank, got)
            assert rank == victim or got.weights == victim


def turmoil(rank: int, group: Any, rounds: int, seed: int) -> Any:
    """In each round some receivers stay away, give up, or dawdle, each by its own dice."""
    relay = tr.Relay(group, timeout=TIMEOUT, chunk_bytes=CHUNK, join_window=0.4)
    plans = random.Random(seed)
    live, told = weights(100), []
    for number in range(rounds):
        moods = [plans.choice(("fine", "fine", "absent", "gives up", "dawdles")) for _ in range(4)]
        at = [plans.random() for _ in range(4)]
        order = plans.sample([1, 2, 3], 3)
        torch.distributed.barrier(group=group)
        if rank == 0:
            out = sent(relay, number, order, 8)
            assert out.seconds < 8 + GRACE, (number, moods, out)
            told.append((moods, out))
            continue
        mood, before = moods[rank], live["seed"]
        if mood == "absent":
            told.append((mood, None))
            continue

        def progress(done: Progress, mood: str = mood, at: float = at[rank]) -> None:
            if mood == "gives up" and done.done > done.total * at:
                raise tr.errors.UsageError("enough")
            if mood == "dawdles" and done.done % 5 == 0:
                time.sleep(0.2 * at)

        out = received(relay, 0, live, before, number, 8, progress=progress)
        assert out.weights != "torn" and out.seconds < 8 + GRACE, (number, moods, out)
        told.append((mood, out))
    torch.distributed.barrier(group=group)
    if rank == 0:
        return told, sent(relay, 999, [1, 2, 3], TIMEOUT)
    return told, received(relay, 0, live, live["seed"], 999, TIMEOUT)


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("seed", range(4))
@every_way
def test_turmoil(pool4, way, seed):
    ours, *theirs = pool4.run(by, way, turmoil, 25, seed, fresh_group=True, timeout=350)
    assert ours[1].error is None and ours[1].failed == (), ours[1]
    assert all(last.weights == 999 for _, last in theirs)
    for number, (moods, out) in enumerate(ours[0]):
        for rank, (told, _) in enumerate(theirs, 1):
            mood, got = told[number]
            assert mood == moods[rank]
            if mood == "fine":
                assert got.error is None and got.weights == number, (number, moods, out, got)
            if rank in out.receivers:
                assert got is not None and got.weights == number, (number, moods, out, got)
