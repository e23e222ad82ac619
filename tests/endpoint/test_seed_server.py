"""What a seed answers, whom it lets in, and what it keeps of its memory."""

from __future__ import annotations

import http.client
import os
import socket
import threading
from collections.abc import Iterator
from urllib.parse import urlsplit

import msgspec
import pytest
import torch

import torchrelay as tr
from torchrelay.endpoint import seed_server
from torchrelay.endpoint.seed import Seed
from torchrelay.memory.kept_ranges import KeptRanges
from torchrelay.record.checkpoint.schema import DataFile

TOKEN = "correct-horse-battery-staple"
SNAPSHOT = "a" * 32
VOLUME = DataFile("model.safetensors", 3 << 20, 1 << 20, bytes(3 * 16))


@pytest.fixture(scope="module")
def seed() -> Iterator[Seed]:
    with Seed("127.0.0.1", TOKEN, [VOLUME]) as made:
        made.show(5, SNAPSHOT, b"{}")
        made.view(VOLUME.name, 0, 1 << 20)[:] = b"x" * (1 << 20)
        made.mark(0, 1)
        yield made


def _ask(
    seed: Seed, path: str, method: str = "GET", body: bytes = b"", **headers: str
) -> tuple[int, bytes]:
    line = http.client.HTTPConnection(seed.url.removeprefix("http://"), timeout=30)
    try:
        given = {"Authorization": f"Bearer {TOKEN}", **headers}
        line.request(method, path, body or None, given)
        answer = line.getresponse()
        return answer.status, answer.read()
    finally:
        line.close()


def test_what_is_here_is_sent_and_nothing_else(seed: Seed) -> None:
    path = f"/volumes/{SNAPSHOT}/{VOLUME.name}"
    assert _ask(seed, path, Range="bytes=5-9") == (206, b"xxxxx")
    assert _ask(seed, f"/marks?snapshot={SNAPSHOT}") == (200, b"\1\0\0")
    assert _ask(seed, "/record") == (200, b"{}")
    assert _ask(seed, path, "HEAD", Range="bytes=5-9") == (206, b"")
    for asked in ("bytes=1048570-1048580", "bytes=2097152-", ""):
        status, text = _ask(seed, path, **({"Range": asked} if asked else {}))
        assert status == 404 and b"not arrived" in text
    for odd in ("bytes=9-5", "bytes=-5", "bytes=0-1,3-4", "bytes=99999999-", "lines=1-2"):
        assert _ask(seed, path, Range=odd)[0] == 416
    tricks = ["/volumes/../../etc/passwd", f"/volumes/{SNAPSHOT}/%2e%2e%2fx", "/", "/status.json"]
    for trick in [*tricks, "/model.safetensors"]:
        assert _ask(seed, trick)[0] in (404, 410)
    assert _ask(seed, f"/volumes/{'b' * 32}/{VOLUME.name}")[0] == 410
    assert _ask(seed, "/record?step=6")[0] == 404
    assert _ask(seed, "/readers/me", "POST", b"{}")[0] == 204
    assert _ask(seed, "/readers/me", "POST", b" " * 10_000)[0] == 400
    assert _ask(seed, "/seeds", "POST", b"{}")[0] == 400
    assert _ask(seed, "/healthz", Authorization="") == (200, b"ok\n")


class Coming:
    """A swarm that brings chunk 1 and no other."""

    def __init__(self) -> None:
        self.asked = threading.Event()
        self.met: list[str] = []

    def awaits(self, mark: int) -> bool:
        self.asked.set()
        return mark == 1

    def meet(self, url: str) -> list[str]:
        self.met.append(url)
        return ["http://127.0.0.1:7"]


