"""Several sends and receives between two ranks at once, each of its own step: never mixed up."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch

import torchrelay as tr
from tests.support.faults import weights
from tests.support.rounds import rounds
from tests.support.ways import patched
from torchrelay.transports.protocol.sender_machine import SenderMachine

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


def late_with_another_step(rank: int, group: Any) -> Any:
    """Rank 1 is slow. Rank 2 comes when the send does not wait for it any more, for a step that no
    send has."""
    store, end = group.get_group_store(), SenderMachine.end_join
    relay = tr.Relay(group, timeout=LONG, join_window=0.5)

    def ended(self: SenderMachine, now: float) -> None:
        end(self, now)
        store.set("ended", b"1")

    try:
        if rank == 0:
            with patched(SenderMachine, end_join=ended):
                return relay.send(weights(5), [1, 2], step=5).receivers
        if rank == 1:
            wait = partial(store.get, "refused")
            return relay.recv(0, step=5, progress=lambda *how: wait()).step
        if rank == 2:
            store.get("ended")
            relay.recv(0, step=6)
        return "nothing was refused"
    except tr.errors.RelayError as fault:
        return type(fault).__name__
    finally:
        if rank == 2:
            store.set("refused", b"1")


def test_a_late_receiver_of_a_step_that_no_send_has_is_refused(pool4: Any) -> None:
    found = pool4.run(late_with_another_step, fresh_group=True)
    assert found[:3] == [(1,), 5, "StepMismatchError"]
