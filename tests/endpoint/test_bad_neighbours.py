"""Seeds and places that lie about what they have or where they are: pullers do without them."""

from __future__ import annotations

import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

import torchrelay as tr
from tests.endpoint.liars import Between, answering
from tests.support.access import access
from tests.support.certificates import certificate
from torchrelay.endpoint.front import Endpoint
from torchrelay.sources.connection import Host

NBYTES = 24 << 20
TOKEN = "correct-horse-battery-staple"


def state() -> dict[str, Any]:
    draw = torch.Generator().manual_seed(3)
    return {"w": torch.randint(0, 255, (NBYTES,), generator=draw, dtype=torch.uint8), "n": 3}


@pytest.fixture(scope="module")
def endpoint() -> Iterator[Endpoint]:
    with tr.serve(state(), step=5, no_dist=True, timeout=60) as made:
        tr.pull(made.url, timeout=60)  # the step is shown once it is hashed
        yield made


def snapshot_of(endpoint: Endpoint) -> str:
    return str(endpoint.status()["steps"][-1]["snapshot"])


def register(endpoint: Endpoint, url: str, **options: Any) -> int:
    """Name a seed to an endpoint."""
    host = Host(endpoint.url, **options)
    word = msgspec.json.encode({"url": url, "snapshot": snapshot_of(endpoint)})
    try:
        return host.post("/seeds", word, seconds=30).status
    finally:
        host.close()


def answer(status: str, body: bytes, more: str = "") -> bytes:
    return f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n{more}\r\n".encode() + body


def liar(volume: Callable[[socket.socket, str], None]) -> Callable[[socket.socket], None]:
    """Says that it has every chunk, and does something else when it is asked for one."""

    def act(line: socket.socket) -> None:
        held = b""
        while True:
            while b"\r\n\r\n" not in held:
                part = line.recv(4096)
                if not part:
                    return
                held += part
            head, _, held = held.partition(b"\r\n\r\n")
            length = re.search(rb"(?i)content-length: *(\d+)", head)
            while length is not None and len(held) < int(length[1]):
                held += line.recv(4096)
            held = b"" if length is None else held[int(length[1]) :]
            first = head.split(b"\r\n")[0].decode()
            if "/seeds" in first:
                line.sendall(answer("200 OK", b'{"seeds": [], "complete": true}'))
            elif "/volumes/" in first:
                volume(line, head.decode())
            else:
                line.sendall(answer("404 Not Found", b"no\n"))

    return act


def denies(line: socket.socket, head: str) -> None:
    line.sendall(answer("404 Not Found", b"not here\n"))


def drips(line: socket.socket, head: str) -> None:
    """As slowly as a connection may go before it is cut: 64 KiB a second."""
    found = re.search(r"(?i)range: *bytes=(\d+)-(\d+)", head)
    assert found is not None
    start, stop = int(found[1]), int(found[2]) + 1
    ranged = f"Content-Range: bytes {start}-{stop - 1}/{NBYTES}\r\n"
    line.sendall(f"HTTP/1.1 206 P\r\nContent-Length: {stop - start}\r\n{ranged}\r\n".encode())
    for _ in range(start, stop, 8192):
        line.sendall(bytes(8192))
        time.sleep(0.1)


@pytest.mark.parametrize(
    "how", [denies, pytest.param(drips, marks=pytest.mark.slow)], ids=["denies", "drips"]
)
def test_seeds_that_claim_every_chunk_hold_up_no_puller(
    endpoint: Endpoint, how: Callable[[socket.socket, str], None]
) -> None:
    with ExitStack() as liars:
        for _ in range(3):
            url = liars.enter_context(answering(liar(how)))
            assert register(endpoint, url) == 200
        begun = time.monotonic()
        found: list[tr.Loaded] = []

        def run() -> None:
            found.append(
                tr.pull(endpoint.url, timeout=60, options=tr.options.PullOptions(reshare=True))
            )

        pulling = [threading.Thread(target=run) for _ in range(2)]
        for thread in pulling:
            thread.start()
        for thread in pulling:
            thread.join(70)
        spent = time.monotonic() - begun
        for one in found:
            assert one.seed is not None
            one.seed.close()
    assert len(found) == 2 and all(torch.equal(one.state["w"], state()["w"]) for one in found)
    assert spent < 15


BAD = [
    "http://127.0.0.1:99999",
    "ftp://127.0.0.1:21",
    "http://me:secret@127.0.0.1:80",
    "http://127.0.0.1:80/path",
    "http://[127.0.0.1",
    "http://" + "a" * 70 + ".example:80",
    "http://127.0.0.1:0",
    "http://127.0.0.1:80?x=1",
    "http://127.0.0.1:8a",
    "\x00",
]


