"""Host memory of another process: what a side that lies about it achieves is an error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest

import torchrelay as tr
from tests.support.faults import CHUNK, attempt, received, weights
from tests.support.messages import altering
from tests.support.ways import by, patched
from torchrelay.geometry.runs import Runs
from torchrelay.transports.routes.host.facts import MemoryTable
from torchrelay.transports.routes.host.ring import Fill, Ring
from torchrelay.transports.routes.memory import MemoryService
from torchrelay.transports.routes.outgoing import Outgoing
from torchrelay.transports.wire.messages import MAX_CHUNKS, Accept, Offer, RouteNote

OLD, NEW = 100, 1
TIMEOUT = 20.0
_said = msgspec.msgpack.Decoder(Ring | Fill)


def table(*rows: tuple[int, int, int]) -> bytes:
    """Start, address and size of stretches, as `Runs.pack` writes them."""
    return np.array(rows, "<u8").T.tobytes()


BIG = (1 << 64) - 1
LIES: dict[str, tuple[dict[str, Any], str]] = {
    "torn table": ({"host": b"x" * 25}, "RemoteProtocolError"),
    "outside the stream": ({"host": table((1 << 40, 0, 8))}, "RemoteProtocolError"),
    "longer than the stream": ({"host": table((0, 0, 1 << 40))}, "RemoteProtocolError"),
    "sums that wrap": ({"host": table((16, 0, BIG))}, "RemoteProtocolError"),
    "overlap": ({"host": table((0, 0, 64), (32, 0, 64))}, "RemoteProtocolError"),
    "out of order": ({"host": table((64, 0, 16), (0, 0, 16))}, "RemoteProtocolError"),
    "no such chunks": ({"elsewhere": ((0, 999),)}, "RemoteProtocolError"),
    "more chunks than memory": ({"elsewhere": ((0, MAX_CHUNKS),)}, "RemoteProtocolError"),
    "negative chunks": ({"elsewhere": ((-1, 1),)}, "RemoteProtocolError"),
    "chunks backwards": ({"elsewhere": ((3, 1),)}, "RemoteProtocolError"),
    "wild addresses": ({"host": None}, "PeerLostError"),
}


def lying_sender(rank: int, group: Any, name: str) -> Any:
    relay = tr.Relay(group, timeout=TIMEOUT, chunk_bytes=CHUNK)
    if rank == 1:
        live = weights(OLD)
        return received(relay, 0, live, OLD, NEW, TIMEOUT), received(
            relay, 0, live, OLD, 2, TIMEOUT
        )
    lie = dict(LIES[name][0])
    original = MemoryService.table

    def lied(self: MemoryService, outgoing: Outgoing) -> MemoryTable:
        if lie.get("host", b"") is None:
            size = outgoing.snapshot.chunks.stream_bytes
            lie["host"] = table((0, 1 << 46, size // 2), (size // 2, BIG - 100, size - size // 2))
        return msgspec.structs.replace(original(self, outgoing), **lie)

    with patched(MemoryService, table=lied):
        out = attempt(lambda: relay.send(weights(NEW), 1, step=NEW))
    return out, attempt(lambda: relay.send(weights(2), 1, step=2))


@pytest.mark.parametrize("name", LIES)
def test_memory_that_cannot_be(pool2: Any, name: str) -> None:
    (ours, after), (theirs, again) = pool2.run(by, "memory", lying_sender, name)
    assert theirs.error == LIES[name][1] and theirs.weights == OLD, theirs
    assert ours.error in ("PeerLostError", "PeerRefusedError") and ours.seconds < TIMEOUT / 2, ours
    assert after.error is None and again.weights == 2


REPLIES: dict[str, Callable[[Any], Any]] = {
    "another chunk": lambda m: filled(m, lambda chunk, slot: (chunk + 1, slot)),
    "no such chunk": lambda m: filled(m, lambda chunk, slot: (9999, slot)),
    "negative chunk": lambda m: filled(m, lambda chunk, slot: (-1, slot)),
    "no such slot": lambda m: filled(m, lambda chunk, slot: (chunk, 9999)),
    "another slot": lambda m: filled(m, lambda chunk, slot: (chunk, 1 - slot)),
    "a slot twice": lambda m: [m, m] if isinstance(said_in(m), Fill) else m,
    "no slots": lambda m: with_ring(m, slots=0),
    "negative slots": lambda m: with_ring(m, slots=-2, slot_bytes=-(64 << 10)),
    "small slots": lambda m: with_ring(m, slot_bytes=4096),
    "no ring": lambda m: RouteNote(b"") if isinstance(said_in(m), Ring) else m,
    "a second ring": lambda m: [m, m] if isinstance(said_in(m), Ring) else m,
    "a slot before the ring": lambda m: (
        RouteNote(msgspec.msgpack.encode(("fill", 0, 0))) if isinstance(said_in(m), Ring) else m
    ),
    "fewer slots": lambda m: with_ring(m, slots=1),
    "a short file": lambda m: with_ring(m, slots=8, slot_bytes=1 << 30),
    "no file": lambda m: with_ring(m, id=1 << 40, fd=1 << 20),
    "many threads": lambda m: (
        msgspec.structs.replace(m, threads=60_000) if isinstance(m, Offer) else m
    ),
}


def said_in(message: Any) -> Any:
    """What an end of the route says in a message; None in others."""
    return _said.decode(message.data) if isinstance(message, RouteNote) else None


def filled(message: Any, lie: Callable[[int, int], tuple[int, int]]) -> Any:
    said = said_in(message)
    if not isinstance(said, Fill) or said.slot:
        return message
    return RouteNote(msgspec.msgpack.encode(("fill", *lie(said.chunk, said.slot))))


def with_ring(message: Any, **lies: Any) -> Any:
    said = said_in(message)
    if not isinstance(said, Ring):
        return message
    return RouteNote(msgspec.msgpack.encode(msgspec.structs.replace(said, **lies)))


def lying_replies(rank: int, group: Any, name: str) -> Any:
    relay = tr.Relay(group, timeout=TIMEOUT, chunk_bytes=CHUNK)
    if rank == 1:
        live = weights(OLD)
        return received(relay, 0, live, OLD, NEW, TIMEOUT), received(
            relay, 0, live, OLD, 2, TIMEOUT
        )
    with altering(REPLIES[name]):
        out = attempt(lambda: relay.send(weights(NEW), 1, step=NEW))
    return out, attempt(lambda: relay.send(weights(2), 1, step=2))


@pytest.mark.parametrize("name", REPLIES)
def test_a_ring_that_cannot_be(pool2: Any, name: str) -> None:
    (ours, after), (theirs, again) = pool2.run(by, "ring", lying_replies, name)
    if name == "many threads":
        assert ours.error is None and theirs.weights == NEW
    else:
        assert theirs.error in ("RemoteProtocolError", "PeerLostError"), theirs
        assert theirs.weights == OLD and theirs.seconds < TIMEOUT / 2
        assert ours.error == "PeerLostError" and ours.seconds < TIMEOUT / 2, ours
    assert after.error is None and again.weights == 2


def lying_receiver(rank: int, group: Any, name: str) -> Any:
    """A receiver that takes a route there is none of, or asks for what there is none of."""
    relay = tr.Relay(group, timeout=TIMEOUT, chunk_bytes=CHUNK)
    if rank == 0:
        out = attempt(lambda: relay.send(weights(NEW), 1, step=NEW))
        return out, attempt(lambda: relay.send(weights(2), 1, step=2))
    live = weights(OLD)

    def alter(message: Any) -> Any:
        if isinstance(message, Accept) and name == "route":
            return Accept("teleport")
        said = said_in(message)
        if not isinstance(said, Fill):
            return message
        chunk = {"chunk": 9999, "negative chunk": -1}.get(name, said.chunk)
        slot = {"slot": 9999, "negative slot": -1}.get(name, said.slot)
        note = RouteNote(msgspec.msgpack.encode(("fill", chunk, slot)))
        return [note] * 200 if name == "again and again" else note

    with altering(alter):
        first = received(relay, 0, live, OLD, NEW, TIMEOUT)
    return first, received(relay, 0, live, OLD, 2, TIMEOUT)


ASKED = (*("route", "chunk", "negative chunk", "slot", "negative slot", "again and again"),)


@pytest.mark.parametrize("name", ASKED)
def test_a_receiver_that_asks_for_what_there_is_none_of(pool2: Any, name: str) -> None:
    (ours, after), (theirs, again) = pool2.run(by, "ring", lying_receiver, name)
    assert ours.error == "PeerLostError" and ours.seconds < TIMEOUT / 2, ours
    # A slot may be filled again before the sender has seen that it is asked for too often.
    heard = {"PeerAbortedError"} | ({"RemoteProtocolError"} if name == "again and again" else set())
    assert theirs.error in heard and theirs.weights == OLD, theirs
    assert after.error is None and again.weights == 2


def test_an_unpacked_table_is_the_one_that_was_packed() -> None:
    runs = Runs([0, 40, 48], [1 << 63, 7, 15], [40, 8, 16])
    again = Runs.unpack(runs.pack(), 64)
    assert again.starts.tolist() == [0, 40] and again.addresses.tolist() == [1 << 63, 7]
