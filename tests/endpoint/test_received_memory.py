"""Memory that comes with a request which is refused is let go."""

from __future__ import annotations

import mmap
import os
import secrets
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec
import pytest

from torchrelay.endpoint.server import messages as m
from torchrelay.endpoint.server.http.sockets import listen_by_name
from torchrelay.endpoint.server.program import EndpointProgram
from torchrelay.keeper.server import messages as k
from torchrelay.keeper.server.program import KeeperProgram
from torchrelay.memory.sealed import sealed_memory
from torchrelay.processes.frames import exchange

TIMEOUT = 30.0
_answer = msgspec.msgpack.Decoder(k.KeeperAnswer | m.ServerAnswer)


def open_here(fd: int) -> int:
    """How many descriptors of this process are of the same file."""
    wanted, found = os.fstat(fd), 0
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            found += os.path.samestat(entry.stat(), wanted)
    return found


class Link:
    def __init__(self, line: socket.socket) -> None:
        self._line = line

    def ask(self, request: object, *fds: int) -> object:
        return _answer.decode(exchange(self._line, msgspec.msgpack.encode(request), TIMEOUT, fds))


@contextmanager
def a_keeper() -> Iterator[Link]:
    name = f"torchrelay-test-{secrets.token_hex(8)}"
    program = KeeperProgram(listen_by_name(name, 4))
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as line:
        line.connect(f"\0{name}")
        yield Link(line)
    program._acceptor.close()


@contextmanager
def a_joined_keeper() -> Iterator[Link]:
    with a_keeper() as link:
        listen = m.Listen("127.0.0.1", 0, None, None, None, None)
        assert isinstance(link.ask(k.JoinKeeper(listen)), k.Joined)
        yield link


@contextmanager
def an_endpoint() -> Iterator[Link]:
    here, there = socket.socketpair()
    serving = threading.Thread(target=EndpointProgram(there).run)
    serving.start()
    with there, here:
        yield Link(here)
        here.shutdown(socket.SHUT_RDWR)
        serving.join(TIMEOUT)


@pytest.mark.parametrize("server", [a_keeper, a_joined_keeper, an_endpoint])
def test_a_request_that_is_refused_leaves_no_descriptor(
    server: Callable[[], Iterator[Link]],
) -> None:
    fd = sealed_memory(mmap.PAGESIZE)
    try:
        with server() as link:  # type: ignore[attr-defined]
            for slot in range(5):
                answer = link.ask(m.StageSlot(slot, mmap.PAGESIZE, [], True), fd)
                assert isinstance(answer, m.Refused)
            # And the bytes that it came with are not taken for the next request.
            answer = link.ask(m.StageSlot(0, mmap.PAGESIZE, [], False))
            assert isinstance(answer, m.Refused)
            assert open_here(fd) == 1
    finally:
        os.close(fd)


def test_memory_that_cannot_be_mapped_leaves_no_descriptor() -> None:
    fd = sealed_memory(mmap.PAGESIZE)
    try:
        with an_endpoint() as link:
            listen = m.Listen("127.0.0.1", 0, None, None, None, None)
            assert isinstance(link.ask(listen), m.Listening)
            assert isinstance(link.ask(m.Reserve(1, 1)), m.Reserved)
            answer = link.ask(m.StageSlot(0, 1 << 62, [], True), fd)
            assert isinstance(answer, m.Refused) and open_here(fd) == 1
            answer = link.ask(m.StageSlot(0, mmap.PAGESIZE, [], True), fd)
            assert isinstance(answer, m.SlotStaged) and open_here(fd) > 1
        assert open_here(fd) > 0
    finally:
        os.close(fd)
