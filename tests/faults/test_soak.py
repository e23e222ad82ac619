"""Many transfers in one pair of processes, with faults among them: nothing grows."""

from __future__ import annotations

import gc
import multiprocessing
import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch.distributed as dist

import torchrelay as tr
from tests.support.faults import CHUNK, attempt, verdict, weights
from tests.support.strangers import descriptors, resident
from tests.support.ways import taking

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]

OLD, LONG = 100, 60.0
TRANSFERS, WARM_UP = 1000, 100
WAYS = ("tcp", "memory", "ring")


class Use(NamedTuple):
    """What this process takes of the machine."""

    threads: int
    descriptors: int
    resident: int


def use() -> Use:
    gc.collect()
    return Use(threading.active_count(), descriptors(), resident())


def stop(progress: Any) -> None:
    if progress.done > progress.total // 2:
        raise RuntimeError("no more of this")


KINDS = ("fine", "fine", "gather", "step", "late", "sender fails", "receiver fails", "misfit")


def send(relay: tr.Relay, number: int, kind: str) -> tr.Report:
    how: dict[str, Any] = {"timeout": 0.05} if kind == "late" else {}
    if kind == "sender fails":
        how["progress"] = stop
    return relay.send(weights(number), 1, step=number, **how)


def receive(relay: tr.Relay, number: int, kind: str, live: Any) -> tr.Loaded:
    if kind == "late":
        time.sleep(0.1)  # the send is over by then
        return relay.recv(0, into=live, step=number, timeout=0.05)
    if kind == "misfit":
        return relay.recv(0, into={"other": 1}, step=number)
    step = number + 10_000 if kind == "step" else number
    how = {"progress": stop} if kind == "receiver fails" else {}
    return relay.recv([0] if kind == "gather" else 0, into=live, step=step, **how)


def many(rank: int, group: Any, count: int, seed: int) -> Any:
    """Transfers by any way, of which some fail at either end."""
    chance = random.Random(seed)
    relays = {}
    for way in WAYS:
        with taking(way):
            relays[way] = tr.Relay(group, chunk_bytes=CHUNK, timeout=LONG, pool=16 << 20)
    live, wrong = weights(OLD), []
    before = use()
    for number in range(count):
        way, kind = chance.choice(WAYS), chance.choice(KINDS)
        if number == WARM_UP:
            before = use()
        dist.barrier(group)
        with taking(way):
            if rank == 0:
                ended = attempt_any(partial(send, relays[way], number, kind))
            else:
                ended = attempt_any(partial(receive, relays[way], number, kind, live))
        if kind in ("fine", "gather") and ended is not None:
            wrong.append((number, way, kind, ended))
        if rank == 1 and ended is None and verdict(live, number) != number:
            wrong.append((number, way, kind, "other weights"))
    dist.barrier(group)
    return before, use(), wrong


def attempt_any(call: Callable[[], Any]) -> str | None:
    """The name of the error that a call ends with."""
    try:
        return attempt(call).error
    except RuntimeError as fault:
        return type(fault).__name__


def test_a_thousand_transfers_with_faults_leave_nothing_behind(pool2: Any) -> None:
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    for before, after, wrong in pool2.run(many, TRANSFERS, seed, timeout=1200, fresh_group=True):
        print(before, after)
        assert wrong == []
        assert after.threads <= before.threads + 4, (before, after)
        assert after.descriptors <= before.descriptors + 8, (before, after)
        assert after.resident <= before.resident + (48 << 20), (before, after)


# Under load


def burn(over: Any) -> None:
    while not over.is_set():
        sum(range(10_000))


@contextmanager
def load(processes: int) -> Iterator[None]:
    """Within: that many processes keep the cores busy."""
    context = multiprocessing.get_context("fork")
    over = context.Event()
    burning = [context.Process(target=burn, args=(over,), daemon=True) for _ in range(processes)]
    for one in burning:
        one.start()
    try:
        yield
    finally:
        over.set()
        for one in burning:
            one.join(10)
            if one.is_alive():
                one.kill()


STEPS = (10, 20, 30)


def three_at_once(rank: int, group: Any, rounds: int) -> list[Any]:
    relay = tr.Relay(group, timeout=LONG)
    lives = {step: weights(OLD) for step in STEPS}

    def one(step: int) -> int | str:
        if rank == 0:
            relay.send(weights(step), 1, step=step)
            return step
        relay.recv(0, into=lives[step], step=step)
        return verdict(lives[step], step)

    with ThreadPoolExecutor(len(STEPS)) as pool:
        return [list(pool.map(one, STEPS)) for _ in range(rounds)]


def test_five_hundred_rounds_of_three_transfers_at_once_under_load(pool2: Any) -> None:
    with load(3):
        found = pool2.run(three_at_once, 500, timeout=1300, fresh_group=True)
    assert found == [[list(STEPS)] * 500] * 2
