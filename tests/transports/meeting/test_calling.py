"""Connecting to another process: in time, and with an error that says what to do."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

import torchrelay as tr
from tests.support.strangers import descriptors
from torchrelay.deadlines import Deadline
from torchrelay.errors import PeerLostError, RemoteProtocolError
from torchrelay.transports.meeting import calls, waits
from torchrelay.transports.meeting.calls import call, call_rank, call_until
from torchrelay.transports.meeting.directory import Directory, Identity
from torchrelay.transports.wire import handshake
from torchrelay.transports.wire.handshake import CONTROL, Hello

RANK, ME, SOON, LONG = 4, 1, 5.0, 300.0
KEY = handshake.new_key()


def identity(port: int) -> Identity:
    return Identity(handshake.VERSION, "127.0.0.1", port, handshake.new_id(), KEY)


@contextmanager
def answering(answer: Callable[[socket.socket], None]) -> Iterator[Identity]:
    """A listener that does what `answer` does with each connection."""
    with socket.create_server(("127.0.0.1", 0)) as here:

        def serve() -> None:
            try:
                while True:
                    sock, _ = here.accept()
                    sock.settimeout(SOON)
                    with sock:
                        answer(sock)
            except OSError:
                pass

        serving = threading.Thread(target=serve, daemon=True)
        serving.start()
        yield identity(here.getsockname()[1])
        here.shutdown(socket.SHUT_RDWR)
    serving.join(SOON)


def admits(sock: socket.socket) -> None:
    challenge = handshake.challenge()
    sock.sendall(challenge)
    said = sock.recv(handshake.HELLO_BYTES, socket.MSG_WAITALL)
    assert handshake.proves(said, challenge, KEY)
    sock.sendall(handshake.welcome(said, challenge, KEY))


def directory_with(identity: Identity) -> Directory:
    directory = Directory()
    directory.give(RANK, identity)
    return directory


def closed_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as here:
        return int(here.getsockname()[1])


def test_a_rank_is_reached() -> None:
    with answering(admits) as there:
        sock, found = call_rank(directory_with(there), RANK, ME, Deadline(SOON))
        assert found == there and sock.gettimeout() is None
        sock.close()


def pretends(sock: socket.socket) -> None:
    sock.sendall(handshake.challenge())
    sock.recv(handshake.HELLO_BYTES, socket.MSG_WAITALL)
    sock.sendall(bytes(handshake.WELCOME_BYTES))


LISTENERS: dict[str, tuple[Callable[[socket.socket], None], type[Exception], str]] = {
    "another program": (
        lambda sock: sock.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n"),
        RemoteProtocolError,
        "another program",
    ),
    "another version": (
        lambda sock: sock.sendall(b"TRLY\x63\x00" + handshake.challenge()[6:]),
        RemoteProtocolError,
        "same version of torchrelay",
    ),
    "one that does not know the key": (
        pretends,
        RemoteProtocolError,
        "does not know its token",
    ),
    "one that closes": (lambda sock: None, PeerLostError, "does not admit this rank"),
}


@pytest.mark.parametrize("name", LISTENERS)
def test_whoever_else_listens_there_is_found_out(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls, "CONNECT_SECONDS", 0.3)
    answer, error, words = LISTENERS[name]
    before = descriptors()
    with answering(answer) as there:
        with pytest.raises(error, match=words) as caught:
            call_rank(directory_with(there), RANK, ME, Deadline(SOON))
    assert caught.value.rank == RANK and caught.value.phase == "join"  # type: ignore[attr-defined]
    assert KEY.hex() not in str(caught.value) and repr(KEY) not in repr(caught.value)
    assert descriptors() <= before


def test_a_process_that_has_ended_is_named() -> None:
    port = closed_port()
    with pytest.raises(PeerLostError, match=f"rank 4 at 127.0.0.1 port {port} does not listen"):
        call_rank(directory_with(identity(port)), RANK, ME, Deadline(SOON))


def test_an_address_that_cannot_be_reached_names_the_setting() -> None:
    there = Identity(handshake.VERSION, "255.255.255.255", 5, handshake.new_id(), KEY)
    with pytest.raises(PeerLostError, match="set GLOO_SOCKET_IFNAME on that rank"):
        call_rank(directory_with(there), RANK, ME, Deadline(SOON))


@pytest.mark.parametrize("host", ["a\0b", "é" * 70 + ".invalid", "no such host.invalid"])
def test_a_host_that_is_none_is_a_typed_error(host: str) -> None:
    there = Identity(handshake.VERSION, host, 5, handshake.new_id(), KEY)
    with pytest.raises(tr.errors.RelayError):
        call_rank(directory_with(there), RANK, ME, Deadline(SOON))


def test_a_process_that_stands_still_costs_no_more_than_the_deadline() -> None:
    """Its kernel takes the connection, and it says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as here:
        there = identity(here.getsockname()[1])
        begun = time.monotonic()
        with pytest.raises(tr.errors.TransferTimeoutError, match=r"rank 4 at .* did not answer"):
            call_rank(directory_with(there), RANK, ME, Deadline(0.3))
        assert 0.2 < time.monotonic() - begun < SOON


