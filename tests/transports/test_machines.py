"""The state machines of a transfer, joined in memory and driven by random schedules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.support.joined import SECONDS, Receiver, World
from torchrelay.transports.protocol.machines.peers import Stage
from torchrelay.transports.protocol.machines.receiver_machine import FedMachine
from torchrelay.transports.protocol.machines.sender_machine import SenderMachine

SCHEDULES = 20_000
BATCH = 2_000
MOST_STEPS = 3_000


def play(seed: int) -> None:
    world = World(seed)
    faults, healthy = list(world.faults), world.healthy
    while world.step():
        assert world.steps < MOST_STEPS, f"seed {seed}: somebody hangs"
    check_receivers(world, seed)
    if not any(kind.endswith("sender") for _, kind, _ in faults):
        check_sender(world, seed)
        check_healthy(world, seed, healthy)
        if not faults and all(one.plan == "fine" for one in world.receivers.values()):
            assert world.now < SECONDS / 10, f"seed {seed}: {world.now} s without a fault"


def check_receivers(world: World, seed: int) -> None:
    """All have ended, with the new state or the old one. What is committed is looked at when it is
    (`Receiver._commit`)."""
    for one in world.receivers.values():
        where = f"seed {seed}, rank {one.rank}"
        if one.alive and not one.stopped:
            assert one.over or one.plan == "absent", f"{where} hangs"
            taken = one.plan == "fine" and one.fault is None
            assert one.state == ("new" if taken else "old"), f"{where}: {one.state}, {one.fault}"


def check_sender(world: World, seed: int) -> None:
    """It has ended, and knows of each receiver what is so."""
    assert world.over, f"seed {seed}: the sender hangs"
    for peer in world.machine.peers.values():
        assert peer.stage not in (Stage.CALLED, Stage.JOINED, Stage.ACCEPTED), f"seed {seed} {peer}"
        state = world.receivers[peer.rank].state
        if peer.stage in (Stage.DONE, Stage.FAILED, Stage.REFUSED):
            assert (state == "new") == (peer.stage is Stage.DONE), f"seed {seed} {peer} has {state}"


def check_healthy(world: World, seed: int, healthy: list[Receiver]) -> None:
    """Nobody else's fault keeps a receiver from the state. (There are at most two flipped bytes,
    and a chunk is asked for twice more.)"""
    for one in healthy:
        stage = world.machine.peers[one.rank].stage
        assert one.state == "new", f"seed {seed}, rank {one.rank}: {one.fault}"
        assert stage is Stage.DONE, f"seed {seed}, rank {one.rank}: {stage}"


@pytest.mark.parametrize("first", range(0, SCHEDULES, BATCH))
def test_random_schedules(first: int) -> None:
    """Messages and chunks late by any length, peers lost or stopped at any step, refusals, absent
    and silent receivers, flipped bytes, timeouts."""
    print(f"seeds {first} to {first + BATCH - 1}")
    for seed in range(first, first + BATCH):
        play(seed)


def nothing(*args: Any, **how: Any) -> None:
    pass


def trusting(self: FedMachine, now: float) -> bool:
    return not self.missing and self._trailer is not None


def hasty(self: SenderMachine, peer: Any) -> bool:
    return not self._unhashed


MUTANTS: dict[str, tuple[type, str, Callable[..., Any]]] = {
    "orphans are not rerouted": (SenderMachine, "_reroute", nothing),
    "nobody is detached": (SenderMachine, "_detach", nothing),
    "nobody is found stuck": (SenderMachine, "tick", nothing),
    "digests are told too early": (SenderMachine, "_has_all", hasty),
    "a lost upstream is waited for": (FedMachine, "broke", nothing),
    "a detached receiver goes on": (FedMachine, "detach", nothing),
    "a stall is not told": (FedMachine, "tick", nothing),
    "bytes are not compared": (FedMachine, "complete", trusting),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_machine_that_does_not_do_its_part_is_found_out(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """So that the schedules above are known to reach what they are for."""
    owner, attribute, instead = MUTANTS[name]
    monkeypatch.setattr(owner, attribute, instead)
    with pytest.raises(AssertionError):
        for seed in range(SCHEDULES // 4):
            play(seed)
