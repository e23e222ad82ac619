"""Limits that hold for endpoints and seeds alike, and what they never print."""

from __future__ import annotations

import http.client
import itertools
import os
import resource
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
import pytest
import torch

import torchrelay as tr
from tests.support.access import access
from torchrelay.endpoint.server.http.connections import HttpConnection, HttpServer
from torchrelay.endpoint.server.http.requests import Refusal, Request
from torchrelay.sources.connection import Host
from torchrelay.sources.lent_memory import LocalFacts

TOKEN = "correct-horse-battery-staple"
STATE = {"w": torch.arange(200_000.0)}
LIMIT = 20.0  # seconds in which a connection that is cut is seen to be


@contextmanager
def an_endpoint() -> Iterator[str]:
    with tr.serve(
        STATE, step=1, no_dist=True, timeout=60, options=tr.options.ServeOptions(stall_seconds=1.0)
    ) as made:
        yield made.url


@contextmanager
def a_seed() -> Iterator[str]:
    with tr.serve(STATE, step=1, no_dist=True, timeout=60) as made:
        got = tr.pull(made.url, timeout=60, options=tr.options.PullOptions(reshare=True))
        assert got.seed is not None
        with got.seed:
            yield got.seed.url


def connect(url: str) -> socket.socket:
    place = urlsplit(url)
    return socket.create_connection((place.hostname or "", place.port or 0), timeout=LIMIT)


def status_of(url: str, path: str, **headers: str) -> int:
    line = http.client.HTTPConnection(urlsplit(url).netloc, timeout=LIMIT)
    try:
        line.request("GET", path, headers=headers)
        return line.getresponse().status
    finally:
        line.close()


def test_long_headers_take_no_memory_of_a_puller() -> None:
    """A seed is threads of the process that pulled: strangers must not fill its memory."""
    header = b"X: " + b"y" * 60_000 + b"\r\n"
    with a_seed() as url, ExitStack() as lines:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for _ in range(24):
            line = lines.enter_context(connect(url))
            with suppress(ConnectionError):  # it is cut off when it has sent too much
                line.sendall(b"GET /record HTTP/1.1\r\n" + header * 90)
        assert status_of(url, "/healthz") == 200
        grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10
        assert grown < 40 << 20, f"{grown >> 20} MiB"


def test_requests_that_are_refused_do_not_keep_their_connections() -> None:
    options = access(token=TOKEN)
    with tr.serve(
        STATE,
        step=1,
        no_dist=True,
        timeout=60,
        options=tr.options.ServeOptions(connections=4),
        **options,
    ) as made:
        with ExitStack() as lines:
            for _ in range(4):
                line = lines.enter_context(connect(made.url))
                line.sendall(b"GET /record HTTP/1.1\r\nHost: x\r\n\r\n")
                assert b" 401 " in line.recv(4096)
            got = tr.pull(
                made.url, timeout=10, options=tr.options.PullOptions(same_host=False), **options
            )
        assert torch.equal(got.state["w"], STATE["w"])


def test_strangers_who_say_nothing_make_room_for_those_who_ask() -> None:
    options = access(token=TOKEN)
    with (
        tr.serve(
            STATE,
            step=1,
            no_dist=True,
            timeout=60,
            options=tr.options.ServeOptions(connections=4),
            **options,
        ) as made,
        ExitStack() as lines,
    ):
        for _ in range(12):
            lines.enter_context(connect(made.url))
        got = tr.pull(
            made.url, timeout=30, options=tr.options.PullOptions(same_host=False), **options
        )
        assert torch.equal(got.state["w"], STATE["w"])


