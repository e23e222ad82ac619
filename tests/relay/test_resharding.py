"""Several ranks have parts of a state; a receiver gets its part, resharded for its mesh."""

from __future__ import annotations

import gc
import os
import random
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint._pg_transport import PGTransport
from torch.distributed.tensor import DeviceMesh, Replicate, Shard, distribute_tensor

import torchrelay as tr
from tests.support.faults import attempt
from tests.support.loop import Hub, LoopGroup
from tests.support.ranks import Killed, run_ranks
from tests.support.ways import patched
from torchrelay import dropin
from torchrelay.errors import RelayError
from torchrelay.transports.protocol import serving as serving_module
from torchrelay.transports.protocol.serving import Serving
from torchrelay.transports.routes.outgoing import Outgoing
from torchrelay.transports.wire.messages import Accept

LONG = 60.0  # the first call imports what torch needs for meshes
SENDERS, RECEIVER = [0, 1, 2, 3], 4
FULL = {"a": (13, 7), "b": (64, 33), "c": (5,), "d": (3, 4, 5)}


def full(seed: int) -> dict[str, torch.Tensor]:
    make = torch.Generator().manual_seed(seed)
    return {name: torch.randn(*shape, generator=make) for name, shape in FULL.items()}


def sharded(mesh: DeviceMesh, seed: int, *placements: Any) -> dict[str, Any]:
    model = {n: distribute_tensor(t, mesh, list(placements)) for n, t in full(seed).items()}
    return {"model": model, "count": seed, "plain": torch.full((3,), float(seed))}


def whole(seed: int) -> dict[str, Any]:
    return {"model": full(seed), "count": seed, "plain": torch.full((3,), float(seed))}


def seed_of(state: Any, *seeds: int) -> int | str:
    """Which of the seeds a whole state is that of, or "torn"."""
    for seed in seeds:
        wanted = whole(seed)
        if (
            state["count"] == seed
            and torch.equal(state["plain"], wanted["plain"])
            and all(torch.equal(state["model"][n], t) for n, t in wanted["model"].items())
        ):
            return seed
    return "torn"


# Exactness.


