"""Messages and their frames, without sockets: what is read, what is refused, what it costs."""

from __future__ import annotations

import random
import tracemalloc
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.messages import frame, frame_with
from torchrelay.errors import DigestError, RemoteProtocolError
from torchrelay.transports.wire import messages as m
from torchrelay.transports.wire.messages import FrameReader

ID, KEY = bytes(range(16)), bytes(range(32))
LOCATION = m.ProcessLocation("b7e1", 1000, 4026531836, 4321, ("GPU-1", "GPU-2"))
MESSAGES: list[m.Message] = [
    m.Join(),
    m.Join(m.MAX_STEP, True, LOCATION, b"n" * 16, 9, ID, m.NodeAddress(ID, "10.0.0.1", 65535)),
    m.Offer(b"\x93" * 5000, ID),
    m.Offer(b"x", ID, False, "tcp", {"tcp": b""}, {"group": "no"}, True, 8),
    m.Accept("memory"),
    m.Accept("tcp", b"\x91\x02", {"cuda_ipc": "no GPU"}, b"reads"),
    m.Refuse("mismatch", "dtype differs", "model.weight"),
    m.Refuse("step", "x" * 3000),
    m.Go(),
    m.Go(b"data" * 5000),
    m.Need((3, 1, 2)),
    m.Need(tuple(range(200)), True),
    m.Want(((0, 3), (7, 8))),
    m.Digests((5, 6), b"d" * 32),
    m.RouteNote(b"\x92\x03\x01"),
    m.Fetched(),
    m.Confirmed(),
    m.Done(),
    m.Abort("disk on fire"),
    m.Abort("too late", "step", True),
    m.Ping(),
    m.Pong(),
]


def read(reader: FrameReader, data: bytes) -> list[m.Message]:
    return [message for message, _ in reader.feed(data)]


def test_every_kind_of_message_is_tried() -> None:
    assert {type(message) for message in MESSAGES} == set(m.MESSAGES)
    kinds = {kind for one in m.Message.__subclasses__() for kind in (one, *one.__subclasses__())}
    assert set(m.MESSAGES) == kinds - {m._LargeMessage}


@pytest.mark.parametrize("message", MESSAGES, ids=lambda one: type(one).__name__)
def test_what_was_said_is_read(message: m.Message) -> None:
    assert read(FrameReader(), m.encode(message)) == [message]


def test_frames_come_in_pieces_of_any_length() -> None:
    stream = b"".join(map(m.encode, MESSAGES))
    for size in (1, 2, 7, 8, 9, 1000, len(stream)):
        reader, found = FrameReader(), []
        for at in range(0, len(stream), size):
            found += read(reader, stream[at : at + size])
        assert found == MESSAGES, size


@given(st.lists(st.sampled_from(MESSAGES), max_size=6), st.randoms(use_true_random=False))
def test_any_cut_gives_the_same_messages(said: list[Any], chance: random.Random) -> None:
    stream = b"".join(map(m.encode, said))
    reader, found, at = FrameReader(), [], 0
    while at < len(stream):
        step = chance.choice((1, 3, 8, 50, 5000))
        found += read(reader, stream[at : at + step])
        at += step
    assert found == said


def test_the_bytes_of_each_message_are_told() -> None:
    data = [m.encode(message) for message in MESSAGES]
    told = [nbytes for _, nbytes in FrameReader().feed(b"".join(data))]
    assert told == [len(one) - m._HEAD_BYTES for one in data]


# What is refused


HEADS = {
    "another protocol": b"GET / HTTP/1.1\r\n\r\n",
    "nothing but zeros": bytes(64),
    "another magic": frame_with(0, 0, magic=0x1234),
    "another version": frame_with(0, 0, version=m.VERSION + 1),
    "no such type": frame_with(len(m.MESSAGES), 0),
    "the last type": frame_with(255, 0),
}


@pytest.mark.parametrize("name", HEADS)
def test_what_is_no_frame_is_refused(name: str) -> None:
    with pytest.raises(RemoteProtocolError, match="not of this protocol"):
        read(FrameReader(), HEADS[name])


@pytest.mark.parametrize("kind", m.MESSAGES, ids=lambda kind: kind.__name__)
def test_a_length_beyond_the_cap_is_refused_with_the_head(kind: type[Any]) -> None:
    number, most = m.MESSAGES.index(kind), kind.most_bytes
    assert most <= 1 << 30
    assert read(FrameReader(), frame_with(number, most)) == []  # the rest may come
    for length in (most + 1, (1 << 32) - 1):
        with pytest.raises(RemoteProtocolError, match=f"{kind.__name__} of {length} bytes"):
            read(FrameReader(), frame_with(number, length))


def test_a_message_that_needs_little_has_a_small_cap() -> None:
    large = {m.Offer, m.Accept, m.Go, m.Need, m.Want, m.Digests, m.RouteNote}
    for kind in set(m.MESSAGES) - large:
        assert kind.most_bytes == 1 << 16, kind


BODIES = {
    "nothing": b"",
    "no MessagePack": b"\xc1",
    "deep": b"\x91" * 60_000,
    "a long array that is not there": b"\xdd\xff\xff\xff\xff",
    "a map": b"\x81\xa1a\x01",
    "too much": m.encode(m.Fetched())[m._HEAD_BYTES :] + b"\x90",
}


