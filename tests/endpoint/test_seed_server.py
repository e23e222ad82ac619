"""What a seed answers, whom it lets in, and what it keeps of its memory."""

from __future__ import annotations

import http.client
import json
import os
import select
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
import pytest
import torch

import torchrelay as tr
from torchrelay.endpoint.reshare import seed as seeds
from torchrelay.endpoint.reshare.seed import Seed
from torchrelay.endpoint.server.messages import Listen
from torchrelay.endpoint.server.step_server import StepServer
from torchrelay.record.schema import VolumeRecord

TOKEN = "correct-horse-battery-staple"
ACCESS = tr.Access(token=TOKEN)
SNAPSHOT = "a" * 32
VOLUME = VolumeRecord("model.safetensors", 3 << 20, 1 << 20, None, bytes(3 * 16))


@pytest.fixture(scope="module")
def seed() -> Iterator[Seed]:
    with Seed("127.0.0.1", ACCESS, [VOLUME]) as made:
        made.show(5, SNAPSHOT, b"{}")
        made.space(VOLUME.name, 0, 1 << 20).view[:] = b"x" * (1 << 20)
        made.add(0, 1)
        yield made


def _limit(monkeypatch: pytest.MonkeyPatch, **limits: float) -> None:
    """Have seeds listen with other limits."""

    def limited(listen: Listen, *, lends: bool) -> StepServer:
        return StepServer(msgspec.structs.replace(listen, **limits), lends=lends)

    monkeypatch.setattr(seeds, "StepServer", limited)


def _ask(
    seed: Seed, path: str, method: str = "GET", body: bytes = b"", **headers: str
) -> tuple[int, bytes]:
    line = http.client.HTTPConnection(seed.url.removeprefix("http://"), timeout=30)
    try:
        kind = {"Content-Type": "application/json"} if body else {}
        given = {"Authorization": f"Bearer {TOKEN}", **kind, **headers}
        line.request(method, path, body or None, given)
        answer = line.getresponse()
        return answer.status, answer.read()
    finally:
        line.close()


def test_what_is_here_is_sent_and_nothing_else(seed: Seed) -> None:
    path = f"/volumes/{SNAPSHOT}/{VOLUME.name}"
    assert _ask(seed, path, Range="bytes=5-9") == (206, b"xxxxx")
    assert _ask(seed, "/record") == (200, b"{}")
    assert _ask(seed, path, "HEAD", Range="bytes=5-9") == (404, b"")  # of the whole volume
    for asked in ("bytes=1048570-1048580", "bytes=2097152-", "lines=1-2", ""):
        status, text = _ask(seed, path, **({"Range": asked} if asked else {}))
        assert status == 404 and b"not arrived" in text
    for odd in ("bytes=9-5", "bytes=0-1,3-4", "bytes=99999999-", "bytes=-"):
        assert _ask(seed, path, Range=odd)[0] == 416
    tricks = ["/volumes/../../etc/passwd", f"/volumes/{SNAPSHOT}/%2e%2e%2fx", "/nothing"]
    for trick in [*tricks, "/model.safetensors"]:
        assert _ask(seed, trick)[0] in (404, 410)
    assert _ask(seed, f"/volumes/{'b' * 32}/{VOLUME.name}")[0] == 410
    assert _ask(seed, "/record?step=6")[0] == 404
    assert json.loads(_ask(seed, "/steps.json")[1])["steps"][0]["here"] == []
    assert json.loads(_ask(seed, "/local.json")[1])["socket"] == ""
    assert _ask(seed, "/readers/me", "POST", b'{"outcome": "done"}')[0] == 204
    assert _ask(seed, "/readers/me", "POST", b" " * 10_000)[0] == 413
    assert _ask(seed, "/seeds", "POST", b"{}")[0] == 400
    assert _ask(seed, "/healthz", Authorization="") == (200, b"ok\n")


