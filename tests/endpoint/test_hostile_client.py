"""Clients that stall, flood or guess: the endpoint continues, and so does the trainer."""

from __future__ import annotations

import http.client
import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import torch

import torchrelay as tr
from tests.support import flat
from tests.support.access import access
from tests.support.certificates import certificate
from torchrelay.endpoint.front import Endpoint

_pull = partial(flat.pull, same_host=False)  # over TCP, though this is the same host

TOKEN = "correct-horse-battery-staple"
STALL = 1.0
STATE = {"w": torch.arange(16_000_000.0)}


@pytest.fixture(scope="module")
def endpoint() -> Iterator[Endpoint]:
    options = {"stall_seconds": STALL, "hold_seconds": 2.0, "connections": 12, "timeout": 60}
    with flat.serve(STATE, step=1, **access(token=TOKEN), **options) as made:  # type: ignore[arg-type]
        end = time.monotonic() + 60
        while made.status()["step"] is None:  # it is staged, and shown a moment later
            assert time.monotonic() < end
            time.sleep(0.01)
        yield made


def _connect(endpoint: Endpoint) -> socket.socket:
    place = urlsplit(endpoint.url)
    return socket.create_connection((place.hostname or "", place.port or 0), timeout=30)


def _ask(endpoint: Endpoint, path: str, **headers: str) -> tuple[int, bytes]:
    line = http.client.HTTPConnection(endpoint.url.removeprefix("http://"), timeout=30)
    try:
        line.request("GET", path, headers=headers)
        answer = line.getresponse()
        return answer.status, answer.read()
    finally:
        line.close()


def _is_closed(line: socket.socket) -> bool:
    """Whether the other end closes a connection, in the time that it may take."""
    line.settimeout(20)
    try:
        while line.recv(1 << 20):
            pass
    except ConnectionError:
        pass
    except TimeoutError:
        return False
    return True


@pytest.mark.parametrize(
    "path",
    ["/record", "/steps.json", "/status.json", "/metrics", "/model.safetensors", "/x"],
)
def test_nothing_is_told_without_the_token(endpoint: Endpoint, path: str) -> None:
    for given in (
        {},
        {"Authorization": "Bearer wrong"},
        {"Authorization": f"Basic {TOKEN}"},
        {"Authorization": f"Bearer {TOKEN}x"},
        {"Authorization": "Bearer"},
        {"Authorization": "Bearer \u00e9".encode("latin-1").decode("latin-1")},
    ):
        status, text = _ask(endpoint, path, **given)
        assert status == 401
        assert TOKEN.encode() not in text and b"step" not in text
    assert _ask(endpoint, f"{path}?token={TOKEN}")[0] == 401
    assert _ask(endpoint, "/healthz") == (200, b"ok\n")


def test_the_token_is_nowhere_to_be_seen(endpoint: Endpoint) -> None:
    pid = endpoint._server.process.pid
    for name in ("cmdline", "environ"):
        assert TOKEN.encode() not in Path(f"/proc/{pid}/{name}").read_bytes()
    assert TOKEN not in repr(endpoint.status())
    assert TOKEN not in endpoint.url
    with pytest.raises(tr.errors.EndpointError, match="does not take this token") as caught:
        _pull(endpoint.url, timeout=30, **access(token="another-" + TOKEN))
    assert TOKEN not in str(caught.value)


