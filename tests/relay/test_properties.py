"""Generated states through a real `Relay` between two processes.

Both ranks draw the same examples (hypothesis is derandomized); one sends what it drew, the other
compares what arrives with its own. Every way is tried; what comes before and after it is the same.
"""

from __future__ import annotations

import warnings
from contextlib import suppress
from importlib import import_module
from pkgutil import walk_packages
from typing import Any

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import torchrelay as tr
from tests.support.rounds import rounds
from tests.support.states import Destination, assert_same, destinations, states
from tests.support.ways import by, every_way

FEWER = {"ring": 40}
"""Examples for a way that takes longer over each."""


def examples_of(way: str) -> int:
    return rounds(FEWER.get(way, 70))


def same_on_both(examples: int) -> settings:
    """Hypothesis draws constants of the modules that are loaded, too. Which those are depends on
    what a rank did before, so both load all of the library first."""
    for module in walk_packages(tr.__path__, "torchrelay."):
        with suppress(ImportError):  # of a framework that is not installed
            import_module(module.name)
    return settings(
        max_examples=examples,
        derandomize=True,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )


def fresh(rank: int, group: Any, examples: int) -> int:
    relay = tr.Relay(group, timeout=20)
    count = 0

    @given(states(), st.sampled_from([16, 48, 256, None]))
    @same_on_both(examples)
    def each(state: object, chunk_bytes: int | None) -> None:
        nonlocal count
        if rank == 0:
            tr.Relay(group, timeout=20, chunk_bytes=chunk_bytes).send(state, 1, step=count)
        else:
            assert_same(state, relay.recv(0, step=count).state)
        count += 1

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        each()
    return count


def in_place(rank: int, group: Any, examples: int) -> int:
    relay = tr.Relay(group, timeout=20)
    count = 0

    @given(st.data(), st.sampled_from([16, 48, 256, None]), st.booleans())
    @same_on_both(examples)
    def each(data: st.DataObject, chunk_bytes: int | None, atomic: bool) -> None:
        nonlocal count
        state = data.draw(states(in_place=True))
        made: Destination = data.draw(destinations(state))
        if rank == 0:
            tr.Relay(group, timeout=20, chunk_bytes=chunk_bytes).send(state, 1, step=count)
        else:
            got = relay.recv(0, into=made.into, step=count, atomic=atomic)
            assert got.state is made.into
            assert_same(state, got.state, in_place=True)
            made.check()
        count += 1

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        each()
    return count


@every_way
def test_fresh(pool2: Any, way: str) -> None:
    first, second = pool2.run(by, way, fresh, examples_of(way), timeout=110)
    assert first == second >= examples_of(way)


@every_way
def test_in_place(pool2: Any, way: str) -> None:
    first, second = pool2.run(by, way, in_place, examples_of(way), timeout=110)
    assert first == second >= examples_of(way)


def one_memory_twice(rank: int, group: Any) -> None:
    """Arrays are not tied as tensors are: the same memory is in the state twice."""
    array = np.arange(5, dtype=np.float32)
    state = {"a": array, "b": array[:], "c": np.zeros(3)}
    with tr.Relay(group, timeout=20) as relay:
        for _ in range(2):
            if rank == 0:
                relay.send(state, 1)
            else:
                assert_same(state, relay.recv(0).state)


@every_way
def test_two_arrays_of_the_same_memory(pool2: Any, way: str) -> None:
    pool2.run(by, way, one_memory_twice, timeout=110)
