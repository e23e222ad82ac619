"""Clients that wait for news, where there are more of them than connections."""

from __future__ import annotations

import http.client
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch

import torchrelay as tr
from torchrelay.endpoint.server.http import connections
from torchrelay.endpoint.server.http.connections import HttpConnection, HttpServer, Response
from torchrelay.endpoint.server.http.requests import Request
from torchrelay.endpoint.server.http.sockets import Acceptor, listen_at

LIMIT = 30.0  # seconds in which anything here has happened


class Polls:
    """A server of two connections. Requests wait for news; `/send` gets bytes for ever."""

    def __init__(self) -> None:
        self._news = threading.Condition()
        self._is_there = False
        self.waiting = threading.Semaphore(0)
        self.server = HttpServer(
            self._answer, connections=2, stall=LIMIT, context=None, body_limit=lambda *_: 0
        )
        self._listener = listen_at("127.0.0.1", 0)
        self._acceptor = Acceptor(self._listener, self.server.serve)

    def _answer(self, request: Request, connection: HttpConnection) -> Response | None:
        connection.admitted = True
        self.waiting.release()
        if request.path == "/send":
            connection.send_head(200, None, {})
            connection.stream(iter(lambda: bytes(1 << 20), b""), lambda nbytes: None)
        with self._news, connection.waiting(self.wake):
            self._news.wait_for(lambda: self._is_there or connection.gives_way, LIMIT)
            return Response(body=b"news" if self._is_there else b"none")

    def wake(self) -> None:
        with self._news:
            self._news.notify_all()

    def publish(self) -> None:
        self._is_there = True
        self.wake()

    def ask(self, path: str = "/") -> http.client.HTTPConnection:
        """A request whose answer is waited for."""
        host, port = self._listener.getsockname()[:2]
        line = http.client.HTTPConnection(host, port, timeout=LIMIT)
        line.request("GET", path)
        return line

    def close(self) -> None:
        self._acceptor.close()
        self.server.close()


@contextmanager
def polls(monkeypatch: pytest.MonkeyPatch, wait: float) -> Iterator[Polls]:
    """A server where clients that wait `wait` seconds may have to make room, and those that take
    nothing at once."""
    monkeypatch.setattr(connections, "WAIT_SECONDS", wait, raising=False)
    monkeypatch.setattr(connections, "STUCK_SECONDS", 0.0)
    made = Polls()
    try:
        yield made
    finally:
        made.close()


def test_a_client_that_waits_makes_room_with_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    with polls(monkeypatch, 0.0) as made:
        asked = []
        for _ in range(3):
            asked.append(made.ask())
            assert made.waiting.acquire(timeout=LIMIT)
        answer = asked[0].getresponse()
        assert (answer.status, answer.read()) == (200, b"none")
        assert answer.headers["Connection"] == "close"
        made.publish()
        assert [one.getresponse().read() for one in asked[1:]] == [b"news"] * 2
        assert made.server.refused["limit"] == 0


def test_a_client_that_has_just_begun_to_wait_keeps_its_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with polls(monkeypatch, 1000.0) as made:
        asked = []
        for _ in range(2):
            asked.append(made.ask())
            assert made.waiting.acquire(timeout=LIMIT)
        with pytest.raises(ConnectionError):
            made.ask().getresponse()
        assert made.server.refused["limit"] == 1
        made.publish()
        assert [one.getresponse().read() for one in asked] == [b"news"] * 2


def test_a_client_that_takes_nothing_is_cut_before_one_that_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with polls(monkeypatch, 1000.0) as made:
        asked = [made.ask(), made.ask("/send")]
        for _ in asked:
            assert made.waiting.acquire(timeout=LIMIT)
        kept = asked[1].getresponse()  # it would close the connection with its last reference
        assert kept.read(10) == bytes(10)
        wait_until_it_sends(made.server)
        asked.append(made.ask())
        assert made.waiting.acquire(timeout=LIMIT)
        made.publish()
        assert asked[0].getresponse().read() == asked[2].getresponse().read() == b"news"
        kept.close()


def wait_until_it_sends(server: HttpServer) -> None:
    """Until buffers are full, and the server waits for a client to take bytes."""
    end, before = time.monotonic() + LIMIT, 0.0
    while True:
        (since,) = [one.since for one in server._open if one.sending] or [0.0]
        if since and since == before:
            return
        assert time.monotonic() < end
        before = since
        time.sleep(0.2)


def test_more_subscribers_than_connections_follow_a_trainer() -> None:
    state = {"w": torch.zeros(100)}
    with tr.serve(
        state, step=1, no_dist=True, timeout=LIMIT, options=tr.options.ServeOptions(connections=4)
    ) as endpoint:
        with ExitStack() as opened:
            followed: list[Any] = []
            for _ in range(10):
                into = {"w": torch.ones(100)}
                made = tr.subscribe(
                    endpoint.url, into=into, no_dist=True, same_host=False, timeout=LIMIT
                )
                followed.append((opened.enter_context(made), into))
            faults: list[BaseException] = []

            def follow(made: Any) -> None:
                try:
                    made.update(at_least=2)
                except BaseException as fault:
                    faults.append(fault)

            waiting = [threading.Thread(target=follow, args=(one,)) for one, _ in followed]
            for one in waiting:
                one.start()
            endpoint.publish({"w": torch.full((100,), 2.0)}, step=2).result(LIMIT)
            for one in waiting:
                one.join(2 * LIMIT)
            assert not faults and not any(one.is_alive() for one in waiting)
            assert all(bool((into["w"] == 2).all()) for _, into in followed)
