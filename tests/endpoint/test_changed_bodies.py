"""Bits that change between a reader and a server, in a request or a small answer."""

from __future__ import annotations

import random
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import pytest
import torch

import torchrelay as tr
from torchrelay.sources.connection import Host
from torchrelay.sources.http_head import DIGEST, END, digest_header, is_changed

SOON = 30.0


@contextmanager
def proxy(port: int, alter: Callable[[bytes, bool], bytes]) -> Iterator[str]:
    """A URL whose bytes go to a server and back, each read of a socket altered: `up` to it."""
    with socket.create_server(("127.0.0.1", 0)) as here:

        def pump(one: socket.socket, other: socket.socket, up: bool) -> None:
            with suppress(OSError):
                while data := one.recv(1 << 20):
                    other.sendall(alter(data, up))
            with suppress(OSError):
                other.shutdown(socket.SHUT_RDWR)

        def serve() -> None:
            with suppress(OSError):
                while True:
                    client, _ = here.accept()
                    server = socket.create_connection(("127.0.0.1", port), SOON)
                    for ends in ((client, server, True), (server, client, False)):
                        threading.Thread(target=pump, args=ends, daemon=True).start()

        threading.Thread(target=serve, daemon=True).start()
        yield f"http://127.0.0.1:{here.getsockname()[1]}"
        here.shutdown(socket.SHUT_RDWR)


def flipped(data: bytes, chance: random.Random) -> bytes:
    """A piece of a message of HTTP with one bit of its body changed, if it has some of that."""
    head, end, _ = data.partition(END)
    body = len(head + end) if end else 0
    if body >= len(data):
        return data
    copy = bytearray(data)
    copy[chance.randrange(body, len(data))] ^= 1 << chance.randrange(8)
    return bytes(copy)


@pytest.fixture(scope="module")
def endpoint() -> Iterator[tr.Endpoint]:
    with tr.serve({"w": torch.arange(1000.0), "lr": 0.001, "name": "adamw"}, step=3) as served:
        yield served


def test_a_digest_is_that_of_the_body() -> None:
    headers = {DIGEST.lower(): digest_header(b"body")}
    assert not is_changed(headers, b"body") and is_changed(headers, b"bodx")
    assert not is_changed({}, b"any"), "another program sends none"


@pytest.mark.parametrize("path", ["/steps.json", "/record", "/status.json", "/local.json"])
def test_an_answer_that_changes_is_not_taken(endpoint: tr.Endpoint, path: str) -> None:
    chance = random.Random(path)
    port = int(endpoint.url.rpartition(":")[2])
    for _ in range(20):
        with proxy(port, lambda data, up: data if up else flipped(data, chance)) as url:
            host = Host(url)
            with pytest.raises(ConnectionResetError, match="changed on its way"):
                host.get(path, seconds=SOON)
            host.close()


def test_a_request_that_changes_is_refused(endpoint: tr.Endpoint) -> None:
    chance = random.Random(1)
    port = int(endpoint.url.rpartition(":")[2])
    for _ in range(20):
        with proxy(port, lambda data, up: flipped(data, chance) if up else data) as url:
            host = Host(url)
            answer = host.post("/seeds", b'{"url": "http://127.0.0.1:1"}', seconds=SOON)
            assert answer.status == 400 and "changed on its way" in answer.text
            host.close()


def test_a_pull_has_the_values_that_were_served_or_fails(endpoint: tr.Endpoint) -> None:
    """Whichever body changes: those of volumes are compared with the record."""
    port = int(endpoint.url.rpartition(":")[2])
    expected = tr.pull(endpoint.url).state
    for seed in range(12):
        chance, count = random.Random(seed), [0]

        def alter(
            data: bytes, up: bool, chance: random.Random = chance, count: list[int] = count
        ) -> bytes:
            count[0] += not up
            return flipped(data, chance) if not up and count[0] % 3 == chance.randrange(3) else data

        with proxy(port, alter) as url:
            try:
                got = tr.pull(
                    url, timeout=20, options=tr.options.PullOptions(same_host=False)
                ).state
            except tr.errors.RelayError:
                continue
            assert got["lr"] == expected["lr"] and got["name"] == expected["name"], seed
            assert torch.equal(got["w"], expected["w"]), seed
