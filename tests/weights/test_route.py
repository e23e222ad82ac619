"""`POST /parts` as anyone may ask it: what is refused, and with how little."""

from __future__ import annotations

import http.client
import socket
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import msgspec
import numpy as np
import pytest
import torch

import torchrelay as tr
from torchrelay.endpoint.front import Endpoint
from torchrelay.memory.digest import digest
from torchrelay.parts.runs import PartRuns
from torchrelay.parts.stream import HEAD_BYTES, MAGIC, ChunkHead

TOKEN = "a-token-that-readers-send"
STATE = {"w": torch.arange(1000.0)}


@pytest.fixture(scope="module")
def endpoint() -> Iterator[Endpoint]:
    access = tr.Access(token=TOKEN)
    with tr.serve(
        STATE, step=1, access=access, timeout=60, options=tr.options.ServeOptions(stall_seconds=2.0)
    ) as made:
        tr.pull(made.url, access=access, timeout=60)  # it is shown
        yield made


def ask(
    endpoint: Endpoint, body: bytes, *, method: str = "POST", token: str = TOKEN
) -> tuple[int, bytes]:
    line = http.client.HTTPConnection(endpoint.url.removeprefix("http://"), timeout=30)
    try:
        line.request(method, "/parts", body, {"Authorization": f"Bearer {token}"})
        answer = line.getresponse()
        return answer.status, answer.read()
    finally:
        line.close()


def facts(endpoint: Endpoint) -> tuple[str, str, int]:
    """The snapshot, the name of its volume, and its bytes."""
    step = endpoint.status()["steps"][-1]
    return step["snapshot"], "model.safetensors", step["bytes"]


def runs(*rows: tuple[int, int, int, int, int]) -> list[bytes]:
    return PartRuns(*np.array(rows, np.int64).T).encoded()


def encoded(*parts: Any) -> bytes:
    return msgspec.msgpack.encode(parts)


def test_runs_come_packed_with_their_digest(endpoint: Endpoint) -> None:
    snapshot, name, nbytes = facts(endpoint)
    start = nbytes - 4000  # of the tensor's bytes
    rows = runs((start + 8, 4, 40, 100, 4), (start, 4, 4, 1, 4))
    status, body = ask(endpoint, encoded(snapshot, [[name, None, rows]]))
    assert status == 200 and body.startswith(MAGIC)
    head = ChunkHead.decoded(body[len(MAGIC) : len(MAGIC) + HEAD_BYTES])
    data = body[len(MAGIC) + HEAD_BYTES :]
    assert (head.kind, head.nbytes) == (0, 404) and len(data) == 404
    assert digest(data) == head.digest
    wanted = torch.cat([STATE["w"][2::10], STATE["w"][:1]])
    assert torch.equal(torch.frombuffer(bytearray(data), dtype=torch.float32), wanted)


def test_malformed_requests_are_refused_with_a_line(endpoint: Endpoint) -> None:
    snapshot, name, nbytes = facts(endpoint)
    good = runs((0, 4, 4, 1, 4))
    refused = [
        (400, b""),
        (400, b"\xc1" * 100),
        (400, b"\x91" * 4000),  # nested a thousand times
        (400, encoded(snapshot, [])),
        (400, encoded(snapshot, [[name, None, good], [name, None, good]])),
        (400, encoded(snapshot, [[name, None, []]])),
        (400, encoded(snapshot, [[name, None, [b""] * 5]])),
        (400, encoded(snapshot, [[name, None, runs((nbytes, 4, 4, 1, 4))]])),
        (400, encoded(snapshot, [[name, None, runs((0, 4, 0, 1 << 40, 4))]])),
        (400, encoded(snapshot, [[name, None, runs((0, nbytes, nbytes, 1, 1), (0, 1, 1, 1, 1))]])),
        (400, encoded(snapshot, [[name, None, runs(*[(0, 1, 1, 1, 1)] * 70_000)]])),
        (404, encoded(snapshot, [["../" + name, None, good]])),
        (410, encoded("0" * 32, [[name, None, good]])),
        (410, encoded("", [[name, None, good]])),
    ]
    for status, body in refused:
        found, text = ask(endpoint, body)
        assert (found, text.count(b"\n")) == (status, 1) and len(text) < 200, (body[:80], text)
    assert ask(endpoint, b"", method="GET")[0] == 405
    assert ask(endpoint, encoded(snapshot, [[name, None, good]]))[0] == 200


def test_a_long_body_is_not_read_without_the_token(endpoint: Endpoint) -> None:
    assert ask(endpoint, b"", token="wrong")[0] == 401
    place = urlsplit(endpoint.url)
    for token, length, status in (("wrong", 1 << 20, b"401"), (TOKEN, 1 << 40, b"413")):
        with socket.create_connection((place.hostname or "", place.port or 0), timeout=30) as line:
            line.sendall(
                b"POST /parts HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer "
                + f"{token}\r\nContent-Length: {length}\r\n\r\n".encode()
            )
            assert line.recv(100).split()[1] == status  # before any of the body was sent