@pytest.mark.parametrize("server", [an_endpoint, pytest.param(a_seed, marks=pytest.mark.slow)])
def test_a_body_that_trickles_is_cut(server: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchrelay.sources.connection.STALL_SECONDS", 1.0, raising=False)
    with server() as url, connect(url) as line:  # type: ignore[operator]
        line.sendall(
            b"POST /readers/" + b"a" * 16 + b" HTTP/1.1\r\nHost: 127.0.0.1\r\n"
            b"Content-Type: application/json\r\nContent-Length: 4000\r\n\r\n"
        )
        end = time.monotonic() + LIMIT
        with pytest.raises(ConnectionError):
            for _ in itertools.count():
                line.sendall(b" ")
                assert time.monotonic() < end, "the body outlives the time for it"
                time.sleep(0.05)


def local_facts(url: str) -> LocalFacts:
    host = Host(url)
    try:
        return msgspec.json.decode(host.get("/local.json", seconds=30).body, type=LocalFacts)
    finally:
        host.close()


def test_a_long_frame_for_memory_is_not_read() -> None:
    with tr.serve(STATE, step=1, no_dist=True, timeout=60) as made:
        facts = local_facts(made.url)
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as line:
            line.settimeout(LIMIT)
            line.connect(f"\0{facts.socket}")
            with pytest.raises(OSError):
                line.sendall((1 << 30).to_bytes(8, "little"))
                for _ in range(64):
                    line.sendall(bytes(1 << 20))
        assert tr.pull(made.url, timeout=60).report.route == "mapped"


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to be another user")
def test_another_user_who_closes_at_once_is_not_let_in() -> None:
    """The kernel's table says of a socket that nobody has any more that it is root's."""
    program = """
import encodings.idna, os, socket, sys
os.setuid(65534)
for _ in range(200):
    line = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
    body = b'{"url": "http://127.0.0.1:1", "snapshot": "%s"}' % sys.argv[2].encode()
    kind = b"Content-Type: application/json\\r\\n"
    line.sendall(b"POST /seeds HTTP/1.1\\r\\nHost: 127.0.0.1\\r\\n" + kind +
                 b"Content-Length: %d\\r\\n\\r\\n" % len(body) + body)
    line.close()
"""
    with tr.serve(STATE, step=1, no_dist=True, timeout=60) as made:
        tr.pull(made.url, timeout=60)
        snapshot = made.status()["steps"][0]["snapshot"]
        port = str(urlsplit(made.url).port)
        subprocess.run([sys.executable, "-c", program, port, snapshot], check=True, timeout=60)
        assert status_of(made.url, "/healthz") == 200
        assert made.status()["seeds"] == []


SHOUTS = [
    b"GET /\xff\x00 HTTP/1.1\r\nAuthorization: Bearer TOKEN\r\nbad header\r\n\r\n",
    b"GET / HTTP/9.9 Bearer TOKEN\r\n\r\n",
    b"GET /record HTTP/1.1\r\nAuthorization: Bearer TOKEN\r\nX: " + b"y" * 70_000 + b"\r\n\r\n",
    b"GET /record?TOKEN HTTP/1.1\r\nContent-Length: TOKEN\r\n\r\n",
    b"Bearer TOKEN\r\n\r\n",
    b"POST /seeds HTTP/1.1\r\nAuthorization: Bearer TOKEN\r\nTransfer-Encoding: x\r\n\r\nTOKEN",
    b"\x16\x03\x01TOKEN\r\n\r\n",
]


@pytest.mark.parametrize("kind", ["endpoint", "seed"])
def test_nothing_that_a_client_sends_is_printed(tmp_path: Path, kind: str) -> None:
    program = tmp_path / "served.py"
    program.write_text(
        "import sys, torch, torchrelay as tr\n"
        "endpoint = tr.serve({'w': torch.ones(4)}, step=1, no_dist=True, timeout=60)\n"
        "options = tr.options.PullOptions(reshare=True)\n"
        "got = tr.pull(endpoint.url, timeout=60, options=options)\n"
        "print(endpoint.url if sys.argv[1] == 'endpoint' else got.seed.url, flush=True)\n"
        "input()\n"
        "got.seed.close()\n"
        "endpoint.close()\n"
    )
    serving = subprocess.Popen(
        [sys.executable, program, kind],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert serving.stdout is not None
    url = serving.stdout.readline().strip()
    for shout in SHOUTS:
        with connect(url) as line, suppress(ConnectionError):
            line.sendall(shout.replace(b"TOKEN", TOKEN.encode()))
            with suppress(OSError):  # the server has refused it, and closed the connection
                line.shutdown(socket.SHUT_WR)
            while line.recv(4096):
                pass
    assert status_of(url, "/healthz") == 200
    _, printed = serving.communicate("\n", timeout=60)
    assert serving.returncode == 0
    assert printed == ""


class _ReadAtOnce(dict[str, int]):
    """Counters that two threads have read before either writes, unless a lock keeps them apart."""

    def __init__(self, counters: dict[str, int]) -> None:
        super().__init__(counters)
        self._both = threading.Barrier(2)

    def __getitem__(self, name: str) -> int:
        value = super().__getitem__(name)
        with suppress(threading.BrokenBarrierError):
            self._both.wait(0.3)  # a lock keeps the other away for as long as this one waits
        return value


def test_refusals_of_two_connections_at_once_are_both_counted() -> None:
    def refuse(request: Request, connection: HttpConnection) -> None:
        raise Refusal(401, "a token is needed")

    server = HttpServer(refuse, connections=4, stall=LIMIT, context=None)
    server.refused = _ReadAtOnce(server.refused)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        clients = [socket.create_connection(listener.getsockname(), LIMIT) for _ in range(2)]
        served = [listener.accept()[0] for _ in range(2)]
    serving = [threading.Thread(target=server.serve, args=(ours,)) for ours in served]
    for one in serving:
        one.start()
    for theirs in clients:
        theirs.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
    for one in serving:
        one.join(60)
    for theirs in clients:
        theirs.close()
    assert server.refused.get("token") == 2
