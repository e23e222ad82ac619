"""The listener admits those who know a key. Others are closed, soon, and cost next to nothing."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import resource
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median

import pytest

from tests.support.strangers import (
    Flood,
    admitted,
    challenged,
    connected,
    descriptors,
    exactly,
    is_closed,
    resident,
)
from torchrelay.deadlines import Deadline
from torchrelay.transports.meeting import listener as module
from torchrelay.transports.meeting.calls import call, call_until
from torchrelay.transports.meeting.directory import Identity
from torchrelay.transports.meeting.listener import STRANGERS, Listener, listener_here
from torchrelay.transports.wire import handshake
from torchrelay.transports.wire.handshake import CONTROL, DATA, Hello

SOON = 10.0  # seconds, on a busy machine


class Door:
    """An `Admission` that keeps those who were admitted."""

    def __init__(self) -> None:
        self.id, self.token, self.key = handshake.new_id(), handshake.new_key(), handshake.new_key()
        self.transfer = handshake.new_id()
        self.guests: list[tuple[Hello, socket.socket]] = []

    def admission(self, hello: Hello) -> tuple[bytes, Callable[[socket.socket], None]] | None:
        def admit(sock: socket.socket) -> None:
            self.guests.append((hello, sock))

        if hello.kind == CONTROL:
            return self.token, admit
        return (self.key, admit) if hello.transfer == self.transfer else None

    def wait(self, count: int) -> None:
        ends = time.monotonic() + SOON
        while len(self.guests) < count:
            assert time.monotonic() < ends, f"{len(self.guests)} of {count} were admitted"
            time.sleep(0.001)

    def close(self) -> None:
        for _, sock in self.guests:
            sock.close()
        self.guests.clear()


@pytest.fixture
def here() -> Listener:
    return listener_here()


@pytest.fixture
def door(here: Listener) -> Iterator[Door]:
    made = Door()
    here.add(made.id, made)
    yield made
    made.close()


@pytest.fixture
def identity(here: Listener, door: Door) -> Identity:
    return Identity(handshake.VERSION, here.host, here.port, door.id, door.token)


def until_flat(count: int) -> None:
    """Wait until this process has as many descriptors as before."""
    ends = time.monotonic() + SOON
    while descriptors() > count:
        assert time.monotonic() < ends, f"{descriptors()} descriptors, of {count} before"
        time.sleep(0.01)


def until_gone(here: Listener) -> None:
    """Wait until there are no strangers."""
    ends = time.monotonic() + SOON
    while here._strangers:
        assert time.monotonic() < ends
        time.sleep(0.005)
    gc.collect()


def test_who_knows_the_key_is_admitted(identity: Identity, door: Door) -> None:
    control, data = Hello(CONTROL, door.id, 5), Hello(DATA, door.id, 0, door.transfer, 3)
    for hello, key in ((control, door.token), (data, door.key)):
        call(identity, hello, key, Deadline(SOON)).close()
    door.wait(2)
    assert [hello for hello, _ in door.guests] == [control, data]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of a fork in a process with threads
def test_a_forked_child_keeps_no_connection_open(identity: Identity, door: Door) -> None:
    """A peer notices the end of the process that it is connected to, whatever its children do."""
    caller = call(identity, Hello(DATA, door.id, 0, door.transfer), door.key, Deadline(SOON))
    door.wait(1)
    socks = [caller, door.guests[0][1]]
    if not (child := os.fork()):
        os._exit(sum(sock.fileno() >= 0 for sock in socks))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert all(sock.fileno() >= 0 for sock in socks)
    caller.close()


def test_a_recorded_hello_is_not_admitted(identity: Identity, door: Door) -> None:
    sock, challenge = challenged(identity)
    recorded = handshake.hello(Hello(CONTROL, door.id, 5), challenge, door.token)
    sock.sendall(recorded)
    door.wait(1)
    for _ in range(3):
        replay, _ = challenged(identity)
        replay.sendall(recorded)
        assert is_closed(replay)
        replay.close()
    sock.close()
    assert len(door.guests) == 1


WRONG = {
    "another key": lambda door: (Hello(CONTROL, door.id, 0), handshake.new_key()),
    "no key": lambda door: (Hello(CONTROL, door.id, 0), bytes(32)),
    "another node": lambda door: (Hello(CONTROL, handshake.new_id(), 0), door.token),
    "the token for data": lambda door: (Hello(DATA, door.id, 0, door.transfer), door.token),
    "the data's key for control": lambda door: (Hello(CONTROL, door.id, 0), door.key),
    "another transfer": lambda door: (Hello(DATA, door.id, 0, handshake.new_id()), door.key),
    # What a listener compares with, where there is nothing to compare with.
    "zeros for nothing": lambda door: (Hello(DATA, door.id, 0, bytes(16)), bytes(32)),
}


@pytest.mark.parametrize("name", WRONG)
def test_who_does_not_know_the_key_is_closed(identity: Identity, door: Door, name: str) -> None:
    hello, key = WRONG[name](door)
    with pytest.raises(ConnectionResetError):
        admitted(identity, hello, key)
    assert door.guests == []


GARBAGE = {
    "HTTP": b"GET / HTTP/1.1\r\nHost: there\r\n\r\n".ljust(handshake.HELLO_BYTES),
    "zeros": bytes(handshake.HELLO_BYTES),
    "more than a hello": os.urandom(1 << 16),
}


@pytest.mark.parametrize("name", GARBAGE)
def test_garbage_is_closed_at_once(identity: Identity, name: str) -> None:
    sock, _ = challenged(identity)
    begun = time.monotonic()
    sock.sendall(GARBAGE[name])
    assert is_closed(sock) and time.monotonic() - begun < module.HELLO_SECONDS
    sock.close()


@pytest.mark.parametrize("said", [b"", b"TRLY", bytes(handshake.HELLO_BYTES - 1)])
def test_who_says_too_little_is_closed_in_time(
    identity: Identity, said: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "HELLO_SECONDS", 0.2)
    sock, _ = challenged(identity)
    sock.sendall(said)
    begun = time.monotonic()
    assert is_closed(sock) and time.monotonic() - begun > 0.1
    sock.close()


def test_who_drips_is_closed_in_time(identity: Identity, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "HELLO_SECONDS", 0.3)
    sock, _ = challenged(identity)
    begun = time.monotonic()
    with pytest.raises(OSError):
        while time.monotonic() < begun + SOON:
            sock.sendall(b"T")
            time.sleep(0.02)
    sock.close()


def test_who_hangs_up_is_forgotten(identity: Identity, here: Listener) -> None:
    before = descriptors()
    for _ in range(50):
        connected(identity).close()
    until_gone(here)
    until_flat(before)


def test_a_flood_of_strangers_keeps_no_peer_out(identity: Identity, door: Door) -> None:
    """Each is admitted at once, not after the listener has given up on a stranger."""
    before, memory = descriptors(), resident()
    took: list[float] = []
    with Flood(identity) as flood:
        flood.wait_until_made(500)
        while flood.made < 1_000 or len(took) < 30:
            begun = time.monotonic()
            hello = Hello(CONTROL, door.id, len(took))
            call_until(identity, hello, door.token, Deadline(SOON)).close()
            took.append(time.monotonic() - begun)
    assert median(took) < module.HELLO_SECONDS / 2, sorted(took)[-5:]
    door.wait(len(took))
    door.close()
    until_flat(before)
    assert resident() - memory < 32 << 20


def test_strangers_are_few_at_a_time(
    identity: Identity, here: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "HELLO_SECONDS", 30.0)
    socks = [connected(identity) for _ in range(3 * STRANGERS)]
    ends = time.monotonic() + SOON
    # The first to come are the first to be turned away.
    for sock in socks[: 2 * STRANGERS]:
        assert is_closed_after_its_challenge(sock, ends - time.monotonic())
    assert len(here._strangers) <= STRANGERS
    for sock in socks:
        sock.close()


def is_closed_after_its_challenge(sock: socket.socket, seconds: float) -> bool:
    sock.settimeout(max(seconds, 0.1))
    try:
        while data := sock.recv(100):
            assert len(data) <= handshake.CHALLENGE_BYTES
    except ConnectionError:
        return True
    return data == b""


@contextlib.contextmanager
def no_descriptor_free() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = max(int(one.name) for one in Path("/proc/self/fd").iterdir()) + 1
    filled = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    try:
        with contextlib.suppress(OSError):
            while True:
                filled.append(os.dup(0))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for fd in filled:
            os.close(fd)


def test_a_process_without_free_descriptors_accepts_again_later(
    identity: Identity, door: Door, here: Listener
) -> None:
    until_gone(here)  # those of the tests before
    socks = [socket.socket() for _ in range(8)]
    with no_descriptor_free():
        for sock in socks:
            sock.settimeout(SOON)
            sock.connect((identity.host, identity.port))
        socks[0].settimeout(3 * module.PAUSE_SECONDS)
        with pytest.raises(TimeoutError):
            socks[0].recv(1)
    for rank, sock in enumerate(socks):
        sock.settimeout(SOON)
        challenge = exactly(sock, handshake.CHALLENGE_BYTES)
        sock.sendall(handshake.hello(Hello(CONTROL, door.id, rank), challenge, door.token))
        exactly(sock, handshake.WELCOME_BYTES)
        sock.close()
    door.wait(len(socks))
    call(identity, Hello(CONTROL, door.id, 99), door.token, Deadline(SOON)).close()


def test_strangers_are_not_in_the_log(
    identity: Identity, door: Door, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    for said in (b"\xff" * handshake.HELLO_BYTES, b"short"):
        sock, _ = challenged(identity)
        sock.sendall(said)
        sock.shutdown(socket.SHUT_WR)
        assert is_closed(sock)
        sock.close()
    call(identity, Hello(CONTROL, door.id, 5), door.token, Deadline(SOON)).close()
    door.wait(1)
    text = caplog.text + "".join(capfd.readouterr())
    assert "Traceback" not in text
    for secret in (door.token, door.key):
        assert secret.hex() not in text and repr(secret)[2:-1] not in text