def test_a_request_waits_for_what_is_on_its_way() -> None:
    asked = threading.Event()

    def expects(chunk: int) -> bool:
        asked.set()
        return chunk == 1

    path = f"/volumes/{SNAPSHOT}/{VOLUME.name}"
    with Seed("127.0.0.1", ACCESS, [VOLUME], expects=expects) as made:
        made.show(5, SNAPSHOT, b"{}")
        found: list[tuple[int, bytes]] = []
        late = {"Range": "bytes=1048576-1048580"}
        asking = threading.Thread(
            target=lambda: found.append(_ask(made, path + "?wait_ms=2000", **late))
        )
        asking.start()
        assert asked.wait(30)
        made.space(VOLUME.name, 1 << 20, 2 << 20).view[:] = b"y" * (1 << 20)
        made.add(1, 1)
        asking.join(30)
        assert found == [(206, b"yyyyy")]
        # What does not come is not waited for, and nothing is waited for without being asked to.
        assert _ask(made, path + "?wait_ms=2000", Range="bytes=2097152-2097160")[0] == 404
        assert _ask(made, path + "?wait_ms=100", Range="bytes=1048570-1048580")[0] == 404
        assert _ask(made, path + "?wait_ms=-1", Range="bytes=2097152-2097160")[0] == 400


def test_pullers_name_themselves_to_each_other() -> None:
    met: list[str] = []
    url = "http://127.0.0.1:4444"
    with Seed("127.0.0.1", ACCESS, [VOLUME], met=met.append) as made:
        made.show(5, SNAPSHOT, b"{}")

        def tell(url: str, snapshot: str = SNAPSHOT) -> tuple[int, bytes]:
            body = msgspec.json.encode({"url": url, "snapshot": snapshot})
            return _ask(made, "/seeds", "POST", body)

        assert tell(url) == (200, b'{"seeds":[],"complete":false}') and met == [url]
        assert (
            tell("http://127.0.0.1:7")[1] == b'{"seeds":["http://127.0.0.1:4444"],"complete":false}'
        )
        assert tell("http://10.0.0.9:4444")[0] == 400, "somebody else's address"
        assert tell(url, "b" * 32)[0] == 410
        made.add(0, 3)
        assert b'"complete":true' in tell(url)[1]


def test_strangers_are_kept_out(seed: Seed) -> None:
    for path in ("/record", f"/marks?snapshot={SNAPSHOT}", f"/volumes/{SNAPSHOT}/{VOLUME.name}"):
        for given in ("", "Bearer wrong", f"Basic {TOKEN}"):
            assert _ask(seed, path, Authorization=given)[0] == 401
    with pytest.raises(tr.errors.UsageError, match="token"):
        Seed("0.0.0.0", tr.Access(), [VOLUME])


def test_a_request_that_never_ends_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    _limit(monkeypatch, stall=0.3)
    with Seed("127.0.0.1", ACCESS, [VOLUME]) as made:
        made.show(5, SNAPSHOT, b"{}")
        place = urlsplit(made.url)
        there = place.hostname or "", place.port or 0
        with socket.create_connection(there, timeout=30) as line, suppress(ConnectionError):
            line.sendall(b"GET /record HTTP/1.1\r\nX: ")
            assert line.recv(100) == b""
        with socket.create_connection(there, timeout=30) as line:
            line.sendall(b"GET /record HTTP/1.1\r\n" + b"X: y\r\n" * 200 + b"\r\n")
            assert b" 400 " in line.recv(100)


def test_so_many_connections_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    _limit(monkeypatch, connections=2)
    with Seed("127.0.0.1", ACCESS, [VOLUME]) as made, ExitStack() as lines:
        made.show(5, SNAPSHOT, b"{}")
        place = urlsplit(made.url)
        there = place.hostname or "", place.port or 0
        opened = [
            lines.enter_context(socket.create_connection(there, timeout=30)) for _ in range(3)
        ]
        # The one that was taken first makes room, long before the server gives up on all of them.
        (cut,), _, _ = select.select(opened, [], [], 5)
        with suppress(ConnectionError):
            assert cut.recv(1) == b""


def test_tensors_outlive_the_seed_and_free_its_memory() -> None:
    state = {name: torch.full((1 << 20,), n, dtype=torch.int32) for n, name in enumerate("abc")}
    with tr.serve(state, step=1, timeout=60) as endpoint:
        got = tr.pull(endpoint.url, timeout=60, options=tr.options.PullOptions(reshare=True))
        assert got.seed is not None
        got.state["b"][0] = 77  # for itself: what is served stays as it was
        late = tr.pull(got.seed.url, timeout=60)
        assert torch.equal(late.state["b"], state["b"])
        assert "lends no memory" in late.report.instead["mapped"]
        inode = os.fstat(got.seed._arena.fd).st_ino
        got.seed.close()
    assert torch.equal(got.state["a"], state["a"]) and got.state["b"][0] == 77
    assert inode in _mapped_files()
    got.state.clear()
    assert inode not in _mapped_files()


def _mapped_files() -> set[int]:
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {int(line.split()[4]) for line in lines}