@pytest.mark.parametrize("name", BODIES)
@pytest.mark.parametrize("kind", m.MESSAGES, ids=lambda kind: kind.__name__)
def test_a_body_that_is_none_is_refused(kind: type[Any], name: str) -> None:
    """Whether it comes with its head, or later: a reader that failed fails again."""
    data = frame(kind, BODIES[name])
    for size in (len(data), m._HEAD_BYTES, 1):
        reader = FrameReader()
        with pytest.raises(RemoteProtocolError, match="unreadable message"):
            for at in range(0, len(data), size):
                read(reader, data[at : at + size])


def test_what_came_before_is_read() -> None:
    heard = []
    with pytest.raises(RemoteProtocolError):
        for message, _ in FrameReader().feed(m.encode(m.Ping()) + frame(m.Offer, b"\xc1")):
            heard.append(message)
    assert heard == [m.Ping()]


def test_a_length_alone_costs_no_memory() -> None:
    tracemalloc.start()
    try:
        readers = [FrameReader() for _ in range(100)]
        for reader in readers:
            read(reader, frame_with(m.MESSAGES.index(m.Offer), 1 << 30) + bytes(100))
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_what_was_read_is_not_kept() -> None:
    reader, data = FrameReader(), m.encode(m.RouteNote(bytes(1 << 20)))
    tracemalloc.start()
    try:
        for _ in range(50):
            assert len(read(reader, data)) == 1
        assert tracemalloc.get_traced_memory()[0] < 3 << 20
    finally:
        tracemalloc.stop()


def changed(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Copies with one bit changed: each of the first bytes, and some of those after them."""
    chance = random.Random(0)
    for at in range(len(data)):
        for bit in range(8) if at < 300 else [chance.randrange(8)] * (at % 23 == 0):
            copy = bytearray(data)
            copy[at] ^= 1 << bit
            yield at, bytes(copy)


@pytest.mark.parametrize("message", MESSAGES, ids=lambda one: type(one).__name__)
def test_a_bit_that_changes_on_the_way_is_found(message: m.Message) -> None:
    """At once: a reader does not wait for bytes that a changed length promises."""
    for at, data in changed(m.encode(message)):
        with pytest.raises((DigestError, RemoteProtocolError)) as caught:
            read(FrameReader(), data)
        known = type(message).__name__ if at >= m._HEAD_BYTES else "the head of a message"
        if at >= len(m._BEGINNING):
            assert str(caught.value).startswith(known), at


def fed(data: bytes, chance: random.Random) -> int:
    """How many messages bytes are taken for, if for any; anything but a typed error is a fault."""
    reader, count, at = FrameReader(), 0, 0
    try:
        while at < len(data):
            step = chance.choice((1, 5, 64, 4096, len(data)))
            count += len(read(reader, data[at : at + step]))
            at += step
    except (DigestError, RemoteProtocolError):
        pass
    return count


@given(st.binary(max_size=300), st.randoms(use_true_random=False))
def test_any_bytes_are_messages_or_an_error(data: bytes, chance: random.Random) -> None:
    fed(data, chance)


@given(st.integers(0, 255), st.binary(max_size=200), st.randoms(use_true_random=False))
def test_any_body_is_a_message_or_an_error(kind: int, body: bytes, chance: random.Random) -> None:
    fed(frame_with(kind, len(body), body=body) + body, chance)


def mutated(data: bytes, chance: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(chance.randint(1, 6)):
        at = chance.randrange(len(changed)) if changed else 0
        kind = chance.randrange(5)
        if kind == 0 and changed:
            changed[at] ^= 1 << chance.randrange(8)
        elif kind == 1 and changed:
            changed[at] = chance.choice([0, 0x7F, 0x80, 0x90, 0xC1, 0xDD, 0xDF, 0xFF])
        elif kind == 2:
            changed[at:at] = chance.randbytes(chance.randint(1, 9))
        elif kind == 3:
            del changed[at : at + chance.randint(1, 30)]
        else:
            other = chance.randrange(len(changed)) if changed else 0
            changed[at : at + 8] = changed[other : other + 8]
    return bytes(changed)


def test_twenty_thousand_mutants() -> None:
    """Mostly of the body, with a head that fits it: others are found by its digest."""
    chance = random.Random(0)
    taken = 0
    for _ in range(20_000):
        message = chance.choice(MESSAGES)
        data = m.encode(message)
        if chance.random() < 0.8:
            taken += fed(frame(type(message), mutated(data[m._HEAD_BYTES :], chance)), chance)
        else:
            taken += fed(mutated(data, chance), chance)
    assert 1_000 < taken < 19_000


# What messages have in common


@given(st.sets(st.integers(0, 60)))
def test_chunks_travel_as_ranges(chosen: set[int]) -> None:
    chunks = sorted(chosen)
    ranges = m.to_ranges(chunks)
    assert m.from_ranges(ranges, 61) == chunks
    edges = [edge for one in ranges for edge in one]
    assert edges == sorted(set(edges)), "neighbours are one range"


@pytest.mark.parametrize(
    "ranges", [((0, 9),), ((2, 1),), ((0, 2), (1, 3)), ((3, 4), (0, 1)), ((0, m.MAX_CHUNKS),)]
)
def test_ranges_of_chunks_that_do_not_exist_are_refused(ranges: Any) -> None:
    with pytest.raises(RemoteProtocolError, match="chunks that do not exist"):
        m.from_ranges(ranges, 8)


def test_a_reason_is_cut_to_what_a_peer_reads() -> None:
    for reason in ("x" * 100_000, ValueError("é" * 50_000)):
        message = m.Abort(m.text(reason))
        assert read(FrameReader(), m.encode(message)) == [message]