@pytest.mark.parametrize("url", BAD)
def test_a_seed_with_a_bad_url_is_not_registered(endpoint: Endpoint, url: str) -> None:
    assert register(endpoint, url) == 400
    assert url not in [one["url"] for one in endpoint.status()["seeds"]]


@pytest.mark.parametrize("url", BAD)
@pytest.mark.parametrize("reshare", [False, True])
def test_a_place_or_seed_with_a_bad_url_is_left_out(
    endpoint: Endpoint, url: str, reshare: bool
) -> None:
    """It comes from an endpoint that checks nothing."""

    def alter(line: str, body: bytes) -> bytes:
        if "/steps.json" in line:  # others have the volumes
            return re.sub(rb'"here":\[[^]]*\]', b'"here":[]', body)
        if "/places.json" in line:
            facts = msgspec.json.decode(body)
            facts["volumes"] = {name: [url, *urls] for name, urls in facts["volumes"].items()}
            return msgspec.json.encode(facts)
        if "/seeds" in line:
            return msgspec.json.encode({"seeds": [url], "complete": True})
        return body

    with Between(endpoint.url, alter) as between:
        got = tr.pull(
            between.url,
            timeout=60,
            options=tr.options.PullOptions(same_host=False, reshare=reshare),
        )
    assert torch.equal(got.state["w"], state()["w"])
    if got.seed is not None:
        got.seed.close()


def test_a_place_with_a_bad_url_alone_is_a_typed_error(endpoint: Endpoint) -> None:
    def alter(line: str, body: bytes) -> bytes:
        if "/steps.json" in line:
            return re.sub(rb'"here":\[[^]]*\]', b'"here":[]', body)
        if "/places.json" not in line:
            return body
        facts = msgspec.json.decode(body)
        facts["volumes"] = {name: ["http://127.0.0.1:99999"] for name in facts["volumes"]}
        return msgspec.json.encode(facts)

    with (
        Between(endpoint.url, alter) as between,
        pytest.raises(tr.errors.RelayError, match="99999"),
    ):
        tr.pull(between.url, timeout=30, options=tr.options.PullOptions(same_host=False))


@pytest.mark.parametrize("rest", ["no volume", "no URL", "another volume"])
def test_a_step_without_a_place_says_which_volume_lacks_one(endpoint: Endpoint, rest: str) -> None:
    def alter(line: str, body: bytes) -> bytes:
        if "/steps.json" in line:
            return re.sub(rb'"here":\[[^]]*\]', b'"here":[]', body)
        if "/places.json" not in line:
            return body
        names = msgspec.json.decode(body)["volumes"]
        given = {
            "no volume": {},
            "no URL": {name: [] for name in names},
            "another volume": {"x": [""]},
        }
        return msgspec.json.encode({"volumes": given[rest]})

    with Between(endpoint.url, alter) as between, pytest.raises(tr.errors.EndpointError) as caught:
        tr.pull(between.url, timeout=30, options=tr.options.PullOptions(same_host=False))
    text = str(caught.value)
    assert "no server has volume" in text and "step 5" in text and between.url in text


def test_the_token_of_an_https_endpoint_is_never_sent_in_the_clear(tmp_path: Path) -> None:
    """Neither to a seed nor to a place that is named by http://."""
    key, cert = certificate(tmp_path)
    heard: list[bytes] = []

    def listen(line: socket.socket) -> None:
        heard.append(line.recv(4096))

    own = access(token=TOKEN, certfile=cert, keyfile=key)
    with (
        answering(listen) as url,
        tr.serve(state(), step=5, no_dist=True, timeout=60, **own) as made,
    ):
        trusting = access(token=TOKEN, cafile=cert, certfile=cert, keyfile=key)
        first = tr.pull(
            made.url,
            timeout=60,
            options=tr.options.PullOptions(same_host=False),
            **access(token=TOKEN, cafile=cert),
        )
        assert first.step == 5
        name_seed(made, url, cert)
        got = tr.pull(
            made.url, timeout=60, options=tr.options.PullOptions(reshare=True), **trusting
        )
        assert got.seed is not None and torch.equal(got.state["w"], state()["w"])
        got.seed.close()
    assert not any(TOKEN.encode() in data for data in heard)


def name_seed(endpoint: Endpoint, url: str, cert: str) -> None:
    import ssl

    context = ssl.create_default_context(cafile=cert)
    register(endpoint, url, token=TOKEN, context=context)
