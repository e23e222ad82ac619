"""Five hundred updates with faults among them: one version at any time, and nothing grows."""

from __future__ import annotations

import gc
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from statistics import mean
from typing import Any

import pytest
import torch

import torchrelay as tr
from tests.endpoint.test_soak import Sample
from tests.support.ranks import RankPool
from tests.weights.conftest import Wire
from tests.weights.test_faults import PARTS
from torchrelay.endpoint.encoding import Encoding

UPDATES, SEED = 500, 20260
TIMEOUT, SOON, STALL = 30.0, 2.0, 0.5
GROWTH = 6 << 20  # bytes of memory that a process may have more in the last third
FAULTS = ("none",) * 6 + ("cut", "cut", "flip", "flip", "late", "stall", "killed")
_kept: dict[str, Any] = {}  # in a process: what stays between two calls


def weights(version: int) -> dict[str, Any]:
    """In `few` some elements change from version to version, and in `all` every one."""
    few = torch.zeros(300_000, dtype=torch.int32)
    few[version % 50 :: 50] = version
    return {"few": few, "all": torch.arange(300_000.0) + version, "version": version}


def version_of(state: dict[str, Any]) -> int:
    """-99 for a mixture."""
    version: int = state["version"]
    wanted = weights(version)
    same = all(torch.equal(state[name], wanted[name]) for name in ("few", "all"))
    return version if same else -99


# In the trainer.


def publish(rank: int, group: Any, version: int) -> tuple[str, int, Sample]:
    """Where the step is, and what this process has."""
    if version == 1:
        _kept["endpoint"] = tr.serve(
            weights(1),
            step=1,
            no_dist=True,
            timeout=TIMEOUT,
            encoding=Encoding(history=3),
            options=tr.options.ServeOptions(stall_seconds=STALL, hold_seconds=STALL),
        )
    else:
        end = time.monotonic() + TIMEOUT
        while (shown := _kept["endpoint"].publish(weights(version), step=version)).skipped:
            assert time.monotonic() < end, shown.skipped  # a reader that is gone is dropped
        shown.result(TIMEOUT)
    gc.collect()
    server: int = _kept["endpoint"]._server.process.pid
    return _kept["endpoint"].url, server, Sample.of(os.getpid())


# In the worker.


def subscribe(rank: int, group: Any, url: str) -> None:
    for same_host in (False, True):
        into = weights(-1)
        _kept[same_host] = (
            into,
            tr.subscribe(url, into=into, same_host=same_host, no_dist=True, timeout=TIMEOUT),
        )


def update(
    rank: int, group: Any, version: int, same_host: bool, seconds: float
) -> tuple[str, int, int, Sample]:
    """How the update ended, the versions before and after, and what this process has."""
    into, subscription = _kept[same_host]
    before, ended = version_of(into), ""
    try:
        got = subscription.update(at_least=version, timeout=seconds)
        assert got.step == version
    except tr.errors.RelayError as fault:
        ended = type(fault).__name__
    gc.collect()
    return ended, before, version_of(into), Sample.of(os.getpid())


def meddling(fault: str, chance: random.Random) -> Callable[[bytes, int, bytes], bytes | None]:
    """The fault of a wire, once within a part stream."""
    left, after = [fault], chance.randrange(1_500_000)

    def meddle(asked: bytes, at: int, data: bytes) -> bytes | None:
        if asked != PARTS or at + len(data) <= after or not left:
            return data
        left.clear()
        if fault == "flip":
            place = max(0, after - at)
            return data[:place] + bytes([data[place] ^ 4]) + data[place + 1 :]
        if fault == "stall":
            time.sleep(2 * STALL)  # a reader that stands still, which the server drops
        return None

    return meddle


def grown(samples: list[Sample]) -> Sample:
    """The difference between the means of the last third and those of the second."""
    third = len(samples) // 3
    parts = samples[third : 2 * third], samples[2 * third :]
    second, last = ([mean(values) for values in zip(*some, strict=True)] for some in parts)
    return Sample(*(round(b - a) for a, b in zip(second, last, strict=True)))


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_five_hundred_updates_with_faults(wires: Callable[[str], Wire]) -> None:
    chance, tally = random.Random(SEED), Counter[str]()
    print(f"seed {SEED}")
    samples: dict[str, list[Sample]] = {"publisher": [], "server": [], "worker": []}
    with RankPool(1) as trainer, RankPool(1) as worker:
        ((url, server, _),) = trainer.run(publish, 1, timeout=2 * TIMEOUT)
        wire = wires(url)
        worker.run(subscribe, wire.url, timeout=2 * TIMEOUT)
        for version in range(2, UPDATES + 2):
            fault, same_host = chance.choice(FAULTS), chance.random() < 0.3
            ((url, server, mine),) = trainer.run(publish, version, timeout=2 * TIMEOUT)
            wire.lead(url)
            seconds = chance.random() / 20 if fault == "late" else TIMEOUT
            wire.meddle = lambda asked, at, data: data
            if fault in ("cut", "flip", "stall"):
                wire.meddle = meddling(fault, chance)
            if fault == "killed":
                os.kill(server, signal.SIGKILL)
                seconds = SOON
            ((ended, before, after, its),) = worker.run(
                update, version, same_host, seconds, timeout=2 * TIMEOUT
            )
            tally[f"{fault} {ended or 'updated'}"] += 1
            assert after in (before, version) and before != -99, (version, fault, before, after)
            assert ended or after == version
            assert fault in ("late", "killed") or not ended, (version, fault, ended)
            samples["publisher"].append(mine)
            samples["worker"].append(its)
            if fault != "killed":
                samples["server"].append(Sample.of(server))
            wire.forget()
            if version % 50 == 0:
                print(version, {name: some[-1] for name, some in samples.items()}, flush=True)
    print(dict(sorted(tally.items())))
    for name, some in samples.items():
        more = grown(some)
        print(f"{name}: first {some[0]}, last {some[-1]}, grown {more}")
        assert more.anonymous < GROWTH and more.descriptors <= 4 and more.threads <= 2, name
