"""Storages that lie over each other, as numpy hands them to torch, are tied like views of one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import torchrelay as tr
from tests.support.trips import trip

State = dict[str, torch.Tensor]
MANY = 70  # tensors, from which they are looked at in columns


def of(*parts: Any) -> State:
    return {f"t{number}": torch.from_numpy(part) for number, part in enumerate(parts)}


def numbers(count: int = 20) -> Any:
    return np.arange(float(count), dtype=np.float32)


def covered() -> State:
    array = numbers()
    return of(array, array[2:5], array[4:8])


def chained() -> State:
    """No storage has all of it."""
    array = numbers()
    return of(array[:8], array[6:12], array[10:])


def strided() -> State:
    array = numbers()
    return of(array[1:9], array[::3], array.reshape(4, 5).T)


def of_many() -> State:
    array = numbers(MANY * 4 + 2)
    return of(*(array[n * 4 : n * 4 + 6] for n in range(MANY)))


def of_many_with_one() -> State:
    """All but two share no memory with another."""
    array = numbers()
    return {**of(*(numbers(3) + n for n in range(MANY))), "a": of(array)["t0"], **of(array[5:7])}


def of_larger_elements() -> State:
    """The storage that begins first is out of step with the larger elements after it."""
    array = numbers()
    return of(array[1:9], array[2:8].view(np.float64), array[4:5].view(np.uint8)[1:])


def of_bytes_and_elements_at_odd_ones() -> State:
    data = bytearray(range(40))
    floats = torch.frombuffer(data, dtype=torch.float32, count=3, offset=5)
    return {"bytes": torch.frombuffer(data, dtype=torch.uint8), "floats": floats}


STATES = [
    of_larger_elements,
    of_bytes_and_elements_at_odd_ones,
    covered,
    chained,
    strided,
    of_many,
    of_many_with_one,
]


def lived(state: State, into: State | None, folder: Path) -> State:
    got: State = trip(state, into=into).state
    return got


def kept(state: State, into: State | None, folder: Path) -> State:
    with tr.Checkpointer(str(folder), no_dist=True, timeout=20) as checkpoints:
        checkpoints.save(1, state)
        got: State = checkpoints.load(into=into).state
    return got


Way = Callable[[State, "State | None", Path], State]


def same(one: State, other: State) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("way", [lived, kept])
@pytest.mark.parametrize("make", STATES)
def test_they_are_tied_where_they_come(way: Way, make: Callable[[], State], tmp_path: Path) -> None:
    state = make()
    got = way(state, None, tmp_path)
    assert same(got, state)
    for name in state:  # what is written through one is seen in all that see it here
        state[name].fill_(1)
        got[name].fill_(1)
        assert same(got, state), name


@pytest.mark.parametrize("way", [lived, kept])
@pytest.mark.parametrize("make", STATES)
def test_they_take_what_was_theirs(way: Way, make: Callable[[], State], tmp_path: Path) -> None:
    state, into = make(), make()
    for tensor in into.values():
        tensor.zero_()
    assert same(way(state, into, tmp_path), state)


def test_elements_that_begin_amid_others_are_refused_by_path(tmp_path: Path) -> None:
    data = bytearray(40)
    state = {
        name: torch.frombuffer(data, dtype=torch.float32, count=3, offset=at)
        for name, at in (("even", 4), ("odd", 7))
    }
    for way in (lived, kept):
        with pytest.raises(tr.errors.UnsupportedLeafError, match="give a clone") as caught:
            way(state, None, tmp_path)
        assert caught.value.path == "['even']"
