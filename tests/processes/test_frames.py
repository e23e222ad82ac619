"""Messages between processes of one host: what was sent, or the end of the connection."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from torchrelay.processes.frames import receive_frame, send_frame

SOON = 10.0


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    one, other = socket.socketpair()
    with one, other:
        one.settimeout(SOON)
        other.settimeout(SOON)
        yield one, other


def sent(data: bytes) -> bytes:
    """The bytes of a message on its way."""
    one, other = socket.socketpair()
    with one, other:
        send_frame(one, data)
        return other.recv(1 << 16)


@pytest.mark.parametrize("data", [b"", b"x", b"\0" * 5000])
def test_a_message_comes_as_it_was_sent(
    ends: tuple[socket.socket, socket.socket], data: bytes
) -> None:
    for _ in range(2):
        send_frame(ends[0], data)
        assert receive_frame(ends[1]) == data


def test_a_bit_that_changes_is_the_end_of_the_connection() -> None:
    """At once: a changed length keeps no reader waiting."""
    message = sent(b"lr 0.001")
    for bit in range(8 * len(message)):
        one, other = socket.socketpair()
        with one, other:
            other.settimeout(SOON)
            changed = bytearray(message)
            changed[bit // 8] ^= 1 << bit % 8
            one.sendall(changed)
            with pytest.raises(EOFError, match=r"other bytes than were sent|a message of"):
                receive_frame(other)


def test_a_process_that_sends_something_else_is_not_waited_for() -> None:
    one, other = socket.socketpair()
    with one, other:
        other.settimeout(SOON)
        one.sendall(b"\xff" * 8)
        with pytest.raises(EOFError, match="a message of"):
            receive_frame(other)


def test_a_message_that_is_too_long_is_not_read(ends: tuple[socket.socket, socket.socket]) -> None:
    send_frame(ends[0], b"x" * 101)
    with pytest.raises(EOFError, match="a message of 101 bytes"):
        receive_frame(ends[1], 100)
