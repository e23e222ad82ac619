"""Several sends and receives between two ranks at once, each of its own step: never mixed up."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

import torchrelay as tr
from tests.support.faults import weights
from tests.support.rounds import rounds

OLD, LONG = 100, 25.0
STEPS = (10, 20, 30)


def state_of(step: int) -> dict[str, Any]:
    """States of different structure, so that one that went astray does not even fit."""
    state = weights(step)
    if step == 20:
        state["small"] = state["small"][:2]
    return state


def at_once(rank: int, group: Any, in_turn: bool, count: int) -> Any:
    """Three receives at once; three sends at once, or one after the other."""
    relay = tr.Relay(group, timeout=LONG)
    ready = threading.Barrier(len(STEPS))
    lives = {step: {**state_of(step), "w": torch.zeros(512, 512)} for step in STEPS}

    def send(step: int) -> int:
        relay.send(state_of(step), 1, step=step)
        return step

    def one(step: int) -> int | str:
        ready.wait(LONG)
        if rank == 0:
            return send(step)
        live = lives[step]
        live["w"].zero_()
        relay.recv(0, into=live, step=step)
        return step if torch.equal(live["w"], weights(step)["w"]) else "wrong"

    with ThreadPoolExecutor(len(STEPS)) as pool:
        if rank == 0 and in_turn:
            return [[send(step) for step in STEPS] for _ in range(count)]
        return [list(pool.map(one, STEPS)) for _ in range(count)]


@pytest.mark.rounds
@pytest.mark.timeout(900)
@pytest.mark.parametrize("in_turn", [False, True], ids=["at once", "in turn"])
def test_steps_are_never_mixed_up(pool2: Any, in_turn: bool) -> None:
    count = rounds(250, 10)
    found = pool2.run(at_once, in_turn, count, fresh_group=True, timeout=800)
    assert found == [[list(STEPS)] * count] * 2