def random_mesh(chance: random.Random, ranks: list[int]) -> tuple[torch.Tensor, list[Any]]:
    """Ranks in one or two dimensions, and how tensors of up to two dimensions lie on them."""
    shapes = [(n, len(ranks) // n) for n in range(1, len(ranks) + 1) if len(ranks) % n == 0]
    shape = chance.choice([(len(ranks),), *shapes])
    placements = [chance.choice([Shard(0), Shard(0), Shard(1), Replicate()]) for _ in shape]
    return torch.tensor(ranks).view(shape), placements


def random_trip(rank: int, group: Any, seeds: list[int], route: str) -> list[str]:
    """Random tensors, meshes and placements on either side; what went wrong."""
    wrong = []
    relay = tr.Relay(group, route=route, timeout=LONG)
    for seed in seeds:
        chance = random.Random(seed)
        senders = list(range(chance.choice([1, 2, 3, 4])))
        receivers = [4 + n for n in range(chance.choice([1, 2, 3, 4]))]
        shapes = [(chance.randrange(1, 40), chance.randrange(1, 40)) for _ in range(4)]
        make = torch.Generator().manual_seed(seed)
        dtypes = [torch.float32, torch.bfloat16, torch.int64, torch.uint8]
        tensors = [
            (torch.randn(*shape, generator=make) * 90).to(dtype)
            for shape, dtype in zip(shapes, dtypes, strict=True)
        ]
        grid, there = random_mesh(chance, senders)
        source = DeviceMesh("cpu", grid)
        other, here = random_mesh(chance, receivers)
        target = DeviceMesh("cpu", other)
        if rank in senders:
            relay.send([distribute_tensor(x, source, there) for x in tensors], receivers)
        if rank not in receivers:
            continue
        wanted = [distribute_tensor(x, target, here) for x in tensors]
        into = [distribute_tensor(torch.zeros_like(x), target, here) for x in tensors]
        report = relay.recv(senders, into=into).report
        case = f"seed {seed}, {grid.tolist()} {there} to {other.tolist()} {here} of {shapes}"
        if not all(
            torch.equal(x.to_local(), y.to_local()) for x, y in zip(into, wanted, strict=True)
        ):
            wrong.append(f"{case}: other values")
        missing = sum(x.to_local().nbytes for x in wanted)
        if not missing == report.bytes == sum(report.sources.values()):
            wrong.append(f"{case}: {missing} bytes are missing, {report.bytes} were fetched")
    return wrong


@pytest.mark.parametrize("route", ["memory", "tcp"])
def test_random_meshes_and_placements_are_exact_and_nothing_is_read_twice(
    pool8: Any, route: str
) -> None:
    seeds = list(range(12))
    print("seeds", seeds)
    assert pool8.run(random_trip, seeds, route, timeout=90, fresh_group=True) == [[]] * 8


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("route", ["memory", "tcp"])
def test_many_random_meshes_and_placements(pool8: Any, route: str) -> None:
    for first in range(100, 300, 20):
        seeds = list(range(first, first + 20))
        print("seeds", seeds)
        assert pool8.run(random_trip, seeds, route, timeout=90, fresh_group=True) == [[]] * 8


def new_state(rank: int, group: Any, route: str) -> Any:
    mesh = DeviceMesh("cpu", torch.tensor(SENDERS).view(2, 2))
    relay = tr.Relay(group, route=route, timeout=LONG)
    if rank < 4:
        report = relay.send(sharded(mesh, 1, Replicate(), Shard(0)), RECEIVER, step=7)
        return report.receivers, report.failed
    if rank > RECEIVER:
        return None
    got = relay.recv(SENDERS, step=7)
    kinds = {type(tensor) for tensor in got.state["model"].values()}
    bytes_ = sum(x.nbytes for x in full(1).values()) + 12
    return seed_of(got.state, 1), kinds, got.step, got.report.bytes == bytes_, got.report.verified


@pytest.mark.parametrize("route", ["memory", "tcp"])
def test_without_a_destination_whole_tensors_are_made(pool8: Any, route: str) -> None:
    found = pool8.run(new_state, route, timeout=90, fresh_group=True)
    assert found[:4] == [((4,), {})] * 4
    assert found[4] == (1, {torch.Tensor}, 7, True, route == "tcp")


def replicas(rank: int, group: Any) -> Any:
    """What four ranks have in common is taken from all of them, each box once."""
    mesh = DeviceMesh("cpu", SENDERS)
    relay = tr.Relay(group, timeout=LONG)
    if rank < 4:
        state = [distribute_tensor(torch.ones(1000), mesh, [Replicate()]) for _ in range(8)]
        relay.send(state, RECEIVER)
        return None
    return relay.recv(SENDERS).report.sources if rank == RECEIVER else None


def test_replicas_share_the_work(pool8: Any) -> None:
    found = pool8.run(replicas, timeout=90, fresh_group=True)[RECEIVER]
    assert found == dict.fromkeys(SENDERS, 8000)


def at_once(rank: int, group: Any) -> Any:
    """One send serves a receiver of parts and one of the whole state of the sender's rank."""
    relay = tr.Relay(group, timeout=LONG)
    state = {"w": torch.arange(1000.0), "n": 3}
    if rank == 0:
        report = relay.send(state, [1, 2, 3])
        return report.receivers, report.failed
    if rank > 3:
        return None
    got = relay.recv([0] if rank == 1 else 0)
    return torch.equal(got.state["w"], state["w"]), got.state["n"]


def test_one_send_serves_parts_and_the_whole(pool8: Any) -> None:
    found = pool8.run(at_once, timeout=90, fresh_group=True)
    assert found == [((1, 2, 3), {}), (True, 3), (True, 3), (True, 3), None, None, None, None]


# Refusals. Every side hears of them, and the next transfer works.


def refused(rank: int, group: Any, case: str) -> Any:
    mesh = DeviceMesh("cpu", SENDERS)
    relay = tr.Relay(group, timeout=LONG, join_window=2)
    sources = SENDERS[:3] if case == "a part is missing" else SENDERS
    live: dict[str, Any] = whole(0)
    if case == "another shape":
        live["model"]["a"] = torch.zeros(2, 2)
    if case == "a path is missing":
        del live["model"]["b"]
    if rank < 4:
        step = rank if case == "unequal steps" else 7
        states = [sharded(mesh, seed, Shard(0)) for seed in (1, 2)]
        first = None
        if rank in sources:
            first = attempt(lambda: relay.send(states[0], RECEIVER, step=step))
        second = attempt(lambda: relay.send(states[1], RECEIVER, step=8))
        return first and (first.error, first.text), second.error
    if rank > RECEIVER:
        return None
    asked = 9 if case == "another step" else None
    out = attempt(lambda: relay.recv(sources, into=live, step=asked))
    old = live["count"] == 0 and not live["plain"].any()
    into = whole(0)
    relay.recv(SENDERS, into=into, step=8)
    return out.error, out.text, old, seed_of(into, 2)


REFUSALS = {
    "a part is missing": ("MismatchError", "ranks 0, 1, 2 have"),
    "another shape": ("MismatchError", "shape differs"),
    "a path is missing": ("MismatchError", "['model']['b']"),
    "unequal steps": ("StepMismatchError", "rank 1 has 1"),
    "another step": ("StepMismatchError", "step 9 was asked for"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_what_is_refused_leaves_all_sides_right(pool8: Any, case: str) -> None:
    error, words = REFUSALS[case]
    found = pool8.run(refused, case, timeout=90, fresh_group=True)
    got, text, old, after = found[RECEIVER]
    assert (got, old, after) == (error, True, 2) and words in text, found[RECEIVER]
    for rank, (first, second) in enumerate(found[:4]):
        assert second is None
        if case == "a part is missing" and rank == 3:
            continue
        kind = "StepMismatchError" if "step" in case else "PeerRefusedError"
        assert first[0] == kind and words in first[1], first


# Losses.


@contextmanager
def failing(case: str, act: Callable[[], None]) -> Iterator[None]:
    """Within: this sender does `act` at a point of its talk with a receiver of parts."""
    spot = "services" if case == "asked" else "SnapshotPart"
    original = getattr(serving_module, spot)

    def act_first(*args: Any, **options: Any) -> Any:
        act()
        return original(*args, **options)

    with patched(serving_module, **{spot: act_first}):
        yield


def lose_one(rank: int, group: Any, case: str, act: Any, replicated: bool, seconds: float) -> Any:
    """Rank 1 does something bad while four ranks send."""
    mesh = DeviceMesh("cpu", torch.tensor(SENDERS).view(2, 2))
    placements = (Replicate(), Shard(0)) if replicated else (Shard(0), Shard(0))
    relay = tr.Relay(group, timeout=LONG, join_window=3)
    live = whole(0)
    if rank < 4:
        state = sharded(mesh, 1, *placements)
        if rank != 1:
            return attempt(lambda: relay.send(state, RECEIVER, step=7))
        with failing(case, act):
            return attempt(lambda: relay.send(state, RECEIVER, step=7))
    if rank > RECEIVER:
        return None
    begun = time.monotonic()
    try:
        report = relay.recv(SENDERS, into=live, step=7, timeout=seconds).report
    except RelayError as fault:
        took = time.monotonic() - begun
        return seed_of(live, 0, 1), type(fault).__name__, fault.rank, took < seconds + 2
    return seed_of(live, 0, 1), sorted(report.failed), sorted(report.sources)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def fail() -> None:
    raise MemoryError("no room")


def stand_still() -> None:
    time.sleep(2.5)


@pytest.mark.parametrize("case", ["asked", "sending"])
def test_a_replica_takes_over_from_a_sender_that_fails(pool8: Any, case: str) -> None:
    found = pool8.run(lose_one, case, fail, True, LONG, timeout=90, fresh_group=True)
    assert found[RECEIVER] == (1, [1], [0, 2, 3])
    assert [found[rank].receivers for rank in (0, 2, 3)] == [(RECEIVER,)] * 3
    assert found[1].error is not None


@pytest.mark.parametrize("case", ["asked", "sending"])
def test_without_a_replica_the_sender_that_fails_is_named_and_the_weights_are_old(
    pool8: Any, case: str
) -> None:
    found = pool8.run(lose_one, case, fail, False, LONG, timeout=90, fresh_group=True)
    assert found[RECEIVER] == (0, "PeerAbortedError", 1, True)
    assert all(found[rank].error is not None for rank in SENDERS)


def test_a_sender_that_stands_still_does_not_hold_the_receiver_past_its_deadline(
    pool8: Any,
) -> None:
    found = pool8.run(lose_one, "asked", stand_still, False, 1.2, timeout=90, fresh_group=True)
    assert found[RECEIVER] == (0, "TransferTimeoutError", 1, True)


@pytest.mark.parametrize("replicated", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_sender_that_is_killed(replicated: bool) -> None:
    found = run_ranks(lose_one, 5, "sending", die, replicated, LONG, timeout=90, expect_killed=[1])
    assert found[1] is Killed
    if replicated:
        assert found[RECEIVER] == (1, [1], [0, 2, 3])
    else:
        assert found[RECEIVER] == (0, "PeerLostError", 1, True)


def lose_two(rank: int, group: Any) -> Any:
    """Rank 1 is lost at once, and rank 0 when it is asked for what rank 1 was to send."""
    mesh = DeviceMesh("cpu", SENDERS)
    relay = tr.Relay(group, timeout=LONG, join_window=3)
    if rank > RECEIVER:
        return None
    if rank == RECEIVER:
        got = relay.recv(SENDERS)
        same = all(bool((tensor == 7).all()) for tensor in got.state["copies"])
        return same, got.state["mine"].item(), got.state["rank"], sorted(got.report.failed)
    copies = [distribute_tensor(torch.full((500,), 7.0), mesh, [Replicate()]) for _ in range(12)]
    state = {"copies": copies, "mine": torch.tensor(float(rank)), "rank": rank}
    left = {0: 1, 1: 0}.get(rank, 99)  # selections that this rank serves
    selected = Serving._outgoing_of

    def some(self: Serving, accept: Accept) -> Outgoing:
        nonlocal left
        left -= 1
        if left < 0:
            fail()
        return selected(self, accept)

    with patched(Serving, _outgoing_of=some):
        return attempt(lambda: relay.send(state, RECEIVER)).error


def test_plain_tensors_and_values_are_those_of_one_rank_whoever_is_lost(pool8: Any) -> None:
    found = pool8.run(lose_two, timeout=90, fresh_group=True)
    assert found[RECEIVER] == (True, 2.0, 2, [0, 1])
    assert found[0] and found[1] and found[2] is found[3] is None


def from_torch(rank: int, group: Any) -> Any:
    """torch's own class sends; parts cannot be had of it, and its message is not lost."""
    state = {"w": torch.arange(5.0)}
    limit, cpu = timedelta(seconds=LONG), torch.device("cpu")
    if rank == 0:
        PGTransport(group, limit, cpu).send_checkpoint([1], state)
    if rank != 1:
        return None
    error = attempt(lambda: tr.Relay(group, timeout=0.5).recv([0]))
    got: Any = dropin.PGTransport(group, limit, cpu).recv_checkpoint(0)
    return error.error, "PGTransport" in error.text, torch.equal(got["w"], state["w"])


def test_a_sender_of_torchs_own_is_told_and_its_message_is_left(pool8: Any) -> None:
    found = pool8.run(from_torch, timeout=90, fresh_group=True)
    assert found[1] == ("TransferTimeoutError", True, True)


def absent(rank: int, group: Any) -> Any:
    mesh = DeviceMesh("cpu", torch.tensor(SENDERS).view(2, 2))
    relay = tr.Relay(group, timeout=LONG, join_window=1.5)
    if rank < 4:
        state = sharded(mesh, 1, Replicate(), Shard(0))
        return None if rank == 2 else relay.send(state, RECEIVER).receivers
    if rank > RECEIVER:
        return None
    live = whole(0)
    report = relay.recv(SENDERS, into=live).report
    return seed_of(live, 1), sorted(report.failed)


def test_a_replica_of_a_sender_that_does_not_come_is_enough(pool8: Any) -> None:
    found = pool8.run(absent, timeout=90, fresh_group=True)
    assert found[RECEIVER] == (1, [2])
    assert [found[rank] for rank in (0, 1, 3)] == [(RECEIVER,)] * 3


class Interrupt(BaseException):
    pass


def interrupted(rank: int, group: Any) -> Any:
    """A signal handler raises while the receiver waits; the next call is right."""
    relay = tr.Relay(group, timeout=LONG, join_window=2)
    mesh = DeviceMesh("cpu", SENDERS)
    if rank < 4:
        dist.barrier(group)
        return attempt(lambda: relay.send(sharded(mesh, 1, Shard(0)), RECEIVER)).error
    if rank > RECEIVER:
        dist.barrier(group)
        return None

    def handler(number: int, frame: object) -> None:
        raise Interrupt

    before = signal.signal(signal.SIGUSR1, handler)
    live = whole(0)
    threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGUSR1)).start()
    try:
        relay.recv(SENDERS, into=live)
    except Interrupt:
        first = seed_of(live, 0)
    finally:
        signal.signal(signal.SIGUSR1, before)
    dist.barrier(group)
    relay.recv(SENDERS, into=live)
    return first, seed_of(live, 1)


def test_an_exception_from_a_signal_handler_leaves_the_next_call_right(pool8: Any) -> None:
    found = pool8.run(interrupted, timeout=90, fresh_group=True)
    assert found == [None] * 4 + [(0, 1)] + [None] * 3


def freed(rank: int, group: Any) -> Any:
    relay = tr.Relay(group, timeout=LONG)
    if rank == 0:
        gc.collect()
        gc.disable()
        try:
            tensor = torch.ones(1000)
            gone = weakref.ref(tensor)
            relay.send({"w": tensor}, 1)
            del tensor
            return gone() is None
        finally:
            gc.enable()
    return relay.recv([0]).state["w"].sum().item() if rank == 1 else None


def test_a_state_is_freed_when_its_caller_drops_it(pool8: Any) -> None:
    assert pool8.run(freed, timeout=90, fresh_group=True)[:2] == [True, 1000.0]


def trained_on(rank: int, group: Any, route: str) -> Any:
    """Rank 1 changes its state after it has said what it has."""
    mesh = DeviceMesh("cpu", [0, 1])
    relay = tr.Relay(group, route=route, timeout=LONG, join_window=3)
    if rank > 2:
        return None
    if rank == 2:
        live = whole(0)
        error = attempt(lambda: relay.recv([0, 1], into=live)).error
        return error, seed_of(live, 0)
    state = sharded(mesh, 1, Shard(0))
    selected = Serving._outgoing_of

    def after_a_step(self: Serving, accept: Accept) -> Outgoing:
        if rank == 1:
            state["model"]["a"].to_local().add_(1)
        return selected(self, accept)

    with patched(Serving, _outgoing_of=after_a_step):
        return attempt(lambda: relay.send(state, 2)).error


@pytest.mark.parametrize("route", ["memory", "tcp"])
def test_a_state_that_is_trained_on_after_it_was_described_is_refused(
    pool8: Any, route: str
) -> None:
    found = pool8.run(trained_on, route, timeout=90, fresh_group=True)
    assert found[2][0] is not None and found[2][1] == 0, found
    assert found[1] is not None, found


def test_arguments() -> None:
    single_rank_usage("shards is for one source", [1], shards="as_sent")
    single_rank_usage("no source", [])
    single_rank_usage("listed twice", [1, 1])


def single_rank_usage(words: str, sources: list[int], **options: Any) -> None:
    relay = tr.Relay(LoopGroup(Hub(2, "cpu"), 0))
    with pytest.raises(tr.errors.UsageError, match=words):
        relay.recv(sources, **options)