def test_a_request_waits_for_what_is_on_its_way() -> None:
    coming = Coming()
    path = f"/volumes/{SNAPSHOT}/{VOLUME.name}"
    with Seed("127.0.0.1", TOKEN, [VOLUME]) as made:
        made.show(5, SNAPSHOT, b"{}")
        made.follow(coming)
        found: list[tuple[int, bytes]] = []
        asking = threading.Thread(
            target=lambda: found.append(_ask(made, path + "?wait=2", Range="bytes=1048576-1048580"))
        )
        asking.start()
        assert coming.asked.wait(30)
        made.view(VOLUME.name, 1 << 20, 2 << 20)[:] = b"y" * (1 << 20)
        made.mark(1, 1)
        asking.join(30)
        assert found == [(206, b"yyyyy")]
        # What does not come is not waited for, and nothing is waited for without being asked to.
        assert _ask(made, path + "?wait=2", Range="bytes=2097152-2097160")[0] == 404
        assert _ask(made, path + "?wait=0.1", Range="bytes=1048570-1048580")[0] == 404
        assert _ask(made, path + "?wait=-1e9", Range="bytes=2097152-2097160")[0] == 404


def test_pullers_name_themselves_to_each_other() -> None:
    coming = Coming()
    url = "http://127.0.0.1:4444"
    with Seed("127.0.0.1", TOKEN, [VOLUME]) as made:
        made.show(5, SNAPSHOT, b"{}")
        made.follow(coming)

        def tell(url: str, snapshot: str = SNAPSHOT) -> tuple[int, bytes]:
            body = msgspec.json.encode({"url": url, "snapshot": snapshot})
            return _ask(made, "/seeds", "POST", body)

        assert tell(url) == (200, b'["http://127.0.0.1:7"]') and coming.met == [url]
        assert tell("http://10.0.0.9:4444")[0] == 400, "somebody else's address"
        assert tell(url, "b" * 32)[0] == 410
        assert coming.met == [url]


def test_strangers_are_kept_out(seed: Seed) -> None:
    for path in ("/record", f"/marks?snapshot={SNAPSHOT}", f"/volumes/{SNAPSHOT}/{VOLUME.name}"):
        for given in ("", "Bearer wrong", f"Basic {TOKEN}"):
            assert _ask(seed, path, Authorization=given)[0] == 401
    with pytest.raises(tr.UsageError, match="token"):
        Seed("0.0.0.0", None, [VOLUME])


def test_a_request_that_never_ends_is_cut(seed: Seed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seed_server, "STALL_SECONDS", 0.3)
    place = urlsplit(seed.url)
    with socket.create_connection((place.hostname or "", place.port or 0), timeout=30) as line:
        line.sendall(b"GET /record HTTP/1.1\r\nX: ")
        assert line.recv(100) == b""
    with socket.create_connection((place.hostname or "", place.port or 0), timeout=30) as line:
        line.sendall(b"GET /record HTTP/1.1\r\n" + b"X: y\r\n" * 200 + b"\r\n")
        assert b"431" in line.recv(100)


def test_so_many_connections_and_no_more(seed: Seed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seed_server, "CONNECTIONS", 2)
    place = urlsplit(seed.url)
    there = place.hostname or "", place.port or 0
    lines = [socket.create_connection(there, timeout=30) for _ in range(3)]
    assert lines[2].recv(1) == b""
    for line in lines:
        line.close()


def test_tensors_keep_their_own_memory_when_the_seed_is_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(KeptRanges, "_forked", False)
    state = {name: torch.full((1 << 20,), n, dtype=torch.int32) for n, name in enumerate("abc")}
    with tr.serve(state, step=1, timeout=60) as endpoint:
        got = tr.pull(endpoint.url, reshare=True, timeout=60)
        assert got.seed is not None
        got.state["b"][0] = 77  # for itself: what is served stays as it was
        late = tr.pull(got.seed.url, timeout=60)
        assert torch.equal(late.state["b"], state["b"])
        assert "no more" in late.report.instead["mapped"]
        fd = os.dup(got.seed.fd)
        got.seed.close()
    try:
        assert torch.equal(got.state["a"], state["a"]) and got.state["b"][0] == 77
        whole = os.fstat(fd).st_blocks
        del got.state["c"], late
        assert os.fstat(fd).st_blocks <= whole - (4 << 20) // 512 + 16
        assert torch.equal(got.state["b"][1:], state["b"][1:])
        KeptRanges.note_fork()  # the other process may still have what is dropped here
        whole = os.fstat(fd).st_blocks
        del got.state["b"]
        assert os.fstat(fd).st_blocks == whole
    finally:
        os.close(fd)
