"""The first bytes of a connection, without sockets: who is admitted, and who is not."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchrelay.errors import RemoteProtocolError
from torchrelay.transports.wire import handshake
from torchrelay.transports.wire.handshake import (
    CHALLENGE_BYTES,
    CONTROL,
    DATA,
    HELLO_BYTES,
    WELCOME_BYTES,
    Hello,
)

KEY = handshake.new_key()
NODE, TRANSFER = handshake.new_id(), handshake.new_id()
HELLOS = [
    Hello(CONTROL, NODE, 0),
    Hello(CONTROL, NODE, (1 << 32) - 1),
    Hello(DATA, NODE, 7, TRANSFER, 15),
]


@pytest.mark.parametrize("content", HELLOS)
def test_two_that_know_the_key_admit_each_other(content: Hello) -> None:
    challenge = handshake.challenge()
    handshake.check_challenge(challenge)
    said = handshake.hello(content, challenge, KEY)
    assert handshake.read_hello(said) == content
    assert handshake.proves(said, challenge, KEY)
    answer = handshake.welcome(said, challenge, KEY)
    handshake.check_welcome(answer, said, challenge, KEY)
    assert [len(challenge), len(said), len(answer)] == [CHALLENGE_BYTES, HELLO_BYTES, WELCOME_BYTES]


def test_a_caller_that_does_not_know_the_key_proves_nothing() -> None:
    challenge = handshake.challenge()
    for key in (handshake.new_key(), bytes(32), b"", KEY[:-1]):
        assert not handshake.proves(handshake.hello(HELLOS[0], challenge, key), challenge, KEY)


def test_a_listener_that_does_not_know_the_key_is_found_out() -> None:
    """Whoever took over the port of a process that has ended learns nothing it could use."""
    challenge = handshake.challenge()
    said = handshake.hello(HELLOS[0], challenge, KEY)
    for answer in (
        handshake.welcome(said, challenge, handshake.new_key()),
        said[-WELCOME_BYTES:],  # the caller's own proof
        bytes(WELCOME_BYTES),
    ):
        with pytest.raises(RemoteProtocolError, match="does not know its token"):
            handshake.check_welcome(answer, said, challenge, KEY)


def test_a_recorded_hello_is_worthless() -> None:
    recorded = handshake.hello(HELLOS[0], handshake.challenge(), KEY)
    assert not handshake.proves(recorded, handshake.challenge(), KEY)


def test_a_recorded_welcome_is_worthless() -> None:
    """The listener has one challenge for two callers: the caller's own nonce tells them apart."""
    challenge = handshake.challenge()
    first, second = (handshake.hello(HELLOS[0], challenge, KEY) for _ in range(2))
    recorded = handshake.welcome(first, challenge, KEY)
    with pytest.raises(RemoteProtocolError):
        handshake.check_welcome(recorded, second, challenge, KEY)


@given(st.integers(0, HELLO_BYTES - 1), st.integers(1, 255))
def test_no_byte_of_a_hello_can_be_another(at: int, change: int) -> None:
    """What a connection is for cannot be changed on its way."""
    challenge = handshake.challenge()
    said = bytearray(handshake.hello(HELLOS[2], challenge, KEY))
    said[at] ^= change
    assert not handshake.proves(bytes(said), challenge, KEY)


@given(st.binary(min_size=HELLO_BYTES, max_size=HELLO_BYTES))
def test_any_bytes_are_a_hello_or_none(data: bytes) -> None:
    found = handshake.read_hello(data)
    assert found is None or found.kind in (CONTROL, DATA)
    assert not handshake.proves(data, handshake.challenge(), KEY)


def test_a_hello_of_another_version_or_kind_is_none() -> None:
    said = handshake.hello(HELLOS[0], handshake.challenge(), KEY)
    assert said[:4] == b"TRLY" and said[4] == handshake.VERSION and said[6] == CONTROL
    for at, value in ((0, 0), (4, handshake.VERSION + 1), (5, 1), (6, 0), (6, 3)):
        other = bytearray(said)
        other[at] = value
        assert handshake.read_hello(bytes(other)) is None


def test_another_program_at_the_address_is_named() -> None:
    for first in (b"HTTP/1.1 400 Bad Request", b"SSH-2.0-OpenSSH_9.6p1 Debian"):
        with pytest.raises(RemoteProtocolError, match="another program"):
            handshake.check_challenge(first[:CHALLENGE_BYTES])


def test_another_version_is_named_with_what_to_do() -> None:
    other = bytearray(handshake.challenge())
    other[4] = handshake.VERSION + 41
    with pytest.raises(RemoteProtocolError, match="same version of torchrelay") as caught:
        handshake.check_challenge(bytes(other))
    assert str(handshake.VERSION + 41) in str(caught.value)


@pytest.mark.parametrize("size", [0, 1, CHALLENGE_BYTES - 1, HELLO_BYTES - 1])
def test_nothing_shorter_is_taken_for_whole(size: int) -> None:
    """Sizes are fixed, so a listener reads no more than that of a stranger."""
    challenge = handshake.challenge()
    said = handshake.hello(HELLOS[0], challenge, KEY)[:size]
    assert not handshake.proves(said, challenge, KEY)


def test_no_two_challenges_ids_or_keys_are_alike() -> None:
    for make in (handshake.challenge, handshake.new_id, handshake.new_key):
        assert len({make() for _ in range(1000)}) == 1000
