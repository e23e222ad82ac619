"""Bits that change on their way between ranks: found, wherever they are, by a typed error."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed as dist

import torchrelay as tr
from tests.support.faults import CHUNK, Outcome, attempt, received, weights
from tests.support.messages import send_bytes
from tests.support.ways import by, patched
from torchrelay.transports.meeting.connection import Connection
from torchrelay.transports.streams.sockets import DataSocket
from torchrelay.transports.wire import messages as m

OLD, NEW, NEXT = 100, 1, 2
TIMEOUT, JOIN_TIMEOUT = 20.0, 0.3
OF_SENDER: dict[str, tuple[type[m.Message], ...]] = {
    "tcp": (m.Offer, m.Go, m.Confirmed),
    "memory": (m.Offer, m.Digests, m.Confirmed),
    "ring": (m.Offer, m.Digests, m.RouteNote, m.Confirmed),
}
OF_RECEIVER: dict[str, tuple[type[m.Message], ...]] = {
    "tcp": (m.Join, m.Accept, m.Fetched, m.Done),
    "memory": (m.Join, m.Accept, m.Want, m.Fetched, m.Done),
    "ring": (m.Join, m.Accept, m.Want, m.RouteNote, m.Fetched, m.Done),
}
TRIES = 12  # of each kind of message; those of an offer are spread over its record


def flipped(data: bytes, place: float, chance: random.Random) -> bytes:
    copy = bytearray(data)
    copy[min(int(place * len(data)), len(data) - 1)] ^= 1 << chance.randrange(8)
    return bytes(copy)


@contextlib.contextmanager
def changed_once(kind: type[m.Message], place: float, seed: int) -> Iterator[list[int]]:
    """Within: in the first message of a kind that this process sends a bit is another one. The list
    is empty when that has happened."""
    original, left = Connection.send, [1]

    def send(self: Connection, message: m.Message) -> None:
        if type(message) is kind and left:
            left.pop()
            send_bytes(self, flipped(m.encode(message), place, random.Random(seed)))
        else:
            original(self, message)

    with patched(Connection, send=send):
        yield left


Trial = tuple[str, bool, Outcome]


def exchange(rank: int, group: Any, way: str, liar: int, only: str | None) -> list[Trial]:
    """A transfer for each trial, whose name says what is changed by `liar`; and one that is not
    disturbed."""
    relay = tr.Relay(group, timeout=TIMEOUT, chunk_bytes=CHUNK, route=only, verify="all")

    def call(step: int) -> Outcome:
        if rank == 0:
            join = JOIN_TIMEOUT if step == NEW else None
            return attempt(lambda: relay.send(weights(step), 1, step=step, join_timeout=join))
        return received(relay, 0, weights(OLD), OLD, step, TIMEOUT)

    trials: list[Trial] = []
    for kind in (OF_SENDER if liar == 0 else OF_RECEIVER)[way]:
        for number in range(TRIES):
            place = (number + random.Random(number).random()) / TRIES
            if rank == liar:
                with changed_once(kind, place, number) as left:
                    outcome = call(NEW)
                trials.append((f"{kind.__name__} at {place:.3f}", not left, outcome))
            else:
                trials.append((kind.__name__, True, call(NEW)))
            dist.barrier(group)
    return [*trials, ("undisturbed", True, call(NEXT))]


@pytest.mark.parametrize("liar", [0, 1], ids=["sender", "receiver"])
@pytest.mark.parametrize("way", OF_SENDER)
def test_a_changed_message_is_never_taken_for_what_was_sent(
    pool2: Any, way: str, liar: int
) -> None:
    only = "tcp" if way == "tcp" else None
    ours, theirs = pool2.run(by, way, exchange, way, liar, only, timeout=300, fresh_group=True)
    names = [name for name, _, _ in (theirs if liar else ours)]
    for name, (_, sent_so, sender), (_, taken_so, receiver) in zip(
        names, ours, theirs, strict=True
    ):
        assert sent_so and taken_so, f"{name} was not sent"
        if name == "undisturbed":
            assert sender.error is None and receiver.weights == NEXT, (sender, receiver)
            continue
        # A receiver has committed before it sends the last message.
        assert receiver.weights == (NEW if name.startswith("Done") else OLD), (name, receiver)
        assert sender.error in ("PeerLostError", "TransferTimeoutError"), (name, sender)
        if liar == 0:
            assert receiver.error in ("DigestError", "RemoteProtocolError", "PeerLostError")
            kind = name.split()[0]
            assert any(
                words in receiver.text
                for words in (
                    f"{kind} has other bytes",
                    "head of a message",
                    "not of this protocol",
                )
            ), (name, receiver)
            assert "rank 0" in receiver.text


PIECES = 40


@contextlib.contextmanager
def data_changed(nth: int, seed: int) -> Iterator[None]:
    """Within: in one of the pieces that this process sends by data connections a bit is another
    one. Pieces are heads of chunks, their bytes, and digests."""
    original, count = DataSocket._send, [0]

    def send(self: DataSocket, data: memoryview) -> None:
        count[0] += 1
        if count[0] == nth:
            data = memoryview(
                flipped(bytes(data), random.Random(seed).random(), random.Random(seed))
            )
        original(self, data)

    with patched(DataSocket, _send=send):
        yield


def chunks_of(rank: int, group: Any) -> list[Outcome]:
    relay = tr.Relay(group, timeout=TIMEOUT, chunk_bytes=CHUNK, route="tcp", connections=1)
    outcomes = []
    for nth in range(1, PIECES):
        if rank == 0:
            with data_changed(nth, nth):
                outcomes.append(attempt(lambda: relay.send(weights(NEW), 1, step=NEW)))
        else:
            outcomes.append(received(relay, 0, weights(OLD), OLD, NEW, TIMEOUT))
        dist.barrier(group)
    return outcomes


def test_a_bit_that_changes_anywhere_on_a_data_connection_is_mended(pool2: Any) -> None:
    """In the number of a chunk, too: its bytes would match their digest in another one's place."""
    for pair in zip(*pool2.run(chunks_of, timeout=120, fresh_group=True), strict=True):
        assert [one.error for one in pair] == [None, None] and pair[1].weights == NEW, pair
