"""Receives from several ranks, one of which is killed, stands still, is slow or has wrong bytes.

Also several receivers with slow ones among them, and strangers on the ports meanwhile.
"""

from __future__ import annotations

import contextlib
import threading
import time
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DeviceMesh, DTensor, Replicate, Shard

import torchrelay as tr
from tests.support.faults import (
    CHUNK,
    GRACE,
    SENDER,
    Outcome,
    attempt,
    held_at,
    received,
    verdict,
    weights,
)
from tests.support.ranks import Ranks, reached
from tests.support.strangers import Flood
from tests.support.ways import by, patched, taking
from torchrelay.errors import PeerLostError
from torchrelay.transports.meeting.node import DataTicket, Node
from torchrelay.transports.protocol.holder import LiveHolder
from torchrelay.transports.routes.memory import MemoryFetch
from torchrelay.transports.streams.chunk_receiver import ChunkReceiver
from torchrelay.transports.streams.chunk_sender import ChunkSender
from torchrelay.transports.streams.sockets import DataSocket

OLD, NEW, AFTER = 100, 1, 2
LONG, SHORT, START = 25.0, 1.4, 90.0


def senders() -> DeviceMesh:
    """Made by all ranks at once."""
    return DeviceMesh("cpu", [0, 1])


def shards(mesh: DeviceMesh, seed: int, rank: int) -> dict[str, Any]:
    """What one of two senders has: half of the rows of the large tensors."""
    state = weights(seed)
    for name in ("w", "h"):
        rows = state[name].tensor_split([(len(state[name]) + 1) // 2])[rank]
        shape, stride = state[name].size(), state[name].stride()
        state[name] = DTensor.from_local(
            rows, mesh, [Shard(0)], run_check=False, shape=shape, stride=stride
        )
    return state


def gathered(relay: tr.Relay, live: Any, step: int, timeout: float = LONG) -> Outcome:
    out = attempt(lambda: relay.recv([0, 1], into=live, step=step, timeout=timeout))
    return out._replace(weights=verdict(live, OLD, NEW, AFTER))


# A sender that is killed or stopped

SCENES = [(way, phase) for way in ("tcp", "memory", "ring") for phase in ("joined", "data")]
SCENES += [("tcp", "confirm"), ("memory", "confirm")]


def loses_one(rank: int, group: Any, way: str, phase: str, timeout: float, killed: bool) -> Any:
    """Rank 1 is held at a phase while rank 2 takes the state from ranks 0 and 1. Then those that
    live transfer again."""
    mesh, live = senders(), weights(OLD)
    with taking(way):
        relay = tr.Relay(group, timeout=LONG, chunk_bytes=CHUNK, join_window=20.0)
        hold = held_at(SENDER[way][phase], "there") if rank == 1 else contextlib.nullcontext()
        with hold:
            if rank == 2:
                out = gathered(relay, live, NEW, timeout)
            else:
                state = shards(mesh, NEW, rank)
                out = attempt(lambda: relay.send(state, 2, step=NEW, timeout=timeout))
        reached("over", hold=True)
        if rank != 2:
            state = weights(AFTER) if killed else shards(mesh, AFTER, rank)
            return out, attempt(lambda: relay.send(state, 2, step=AFTER))
        assert verdict(live, OLD, NEW) == out.weights, "changed behind our back"
        return out, received(relay, 0, live, OLD, AFTER, LONG) if killed else gathered(
            relay, live, AFTER
        )


@pytest.mark.parametrize(("way", "phase"), SCENES)
def test_a_gather_from_a_rank_that_is_killed_names_it_and_leaves_old_weights(
    way: str, phase: str
) -> None:
    with Ranks(loses_one, 3, way, phase, LONG, True) as ranks:
        ranks.wait_reached(1, "there", START)
        ranks.kill(1)
        for rank in (0, 2):
            ranks.wait_reached(rank, "over", START)
        for rank in (0, 2):
            ranks.release(rank)
        (other, after), (theirs, again) = ranks.results(60, ranks=[0, 2])
    assert theirs.error == "PeerLostError" and "rank 1" in theirs.text, theirs
    assert theirs.weights == OLD and max(theirs.seconds, other.seconds) < LONG, (theirs, other)
    assert other.error == "PeerLostError", other
    assert after.error is None and again.error is None and again.weights == AFTER, again


@pytest.mark.parametrize(("way", "phase"), SCENES)
def test_a_gather_from_a_rank_that_stands_still_ends_in_time_and_the_next_is_right(
    way: str, phase: str
) -> None:
    with Ranks(loses_one, 3, way, phase, SHORT, False) as ranks:
        ranks.wait_reached(1, "there", START)
        ranks.stop(1)
        for rank in (0, 2):
            ranks.wait_reached(rank, "over", START)
        ranks.cont(1)
        ranks.release(1)
        ranks.wait_reached(1, "over", START)
        for rank in range(3):
            ranks.release(rank)
        (other, _), _, (theirs, again) = ranks.results(60)
    if theirs.error is None:  # it had said all it had to say
        assert (way, phase) == ("memory", "data") and theirs.weights == NEW, theirs
    else:
        assert theirs.error == "TransferTimeoutError" and "rank 1" in theirs.text, theirs
        assert theirs.weights == OLD, theirs
    assert max(theirs.seconds, other.seconds) < SHORT + GRACE, (theirs, other)
    assert again.error is None and again.weights == AFTER, again


# Wrong bytes


def spoilt(rank: int, group: Any, way: str, always: bool) -> Any:
    """Some of what comes, or all of it, is not what was sent."""
    mesh = senders()
    relay = tr.Relay(group, timeout=LONG, chunk_bytes=CHUNK, verify="all", join_window=5.0)
    if rank < 2:
        first = attempt(lambda: relay.send(shards(mesh, NEW, rank), 2, step=NEW))
        return first, attempt(lambda: relay.send(shards(mesh, AFTER, rank), 2, step=AFTER))
    owner: Any = DataSocket if way == "tcp" else MemoryFetch
    name = {"tcp": "take_chunk", "memory": "_read_and_hash"}.get(way, "_land")
    original, count, lock = getattr(owner, name), [0], threading.Lock()

    def spoil(self: Any, *args: Any, **options: Any) -> Any:
        with lock:
            count[0] += 1
            wrong = always or count[0] == 2
        if way == "ring" and wrong:
            args[1][args[1].numel() // 2] ^= 0x10
        done = original(self, *args, **options)
        if way == "tcp" and wrong:
            return bytes(16), done[1]  # as if other bytes had come
        if way == "memory" and wrong:
            self._mine[args[0]] = bytes(16)
        return done

    live = weights(OLD)
    with patched(owner, **{name: spoil}):
        out = gathered(relay, live, NEW)
    return out, gathered(relay, live, AFTER)


@pytest.mark.parametrize("always", [False, True])
@pytest.mark.parametrize("way", ["tcp", "memory", "ring"])
def test_wrong_bytes_in_a_gather_are_fetched_again_or_refused(
    pool3: Any, way: str, always: bool
) -> None:
    _, _, (out, again) = pool3.run(by, way, spoilt, way, always, fresh_group=True, timeout=90)
    if always:
        assert out.error == "DigestError" and out.weights == OLD, out
    else:
        assert out.error is None and out.weights == NEW, out
    assert again.error is None and again.weights == AFTER, again


# A source that is lost after another has given its part


def asks_again(rank: int, group: Any) -> Any:
    """Rank 2 loses rank 1, and takes the part of rank 1 from rank 0 too."""
    mesh = senders()
    relay = tr.Relay(group, timeout=LONG, chunk_bytes=CHUNK, join_window=5.0)
    if rank < 2:
        state = {
            name: DTensor.from_local(tensor, mesh, [Replicate()], run_check=False)
            for name, tensor in weights(NEW).items()
            if name in ("w", "h")
        }
        return attempt(lambda: relay.send(state, 2, step=NEW))
    asked: list[int] = []
    original = LiveHolder.fetch

    def fetch(self: LiveHolder) -> None:
        asked.append(self.rank)
        if self.rank == 1:
            raise PeerLostError("gone")
        original(self)

    live = {name: weights(OLD)[name] for name in ("w", "h")}
    with patched(LiveHolder, fetch=fetch):
        got = relay.recv([0, 1], into=live, step=NEW)
    assert all(torch.equal(live[name], weights(NEW)[name]) for name in live)
    return sorted(asked), got.report.failed


@pytest.mark.parametrize("way", ["tcp", "memory", "ring"])
def test_a_source_gives_the_part_of_one_that_was_lost_by_any_route(pool3: Any, way: str) -> None:
    _, _, (asked, failed) = pool3.run(by, way, asks_again, fresh_group=True, timeout=90)
    assert asked == [0, 0, 1] and list(failed) == [1], (asked, failed)


def late_connection(rank: int, group: Any) -> Any:
    """Rank 2 asks rank 0 again: a connection for the first question, which may come late, says
    another number than those for the second."""
    tickets: list[DataTicket] = []
    original: Any = Node.connect_data

    def connect(self: Node, address: Any, ticket: DataTicket, *args: Any) -> Any:
        tickets.append(ticket)
        return original(self, address, ticket, *args)

    with patched(Node, connect_data=connect):
        out = asks_again(rank, group)
    return out, [one.broken for one in tickets if one.transfer == tickets[-1].transfer]


def test_connections_of_an_earlier_question_are_not_taken_for_those_of_the_next(pool3: Any) -> None:
    _, _, (_, numbers) = pool3.run(by, "tcp", late_connection, fresh_group=True, timeout=90)
    assert sorted(set(numbers)) == [0, 1], numbers


# Slow peers


SLOWLY = 0.05  # seconds for a chunk, of which there are about twenty


def slow(rank: int, group: Any, who: int, shape: str) -> Any:
    """One rank takes its time with every chunk, for longer than a window in all."""
    mesh = senders()
    relay = tr.Relay(group, timeout=LONG, chunk_bytes=CHUNK, join_window=0.5, route="tcp")
    owner, name = (ChunkSender, "_send") if shape == "gather" else (ChunkReceiver, "_landed")
    original = getattr(owner, name)

    def slowly(*args: Any) -> Any:
        time.sleep(SLOWLY)
        return original(*args)

    with patched(owner, **{name: slowly}) if rank == who else contextlib.nullcontext():
        if shape == "gather":
            if rank == 2:
                return gathered(relay, weights(OLD), NEW)
            return attempt(lambda: relay.send(shards(mesh, NEW, rank), 2, step=NEW))
        if rank == 0:
            return attempt(lambda: relay.send(weights(NEW), [1, 2], step=NEW))
        live = weights(OLD)
        out = attempt(lambda: relay.recv(0, into=live, step=NEW))
        return out._replace(weights=verdict(live, OLD, NEW))


@pytest.mark.parametrize(("shape", "who"), [("fan", 1), ("fan", 2), ("gather", 1)])
def test_a_rank_that_is_slow_but_moves_is_waited_for(pool3: Any, shape: str, who: int) -> None:
    found = pool3.run(slow, who, shape, fresh_group=True, timeout=90)
    for out in found:
        assert out.error is None and out.failed == () and out.weights in (None, NEW), found


# Strangers


def besieged(rank: int, group: Any, shape: str) -> Any:
    """Strangers hold every port that there is while states are transferred."""
    mesh = senders()
    relay = tr.Relay(group, timeout=LONG, chunk_bytes=CHUNK, join_window=10.0, route="tcp")
    found = []
    with Flood(relay._member().node.identity, 100) as flood:
        flood.wait_until_made(50)
        torch.distributed.barrier(group)
        for _ in range(5):
            live = weights(OLD)
            if shape == "gather":
                if rank == 2:
                    found.append(gathered(relay, live, NEW))
                else:
                    found.append(attempt(lambda: relay.send(shards(mesh, NEW, rank), 2, step=NEW)))
            elif rank == 0:
                found.append(attempt(lambda: relay.send(weights(NEW), [1, 2], step=NEW)))
            else:
                out = attempt(lambda live=live: relay.recv(0, into=live, step=NEW))  # type: ignore[misc]
                found.append(out._replace(weights=verdict(live, OLD, NEW)))
    return found, flood.made


@pytest.mark.parametrize("shape", ["fan", "gather"])
def test_strangers_on_the_ports_do_not_disturb_transfers(pool3: Any, shape: str) -> None:
    for found, made in pool3.run(besieged, shape, fresh_group=True, timeout=150):
        assert made >= 50
        for out in found:
            assert out.error is None and out.failed == () and out.weights in (None, NEW), found
