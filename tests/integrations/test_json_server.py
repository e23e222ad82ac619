"""A client of other projects' servers: what proxies make of their answers, and deadlines."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import pytest

from torchrelay.errors import EndpointError, UsageError
from torchrelay.integrations.json_server import JsonServer

LIMIT = 30.0
ANSWER = b'{"success": true}'


@contextmanager
def answering(
    *pieces: bytes, after: Callable[[socket.socket], None] = lambda line: None
) -> Iterator[tuple[str, list[bytes]]]:
    """A server that sends these bytes to whoever asks; its place, and what it was asked."""
    asked: list[bytes] = []
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        with suppress(OSError):
            while True:
                line, _ = listener.accept()
                with line, suppress(OSError):
                    line.settimeout(LIMIT)
                    data = b""
                    while not data.endswith(b"}"):
                        data += line.recv(1 << 16)
                    asked.append(data)
                    for piece in pieces:
                        line.sendall(piece)
                    after(line)

    threading.Thread(target=serve, daemon=True).start()
    try:
        yield f"127.0.0.1:{listener.getsockname()[1]}", asked
    finally:
        listener.close()


@pytest.mark.parametrize(
    "pieces",
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 17\r\n\r\n", ANSWER),
        (
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nVia: a\r\nVia: b\r\n\r\n",
            b"5\r\n" + ANSWER[:5] + b"\r\nc;x=y\r\n" + ANSWER[5:] + b"\r\n0\r\nT: 1\r\n\r\n",
        ),
        (
            b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 \r\nSet-Cookie: a\r\nSet-Cookie: b\r\n\r\n",
            ANSWER,
        ),
        (b"HTTP/1.0 200 OK\r\nX-Folded: a\r\n b\r\n\r\n", ANSWER),
    ],
    ids=["plain", "chunked", "until-the-end", "old"],
)
def test_answers_of_proxies_are_read(pieces: tuple[bytes, ...]) -> None:
    with answering(*pieces) as (place, asked):
        server = JsonServer(f"http://{place}/engines/a/", key="secret")
        reply = server.post("/pause", {"mode": "abort"}, seconds=LIMIT)
        assert reply.status == 200 and reply.answer == {"success": True}
        assert asked[0].startswith(b"POST /engines/a/pause HTTP/1.1\r\n")
        assert b"Authorization: Bearer secret\r\n" in asked[0]
        assert server.url == f"http://{place}/engines/a"


@pytest.mark.parametrize(
    "said",
    [
        b"SSH-2.0-OpenSSH\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 90\r\n\r\n{}",
        b"HTTP/1.1 2\r\n\r\n",
    ],
)
def test_a_server_that_speaks_otherwise_is_named(said: bytes) -> None:
    with answering(said) as (place, _):
        with pytest.raises(EndpointError, match=f"http://{place} does not answer by HTTP"):
            JsonServer(f"http://{place}").post("/pause", {}, seconds=LIMIT)


def test_a_long_answer_is_refused() -> None:
    with answering(b"HTTP/1.1 200 OK\r\n\r\n", b"x" * (3 << 20)) as (place, _):
        with pytest.raises(EndpointError, match="more than 1048576 bytes"):
            JsonServer(f"http://{place}").post("/pause", {}, seconds=LIMIT)


@pytest.mark.parametrize("head", [b"HTTP/1.1 200 OK\r\nX: ", b"HTTP/1.1 200 OK\r\n\r\n"])
def test_an_answer_that_trickles_has_a_deadline(head: bytes) -> None:
    over = threading.Event()

    def trickle(line: socket.socket) -> None:
        while not over.wait(0.05):
            line.sendall(b"x")

    with answering(head, after=trickle) as (place, _):
        begun = time.monotonic()
        with pytest.raises(TimeoutError):
            JsonServer(f"http://{place}").post("/pause", {}, seconds=0.5)
        over.set()
        assert time.monotonic() - begun < LIMIT


@pytest.mark.parametrize(
    "url",
    ["127.0.0.1:30000", "ftp://host/", "http://", "http://a:b@host", "http://host/?x=1",
     "http://host:99999", "http://host/a b", None],
)  # fmt: skip
def test_a_malformed_url_is_refused(url: str) -> None:
    with pytest.raises(UsageError, match="server's URL"):
        JsonServer(url)


def test_a_key_that_no_header_can_have_is_refused() -> None:
    with pytest.raises(UsageError, match="printable ASCII"):
        JsonServer("http://host", key="a\r\nX: b")
