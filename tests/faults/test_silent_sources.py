"""Receives from several ranks, where one stands still or fails: no other waits for it.

The calls here have minutes; a test that waits for one of their timeouts fails.
"""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DeviceMesh, DTensor, Replicate

import torchrelay as tr
from tests.support.faults import CHUNK, SENDER, Outcome, attempt, held_at, weights
from tests.support.ranks import Ranks, reached
from tests.support.ways import patched
from torchrelay.transports.meeting import calls, waits
from torchrelay.transports.meeting.connection import Connection
from torchrelay.transports.protocol.peers import Peer
from torchrelay.transports.protocol.serving import Serving
from torchrelay.transports.wire.messages import Message, Ping

NEW, OTHER = 1, 2
LONG, WINDOW = 300.0, 1.0
SOON = 90.0  # a test's own limit, far below


def replicas(mesh: DeviceMesh) -> dict[str, Any]:
    """A state that each source has all of."""
    return {
        name: DTensor.from_local(weights(NEW)[name], mesh, [Replicate()], run_check=False)
        for name in ("w", "h")
    }


def received(relay: tr.Relay, **options: Any) -> tuple[Outcome, bool]:
    """The outcome of a receive from ranks 0 and 1, and whether all is here."""
    live = {name: torch.zeros_like(weights(NEW)[name]) for name in ("w", "h")}
    out = attempt(lambda: relay.recv([0, 1], into=live, **options))
    return out, all(torch.equal(live[name], weights(NEW)[name]) for name in live)


def one_does_not_answer(rank: int, group: Any) -> Any:
    """Rank 1 is stopped before rank 2 calls it: its kernel takes the connection."""
    mesh = DeviceMesh("cpu", [0, 1])
    with patched(calls, CONNECT_SECONDS=LONG):
        relay = tr.Relay(group, timeout=LONG, chunk_bytes=CHUNK, join_window=WINDOW)
        reached("ready", hold=True)
        if rank == 0:
            return attempt(lambda: relay.send(replicas(mesh), 2, step=NEW))
        return received(relay, step=NEW)


def test_a_source_that_does_not_answer_the_handshake_costs_the_window() -> None:
    with Ranks(one_does_not_answer, 3) as ranks:
        for rank in range(3):
            ranks.wait_reached(rank, "ready", SOON)
        ranks.stop(1)
        for rank in (0, 2):
            ranks.release(rank)
        sender, (out, whole) = ranks.results(SOON, ranks=[0, 2])
    assert sender.error is None and out.error is None and whole, (sender, out)
    assert out.failed == (1,), out


def interrupted(rank: int, group: Any) -> str:
    """Both sources are stopped, and rank 2 is interrupted in the handshake with one of them."""
    original = waits.receive_exactly

    def receive_exactly(*args: Any) -> bytes:
        reached("handshake")
        return original(*args)

    with patched(calls, CONNECT_SECONDS=LONG, receive_exactly=receive_exactly):
        relay = tr.Relay(group, timeout=LONG, join_window=LONG)
        reached("ready", hold=True)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            relay.recv([0, 1])
        except KeyboardInterrupt:
            return "interrupted"
        return "not interrupted"


def test_an_interrupt_ends_a_handshake_that_is_not_answered() -> None:
    with Ranks(interrupted, 3) as ranks:
        for rank in range(3):
            ranks.wait_reached(rank, "ready", SOON)
        for rank in (0, 1):
            ranks.stop(rank)
        ranks.release(2)
        ranks.wait_reached(2, "handshake", SOON)
        pid = ranks.processes[2].pid
        assert pid is not None
        os.kill(pid, signal.SIGINT)
        assert ranks.results(SOON, ranks=[2]) == ["interrupted"]


def stops_after_its_offer(rank: int, group: Any, phase: str) -> Any:
    """Rank 1 stops at a phase of its send, after rank 2 has its offer."""
    mesh = DeviceMesh("cpu", [0, 1])
    relay = tr.Relay(group, timeout=LONG, chunk_bytes=CHUNK, join_window=WINDOW, route="tcp")
    if rank == 2:
        reached("ready", hold=True)
        return received(relay, step=NEW)
    if rank == 0:
        reached("ready", hold=True)
        return attempt(lambda: relay.send(replicas(mesh), 2, step=NEW))
    with held_at(SENDER["tcp"][phase], "there"):
        relay.send(replicas(mesh), 2, step=NEW)


@pytest.mark.parametrize("phase", ["go", "data", "confirm"])
def test_a_source_that_stops_after_its_offer_costs_the_patience(phase: str) -> None:
    with Ranks(stops_after_its_offer, 3, phase) as ranks:
        for rank in (0, 2):
            ranks.wait_reached(rank, "ready", SOON)
            ranks.release(rank)
        ranks.wait_reached(1, "there", SOON)
        ranks.stop(1)
        sender, (out, whole) = ranks.results(SOON, ranks=[0, 2])
    assert sender.error is None and out.error is None and whole, (sender, out)
    assert out.failed == (1,), out


PINGS = 12  # four in each patience


def answers_while_busy(rank: int, group: Any) -> Any:
    """Rank 1 makes no progress for several times the patience, and answers all the same."""
    mesh = DeviceMesh("cpu", [0, 1])
    relay = tr.Relay(group, timeout=LONG, chunk_bytes=CHUNK, join_window=WINDOW, route="tcp")
    if rank == 2:
        return received(relay, step=NEW)
    if rank == 0:
        return attempt(lambda: relay.send(replicas(mesh), 2, step=NEW))
    pings = threading.Semaphore(0)
    heard, confirm = Connection._received, Serving.confirm

    def count(self: Connection, message: Message, nbytes: int) -> None:
        if isinstance(message, Ping):
            pings.release()
        heard(self, message, nbytes)

    def late(self: Serving, peer: Peer) -> None:
        assert all(pings.acquire(timeout=SOON) for _ in range(PINGS))
        confirm(self, peer)

    with patched(Connection, _received=count), patched(Serving, confirm=late):
        return attempt(lambda: relay.send(replicas(mesh), 2, step=NEW))


def test_a_source_that_is_busy_is_waited_for() -> None:
    with Ranks(answers_while_busy, 3) as ranks:
        *senders, (out, whole) = ranks.results(SOON)
    assert [one.error for one in senders] == [None, None], senders
    assert out.error is None and whole and not out.failed, out


def one_has_another_step(rank: int, group: Any) -> Any:
    """Rank 0 offers another step than the one that is asked for, and rank 1 nothing."""
    relay = tr.Relay(group, timeout=LONG, join_window=LONG)
    if rank == 0:
        return attempt(lambda: relay.send(weights(OTHER), 2, step=OTHER))
    if rank == 1:
        reached("there", hold=True)
        return None
    return attempt(lambda: relay.recv([0, 1], step=NEW))


def test_a_source_with_another_step_ends_the_wait_for_the_others() -> None:
    with Ranks(one_has_another_step, 3) as ranks:
        sender, out = ranks.results(SOON, ranks=[0, 2])
    assert out.error == sender.error == "StepMismatchError" and "rank 0" in out.text, (sender, out)
