"""Offers of several transfers between two ranks at once."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

import torchrelay as tr
from tests.support.faults import weights

OLD, LONG = 100, 25.0


def traded(rank: int, group: Any) -> Any:
    """Receives at the same time, each for its step, over and over: offers are mixed up on purpose,
    and each must land its own."""
    relay = tr.Relay(group, timeout=LONG)
    steps = (10, 20, 30)
    lives = {step: weights(OLD) for step in steps}
    ready = threading.Barrier(len(steps))

    def one(step: int) -> int | str:
        ready.wait(LONG)
        if rank == 0:
            state = weights(step)
            if step == 20:
                state["small"] = state["small"][:2]
            relay.send(state, 1, step=step)
            return step
        live = lives[step]
        if step == 20:
            live["small"] = live["small"][:2]
        relay.recv(0, into=live, step=step)
        expected = weights(step)
        return step if torch.equal(live["w"], expected["w"]) else "wrong"

    with ThreadPoolExecutor(len(steps)) as pool:
        return [sorted(pool.map(one, steps), key=str) for _ in range(8)]


def test_offers_of_several_calls_are_not_mixed_up(pool2: Any) -> None:
    assert pool2.run(traded, fresh_group=True, timeout=100) == [[[10, 20, 30]] * 8] * 2