def test_the_token_by_argument_file_and_environment(
    endpoint: Endpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert _pull(endpoint.url, timeout=60, **access(token=TOKEN)).step == 1
    file = tmp_path / "token"
    file.write_text(TOKEN + "\n")
    file.chmod(0o644)
    with pytest.raises(tr.errors.UsageError, match="chmod 600"):
        _pull(endpoint.url, **access(token_file=file))
    file.chmod(0o600)
    assert _pull(endpoint.url, timeout=60, **access(token_file=file)).step == 1
    monkeypatch.setenv("TORCHRELAY_TOKEN", TOKEN)
    assert _pull(endpoint.url, timeout=60).step == 1
    with pytest.raises(tr.errors.UsageError, match="not both"):
        _pull(endpoint.url, **access(token=TOKEN, token_file=file))
    for bad in ("", "a b", "caf\u00e9", "x" * 2000):
        with pytest.raises(tr.errors.UsageError):
            _pull(endpoint.url, **access(token=bad))


def test_strangers_are_kept_out_before_anything_listens(tmp_path: Path) -> None:
    state = {"w": torch.zeros(1)}
    for address in ("0.0.0.0:0", "[::]:0", "10.1.2.3:0", "example.org:80"):
        with pytest.raises(tr.errors.UsageError, match="give a token"):
            tr.serve(state, step=1, address=address)
    with pytest.raises(tr.errors.UsageError, match="can be guessed"):
        flat.serve(state, step=1, address="0.0.0.0:0", **access(token="short"))
    for address in ("127.0.0.1", "127.0.0.1:x", ":80", "127.0.0.1:70000"):
        with pytest.raises(tr.errors.UsageError, match="HOST:PORT"):
            tr.serve(state, step=1, address=address)
    with pytest.raises(tr.errors.UsageError, match="no file"):
        flat.serve(state, step=1, **access(certfile=str(tmp_path / "none.pem")))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        place = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(tr.errors.EndpointError, match="in use"):
            tr.serve(state, step=1, address=place, timeout=60)


def test_without_a_token_other_users_and_strange_names_are_kept_out(tmp_path: Path) -> None:
    with tr.serve({"w": torch.ones(3)}, step=1, timeout=60) as open_one:
        assert _pull(open_one.url, timeout=60).step == 1
        assert _ask(open_one, "/steps.json", Host="evil.example:80")[0] == 401
        assert _ask(open_one, "/steps.json", Host="localhost")[0] == 200
        if os.getuid() != 0:
            pytest.skip("only root can ask as another user")
        curl = ["curl", "-s", "-o", os.devnull, "-w", "%{http_code}", f"{open_one.url}/steps.json"]
        ours = subprocess.run(curl, capture_output=True, text=True, timeout=60)
        theirs = subprocess.run(curl, capture_output=True, text=True, timeout=60, user=65534)
        assert (ours.stdout, theirs.stdout) == ("200", "401")


@pytest.mark.parametrize(
    "shout",
    [
        b"GET /" + b"a" * 20_000 + b" HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nX: " + b"a" * 20_000 + b"\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 5_000 + b"\r\n",
        b"\0" * 5_000,
        b"GET / HTTP/9.9\r\n\r\n",
        b"POST /readers/aaaaaaaaaaaaaaaa HTTP/1.1\r\nContent-Length: 99999999999\r\n\r\n",
    ],
    ids=["long line", "long header", "many headers", "no HTTP", "version", "long body"],
)
def test_requests_out_of_bounds(endpoint: Endpoint, shout: bytes) -> None:
    with _connect(endpoint) as line:
        try:
            line.sendall(shout)
            answer = line.recv(4096)
        except ConnectionError:
            answer = b""
    assert not answer or re.match(rb"HTTP/1.[01] (4\d\d|505)", answer)
    assert _ask(endpoint, "/healthz")[0] == 200


def test_a_request_that_never_ends_is_cut(endpoint: Endpoint) -> None:
    lines = [_connect(endpoint) for _ in range(3)]
    lines[1].sendall(b"GET /healthz HTTP/1.1\r\nX-a: ")
    lines[2].sendall(b"G")
    assert all(map(_is_closed, lines))
    for line in lines:
        line.close()


def test_too_many_connections_are_turned_away_and_others_served_after(
    endpoint: Endpoint,
) -> None:
    deadline = time.monotonic() + 20
    with ExitStack() as lines:
        had = 0
        while had < 12:
            try:
                lines.enter_context(_connect(endpoint))
                had += 1
            except ConnectionError:  # one that an earlier test has left still counts
                assert time.monotonic() < deadline
        with suppress(ConnectionError):  # it may be turned away before it knows of its connection
            assert _is_closed(lines.enter_context(_connect(endpoint)))
    deadline = time.monotonic() + 20
    while True:
        try:
            assert _ask(endpoint, "/healthz")[0] == 200
            break
        except ConnectionError:
            assert time.monotonic() < deadline


def test_a_stalled_reader_never_blocks_a_publish_and_is_dropped(endpoint: Endpoint) -> None:
    """It takes some bytes of the newest step and then none. Two publishes later its step is gone
    and it was cut off; the trainer never waited for it."""
    step = endpoint.status()["step"]
    with _connect(endpoint) as stalled:
        stalled.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        head = (
            f"GET /model.safetensors HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\n\r\n"
        )
        stalled.sendall(head.encode())
        assert stalled.recv(1000).startswith(b"HTTP/1.1 200")
        shown = []
        deadline = time.monotonic() + 60
        while len(shown) < 3:
            step += 1
            begun = time.monotonic()
            published = endpoint.publish(STATE, step=step)
            assert time.monotonic() - begun < 20
            published.result(60)
            shown += [step] if published.skipped is None else []
            assert time.monotonic() < deadline
        assert _is_closed(stalled)
    reasons = [one["reason"] for one in endpoint.status()["finished"]]
    assert any("took no bytes" in reason or "was replaced" in reason for reason in reasons), reasons
    assert torch.equal(
        _pull(endpoint.url, timeout=60, **access(token=TOKEN)).state["w"], STATE["w"]
    )


def test_volumes_go_to_others_while_some_readers_take_little_or_nothing(
    endpoint: Endpoint,
) -> None:
    """Each volume is sent by a thread of its own, which ends with a reader that is too slow."""
    bearer = {"Authorization": f"Bearer {TOKEN}"}
    steps = json.loads(_ask(endpoint, "/steps.json", **bearer)[1])["steps"]
    step, snapshot, name = steps[-1]["step"], steps[-1]["snapshot"], steps[-1]["here"][0]
    slow = [_connect(endpoint) for _ in range(4)]
    for line in slow:
        line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        head = f"GET /volumes/{snapshot}/{name} HTTP/1.1\r\nHost: x\r\n"
        line.sendall(f"{head}Authorization: Bearer {TOKEN}\r\n\r\n".encode())
        assert line.recv(500).startswith(b"HTTP/1.1 200")
    got = _pull(endpoint.url, step=step, timeout=60, **access(token=TOKEN))
    assert torch.equal(got.state["w"], STATE["w"])
    end = time.monotonic() + 30
    slow[0].settimeout(20)
    with suppress(ConnectionError):
        while slow[0].recv(1000):  # it takes bytes all the time, and is too slow
            assert time.monotonic() < end
            time.sleep(0.05)
    assert all(map(_is_closed, slow[1:]))
    for line in slow:
        line.close()
    reasons = [one["reason"] for one in endpoint.status()["finished"]]
    assert sum("took no bytes" in reason for reason in reasons) >= 4, reasons


def test_tls_is_verified_by_the_reader(tmp_path: Path) -> None:
    key, cert = certificate(tmp_path)
    state = {"w": torch.arange(5_000_000.0)}
    options = {**access(certfile=cert, keyfile=key, token=TOKEN), "timeout": 60}
    with flat.serve(state, step=3, **options) as endpoint:  # type: ignore[arg-type]
        assert endpoint.url.startswith("https://")
        got = _pull(endpoint.url, timeout=60, **access(token=TOKEN, cafile=cert))
        assert torch.equal(got.state["w"], state["w"])
        with pytest.raises(tr.errors.EndpointError, match="certificate"):
            _pull(endpoint.url, timeout=30, **access(token=TOKEN))
        with pytest.raises(tr.errors.UsageError, match="certfile"):
            _pull(endpoint.url, reshare=True, **access(token=TOKEN, cafile=cert))
        own = {**access(certfile=cert, keyfile=key, cafile=cert, token=TOKEN), "timeout": 60}
        seeds = [_pull(endpoint.url, reshare=True, **own).seed for _ in range(2)]
        for seed in seeds:
            assert seed is not None and seed.url.startswith("https://")
        late = _pull(seeds[1].url, timeout=60, **access(token=TOKEN, cafile=cert))  # type: ignore[union-attr]
        assert torch.equal(late.state["w"], state["w"])
        for seed in seeds:
            seed.close()  # type: ignore[union-attr]
        plain = endpoint.url.replace("https", "http")
        with pytest.raises(tr.errors.RelayError):
            _pull(plain, timeout=5, **access(token=TOKEN))
        file = tmp_path / "model.safetensors"
        curl = [
            "curl",
            "-sSf",
            "--cacert",
            cert,
            "-H",
            f"Authorization: Bearer {TOKEN}",
            "-o",
            file,
        ]
        subprocess.run([*curl, f"{endpoint.url}/model.safetensors"], check=True, timeout=60)
        assert file.stat().st_size > 20_000_000


def test_tls_errors_say_what_to_change(tmp_path: Path) -> None:
    key, cert = certificate(tmp_path)
    options = {**access(certfile=cert, keyfile=key, token=TOKEN), "timeout": 60}
    state = {"w": torch.ones(3)}
    with flat.serve(state, step=1, address="127.0.0.2:0", **options) as endpoint:  # type: ignore[arg-type]
        with pytest.raises(tr.errors.EndpointError, match="address that the certificate names"):
            _pull(endpoint.url, timeout=30, **access(token=TOKEN, cafile=cert))
        with pytest.raises(tr.errors.EndpointError, match="give Access\\(cafile=\\)"):
            _pull(endpoint.url, timeout=30, **access(token=TOKEN))
        with pytest.raises(tr.errors.PeerLostError, match="is it https://"):
            _pull(endpoint.url.replace("https", "http"), timeout=5, **access(token=TOKEN))
    with (
        flat.serve(state, step=1, timeout=60, **access(token=TOKEN)) as endpoint,
        pytest.raises(tr.errors.EndpointError, match="does not speak TLS"),
    ):
        _pull(endpoint.url.replace("http", "https"), timeout=30, **access(token=TOKEN))


def test_the_server_process_has_no_torch_and_ends_with_the_trainer(tmp_path: Path) -> None:
    program = tmp_path / "trainer.py"
    program.write_text(
        "import os, torch, torchrelay as tr\n"
        "endpoint = tr.serve({'w': torch.ones(4)}, step=1, timeout=60)\n"
        "print(endpoint._server.process.pid, flush=True)\n"
        "input()\n"
        "os._exit(9)\n"
    )
    trainer = subprocess.Popen(
        [sys.executable, program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert trainer.stdout is not None and trainer.stdin is not None
    pid = int(trainer.stdout.readline())
    maps = Path(f"/proc/{pid}/maps").read_text()
    assert "libtorch" not in maps and "python" in maps
    trainer.stdin.write("\n")
    trainer.stdin.flush()
    assert trainer.wait(60) == 9
    deadline = time.monotonic() + 30
    while Path(f"/proc/{pid}").exists() and "State:\tZ" not in _state_of(pid):
        assert time.monotonic() < deadline, "the server process stays"


def _state_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return "State:\tZ"
