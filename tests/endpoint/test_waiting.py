"""A pull that waits for a newer step waits as long as it may, whatever happens meanwhile."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

import torchrelay as tr
from tests.endpoint.liars import answering, asked
from tests.faults.test_forked_children import end_of, fork, in_process
from torchrelay.endpoint.front import Endpoint
from torchrelay.sources import connection
from torchrelay.sources.connection import Host
from torchrelay.sources.peer import PeerNotes, PeerSource, SharedAt

STATE = {"w": torch.arange(1000.0)}


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    with tr.serve(STATE, step=1, no_dist=True, timeout=60) as made:
        made.publish(STATE, step=1).result(60)
        yield made


def waiting(url: str | list[str] | PeerSource, found: list[Any]) -> threading.Thread:
    """A thread that pulls the first step above 1."""

    def run() -> None:
        try:
            found.append(
                tr.pull(
                    url, timeout=60, options=tr.options.PullOptions(newer_than=1, same_host=False)
                ).step
            )
        except tr.errors.RelayError as fault:
            found.append(fault)

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


def test_a_wait_is_longer_than_a_stall(endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection may be silent for as long as the endpoint was asked to wait."""
    monkeypatch.setattr(connection, "STALL_SECONDS", 0.3)
    with pytest.raises(tr.errors.TransferTimeoutError, match="no step above 1"):
        tr.pull(endpoint.url, timeout=2, options=tr.options.PullOptions(newer_than=1))


def test_a_rank_that_shares_its_state_later_is_waited_for() -> None:
    store: Any = dist.HashStore()
    notes = PeerNotes(store)
    found: list[Any] = []
    thread = waiting(PeerSource(notes, 0), found)
    token = "a-token-of-this-test"
    with tr.serve(STATE, step=1, access=tr.Access(token=token), no_dist=True, timeout=60) as made:
        notes.put(0, SharedAt(made.url, token))
        time.sleep(1.5)  # it has looked, and waits for the endpoint now
        assert not found
        made.publish(STATE, step=2)
        thread.join(30)
        assert found == [2]


def test_a_server_that_is_silent_to_the_end_is_a_timeout() -> None:
    """It is not lost: the caller's time is over."""
    with answering(lambda line: time.sleep(30)) as url:
        with pytest.raises(tr.errors.TransferTimeoutError, match=r"in 1 s.*took too long"):
            tr.pull(url, timeout=1)


@pytest.mark.slow  # as long as a connection may really be silent
def test_a_wait_of_twelve_seconds(endpoint: Endpoint) -> None:
    found: list[Any] = []
    thread = waiting(endpoint.url, found)
    thread.join(connection.STALL_SECONDS + 2)
    assert not found and thread.is_alive()
    endpoint.publish(STATE, step=2).result(60)
    thread.join(60)
    assert found == [2]


def test_an_endpoint_that_is_not_up_yet_is_asked_again() -> None:
    port = free_port()
    found: list[Any] = []
    thread = waiting(f"http://127.0.0.1:{port}", found)
    with tr.serve(STATE, step=2, address=f"127.0.0.1:{port}", no_dist=True, timeout=60):
        thread.join(60)
    assert found == [2]


def test_the_second_of_two_is_asked_again_when_it_comes_up(endpoint: Endpoint) -> None:
    port = free_port()
    found: list[Any] = []
    thread = waiting([endpoint.url, f"http://127.0.0.1:{port}"], found)
    with tr.serve(STATE, step=2, address=f"127.0.0.1:{port}", no_dist=True, timeout=60):
        thread.join(60)
    assert found == [2]


def test_a_token_that_is_refused_is_not_waited_for() -> None:
    def refuse(line: socket.socket) -> None:
        asked(line)
        line.sendall(b"HTTP/1.1 401 Unauthorized\r\nContent-Length: 3\r\n\r\nno\n")

    with answering(refuse) as url:
        begun = time.monotonic()
        with pytest.raises(tr.errors.EndpointError, match="token"):
            tr.pull(url, timeout=60, options=tr.options.PullOptions(newer_than=1))
        assert time.monotonic() - begun < 30


def trickle(line: socket.socket) -> None:
    """A header that never ends, a byte at a time: the connection is never silent."""
    asked(line)
    line.sendall(b"HTTP/1.1 200 OK\r\nX: ")
    while True:
        line.sendall(b"y")
        time.sleep(0.05)


def ask_in_a_fork(url: str) -> None:
    with pytest.raises(TimeoutError):
        Host(url).get("/steps.json", seconds=0.5)

    def child() -> None:
        with pytest.raises(TimeoutError):
            Host(url).get("/steps.json", seconds=0.5)

    assert end_of(fork(child), 20) == 0


def test_a_child_of_a_fork_has_deadlines_too() -> None:
    assert hasattr(os, "fork")
    with answering(trickle) as url:
        in_process(ask_in_a_fork, url)