def full_port(stack: ExitStack) -> int:
    """A port whose listener takes no more connections: a call is not answered by its kernel."""
    here = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
    for _ in range(4):
        waiting = stack.enter_context(socket.socket())
        waiting.setblocking(False)
        waiting.connect_ex(here.getsockname())
    return int(here.getsockname()[1])


@pytest.mark.parametrize("where", ["connect", "handshake"])
@pytest.mark.parametrize("how", ["hastened", "over"])
def test_a_wait_ends_with_a_deadline_that_is_hastened(
    where: str, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the timeout was minutes when it began; so does one whose transfer is over."""
    monkeypatch.setattr(calls, "CONNECT_SECONDS", LONG)
    deadline, over = Deadline(LONG), threading.Event()
    faults: list[OSError] = []
    with ExitStack() as stack:
        if where == "connect":
            port = full_port(stack)
        else:
            here = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            port = int(here.getsockname()[1])
        there = identity(port)
        begun = threading.Event()
        wait = waits._wait

        def noted(*args: Any) -> None:
            begun.set()
            wait(*args)

        monkeypatch.setattr(waits, "_wait", noted)

        def call_there() -> None:
            try:
                call(there.address, Hello(CONTROL, there.node, ME), KEY, deadline, over.is_set)
            except OSError as fault:
                faults.append(fault)

        calling = threading.Thread(target=call_there, daemon=True)
        calling.start()
        assert begun.wait(SOON)
        if how == "over":
            over.set()
        else:
            deadline.hasten(0.0)
        calling.join(4 * SOON)
    assert not calling.is_alive() and isinstance(faults[0], TimeoutError)


def test_a_process_that_admits_no_one_until_the_deadline_is_late() -> None:
    with answering(lambda sock: None) as there:
        with pytest.raises(tr.errors.TransferTimeoutError, match=r"rank 4 at .* did not answer"):
            call_rank(directory_with(there), RANK, ME, Deadline(0.3))


def test_a_rank_that_was_started_again_is_called_there() -> None:
    with answering(admits) as there:

        class Restarted(Directory):
            def forget(self, rank: int) -> None:
                self.give(rank, there)

        directory = Restarted()
        directory.give(RANK, identity(closed_port()))
        sock, found = call_rank(directory, RANK, ME, Deadline(SOON))
        assert found == there
        sock.close()


def test_a_process_that_does_not_expect_the_call_yet_is_called_again() -> None:
    calls = []

    def later(sock: socket.socket) -> None:
        calls.append(1)
        if len(calls) > 3:
            admits(sock)

    with answering(later) as there:
        hello = Hello(CONTROL, there.node, ME)
        call_until(there, hello, KEY, Deadline(SOON)).close()
    assert len(calls) == 4


def test_a_transfer_that_is_over_calls_no_more() -> None:
    with answering(lambda sock: None) as there:
        hello, over = Hello(CONTROL, there.node, ME), iter([False, False, True])
        with pytest.raises(ConnectionResetError):
            call_until(there, hello, KEY, Deadline(SOON), lambda: next(over))


@pytest.mark.parametrize("cut_after", [0, 5, handshake.CHALLENGE_BYTES])
def test_a_call_that_breaks_off_leaves_no_descriptor(cut_after: int) -> None:
    def breaks(sock: socket.socket) -> None:
        sock.sendall(handshake.challenge()[:cut_after])

    before = descriptors()
    with answering(breaks) as there:
        hello = Hello(CONTROL, there.node, ME)
        for _ in range(20):
            with pytest.raises(OSError):
                call(there, hello, KEY, Deadline(SOON))
    assert descriptors() <= before
