"""Offers of several transfers between two ranks at once."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

import torchrelay as tr
from tests.support.faults import weights
from torchrelay.record import codec
from torchrelay.transports.protocol import sender

OLD, LONG = 100, 25.0


def described(rank: int, group: Any) -> Any:
    """Sends of a state that stays as it is, changes, and is as before. The lengths of the offered
    manifests, or what came."""
    relay = tr.Relay(group, timeout=LONG)
    lengths, got = [], []
    state: dict[str, Any] = {f"t{n}": torch.full((4,), float(n)) for n in range(100)}
    changes: list[tuple[str, Any]] = [
        *(("t7", state["t7"]), ("t7", torch.full((2, 2), 5.0)), ("t8", True)),
        *(("t8", 1), ("new", torch.ones(1)), ("t9", state["t10"]), ("step", 1)),
    ]
    full = sender.codec.shortened

    def counted(data: bytes, knows: bytes, beside: Sequence[bytes]) -> bytes:
        found = full(data, knows, beside)
        lengths.append((len(found) < len(data), codec.step_of(found)))
        return found

    sender.codec.shortened = counted
    try:
        for number, (key, value) in enumerate(changes):
            for step in (2 * number, 2 * number + 1):
                if rank == 0:
                    relay.send(state, 1, step=step)
                else:
                    got.append(relay.recv(0, step=step))
            state[key] = value
            if not number:
                value.fill_(-1)
    finally:
        sender.codec.shortened = full
    if rank == 0:
        return lengths
    state = {f"t{n}": torch.full((4,), float(n)) for n in range(100)}
    for number, (key, value) in enumerate(changes):
        for one in got[2 * number : 2 * number + 2]:
            assert list(one.state) == list(state)
            torch.testing.assert_close(one.state, state, rtol=0, atol=0)
            assert {k: type(v) for k, v in one.state.items()} == {
                k: type(v) for k, v in state.items()
            }
        state[key] = state["t10"] if key == "t9" else value
        if not number:
            value.fill_(-1)
    return [one.step for one in got]


def test_a_state_is_described_in_full_unless_nothing_of_it_changed(pool2: Any) -> None:
    """New bytes are no new description; other memory, a shape, a type or a key is one."""
    lengths, steps = pool2.run(described, fresh_group=True, timeout=100)
    assert steps == list(range(14))
    assert [step for _, step in lengths] == steps
    short = [short for short, _ in lengths]
    assert short == [False, True, True, True, *[False, True] * 5]


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
