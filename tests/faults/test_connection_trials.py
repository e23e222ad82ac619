"""Connections between ranks of which one is stopped beyond its time, or killed, at any moment.

Each trial is a few new ranks. The ranks that live end their call in time, with weights that are old
or new, agree on it, do the next transfer together, and end as interpreters do.
"""

from __future__ import annotations

import ctypes
import random
import sys
import time
from typing import Any

import pytest
import torch

import torchrelay as tr
from tests.support.faults import attempt
from tests.support.ranks import Exited, Ranks, reached, tell
from tests.support.ways import taking

SEED = 20261116
LONG = 60.0  # seconds for what is not to be late on a busy machine either
LATE = 20.0  # seconds past a deadline that a busy machine may take; who hangs takes forever
OLD, NEW, NEXT = 1, 2, 3


def state(seed: int, megabytes: int) -> dict[str, Any]:
    make = torch.Generator().manual_seed(seed)
    size = (megabytes << 17,)
    return {"w": torch.randint(-(2**60), 2**60, size, generator=make), "seed": seed}


def which(live: dict[str, Any], megabytes: int, *seeds: int) -> int | str:
    for seed in seeds:
        if live["seed"] == seed and torch.equal(live["w"], state(seed, megabytes)["w"]):
            return seed
    return "torn"


def trial(
    rank: int, group: Any, receivers: list[int], megabytes: int, timeout: float, atomic: bool
) -> None:
    with taking("tcp"):
        relay = tr.Relay(group, chunk_bytes=256 << 10, join_window=2.0)
        live, mine = state(OLD, megabytes), state(NEW, megabytes)
        reached("ready", hold=True)
        if rank == 0:
            out = attempt(lambda: relay.send(mine, receivers, step=NEW, timeout=timeout))
        else:
            out = attempt(
                lambda: relay.recv(0, into=live, step=NEW, timeout=timeout, atomic=atomic)
            )
            out = out._replace(weights=which(live, megabytes, OLD, NEW))
        tell(out)
        reached("over", hold=True)
        if rank == 0:
            # The one that was killed is still among them: it is named, and fails nobody else.
            after = state(NEXT, megabytes)
            out = attempt(lambda: relay.send(after, receivers, step=NEXT, timeout=LONG))
        else:
            out = attempt(lambda: relay.recv(0, into=live, step=NEXT, timeout=LONG))
            out = out._replace(weights=which(live, megabytes, NEXT))
        tell(out)
        reached("over")
    sys.stdout.flush()
    sys.stderr.flush()
    ctypes.pythonapi.Py_Exit(ctypes.c_int(0))


def stopped(seed: int) -> None:
    """Two ranks; the sender, now and then the receiver, is stopped for longer than its call has."""
    rng = random.Random(seed)
    megabytes, timeout, atomic = rng.choice([1, 4, 12]), 1.0, rng.random() < 0.6
    victim = int(rng.random() < 0.2)
    where = f"seed {seed}: {megabytes} MB, rank {victim} stops, atomic={atomic}"
    arguments = [1], megabytes, timeout, atomic
    with Ranks(trial, 2, *arguments, expect_exit={0: 0, 1: 0}) as ranks:
        for rank in (0, 1):
            ranks.wait_reached(rank, "ready", LONG)
        for rank in (0, 1):
            ranks.release(rank)
        time.sleep(rng.random() * 0.02 * megabytes)
        ranks.stop(victim)
        ranks.wait_reached(1 - victim, "over", LONG)
        time.sleep(rng.random())  # beyond its own deadline, and more
        ranks.cont(victim)
        ranks.wait_reached(victim, "over", LONG)
        sender, receiver = ranks.told(0)[-1], ranks.told(1)[-1]
        for rank in (0, 1):
            ranks.release(rank)
        for rank in (0, 1):
            ranks.wait_reached(rank, "over", 2 * LONG)
        again = [ranks.told(0)[-1], ranks.told(1)[-1]]
        assert ranks.results(LONG) == [Exited(0)] * 2, where
    assert (sender, receiver)[1 - victim].seconds < timeout + LATE, (where, sender, receiver)
    if receiver.error is None:
        assert receiver.weights == NEW, (where, receiver)
        assert sender.error is None or "may have" in sender.text, (where, sender, receiver)
    else:
        torn = receiver.error == "TornStateError" and not atomic
        assert receiver.weights == OLD or torn, (where, receiver)
        assert sender.error is not None, (where, sender, receiver)
    assert [out.error for out in again] == [None, None] and again[1].weights == NEXT, (where, again)


def killed(seed: int) -> None:
    """Four ranks; one of the receivers is killed."""
    rng = random.Random(seed)
    megabytes, atomic = rng.choice([1, 4, 12]), rng.random() < 0.6
    receivers = rng.sample([1, 2, 3], 3)
    victim = rng.choice(receivers)
    rest = [rank for rank in range(4) if rank != victim]
    where = f"seed {seed}: {megabytes} MB to {receivers}, rank {victim} dies, atomic={atomic}"
    arguments = receivers, megabytes, LONG, atomic
    with Ranks(trial, 4, *arguments, expect_exit=dict.fromkeys(rest, 0)) as ranks:
        for rank in range(4):
            ranks.wait_reached(rank, "ready", LONG)
        for rank in range(4):
            ranks.release(rank)
        time.sleep(rng.random() * 0.04 * megabytes)
        ranks.kill(victim)
        for rank in rest:
            ranks.wait_reached(rank, "over", 2 * LONG)
        for rank in rest:
            ranks.release(rank)
        for rank in rest:
            ranks.wait_reached(rank, "over", 2 * LONG)
        first, again = zip(*map(ranks.told, rest), strict=True)
        assert ranks.results(LONG, ranks=rest) == [Exited(0)] * 3, where
    for outcomes, seed in ((first, NEW), (again, NEXT)):
        assert [out.error for out in outcomes] == [None] * 3, (where, outcomes)
        assert [out.weights for out in outcomes[1:]] == [seed] * 2, (where, outcomes)
        assert all(out.seconds < LATE for out in outcomes), (where, outcomes)
    assert again[0].failed == (victim,), (where, again)


@pytest.mark.parametrize("act", [stopped, killed], ids=lambda act: act.__name__)
def test_a_rank_that_fails_leaves_no_other_hanging(act: Any) -> None:
    act(SEED)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("act", [stopped, killed], ids=lambda act: act.__name__)
def test_ranks_that_fail_at_many_moments_leave_no_other_hanging(act: Any) -> None:
    for seed in range(SEED + 1, SEED + 61):
        act(seed)
