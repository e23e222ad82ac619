"""Several endpoints of one step: what one fails to give comes from the others, and is named."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch

import torchrelay as tr
from tests.endpoint.liars import Between
from tests.support import flat
from torchrelay.endpoint.front import Endpoint

_pull = partial(flat.pull, same_host=False)  # over TCP, though this is the same host

ROWS = 24 << 20


def _state() -> dict[str, Any]:
    draw = torch.Generator().manual_seed(3)
    return {"w": torch.randint(0, 255, (ROWS,), generator=draw, dtype=torch.uint8), "n": 3}


@pytest.fixture(scope="module")
def three() -> Iterator[list[Endpoint]]:
    state = _state()
    made = [tr.serve(state, step=5, timeout=30) for _ in range(3)]
    yield made
    for endpoint in made:
        endpoint.close()


def _is(state: dict[str, Any]) -> bool:
    return state["n"] == 3 and torch.equal(state["w"], _state()["w"])


def _flipped(line: str, body: bytes) -> bytes:
    """A byte of a volume is another one."""
    if "/volumes/" not in line or len(body) < 1000:
        return body
    return body[:777] + bytes([body[777] ^ 1]) + body[778:]


def test_chunks_come_from_whoever_is_free(three: list[Endpoint]) -> None:
    got = _pull([one.url for one in three], timeout=30)
    assert _is(got.state)
    assert len(got.report.sources) > 1 and not got.report.failed
    assert sum(got.report.sources.values()) < 1.1 * ROWS


@pytest.mark.parametrize("in_place", [False, True])
def test_one_killed_midway_and_one_with_a_flipped_byte(
    three: list[Endpoint], in_place: bool
) -> None:
    """The server process of the first is killed for real, while it sends."""
    doomed = tr.serve(_state(), step=5, timeout=30)
    pid = doomed._server.process.pid
    assert pid is not None
    hit = threading.Event()

    def kill(line: str, body: bytes) -> bytes | None:
        if "/volumes/" not in line:
            return body
        if not hit.is_set():
            hit.set()
            os.kill(pid, signal.SIGKILL)
        return None  # also of an answer that was on its way: it would count as a comeback

    into = {"w": torch.zeros(ROWS, dtype=torch.uint8), "n": 0} if in_place else None
    with Between(doomed.url, kill) as dying, Between(three[0].url, _flipped) as liar:
        got = _pull([dying.url, liar.url, three[1].url], into=into, timeout=60)
    assert hit.is_set()
    assert _is(got.state)
    assert "wrong digest" in got.report.failed[liar.url]
    assert dying.url in got.report.failed
    assert set(got.report.failed) == {liar.url, dying.url}
    doomed.close()


def test_a_connection_that_breaks_is_resumed_where_it_was(three: list[Endpoint]) -> None:
    """With one endpoint alone: whole chunks that came before are not fetched again."""
    cuts = {"left": 3}

    def cut(line: str, body: bytes) -> bytes | None:
        if "/volumes/" in line and len(body) > 1 << 20 and cuts["left"]:
            cuts["left"] -= 1
            return None
        return body

    with Between(three[0].url, cut) as between:
        got = _pull(between.url, timeout=60)
        assert _is(got.state)
        assert cuts["left"] == 0 and not got.report.failed
        assert got.report.sources == {between.url: sum(got.report.sources.values())}
        wanted = [line for line in between.requests if "/volumes/" in line]
        assert len(wanted) >= 4


def test_a_silent_server_does_not_keep_others_from_the_end(three: list[Endpoint]) -> None:
    """A server that does not hear that a read is over keeps the step, and may skip a publish."""
    over = threading.Event()

    def silent(line: str, body: bytes) -> bytes | None:
        if "/readers/" in line:
            over.wait(60)
            return None
        return body

    with Between(three[0].url, silent) as first:
        got = _pull([first.url, three[1].url], timeout=60)
        readers = three[1].status()["readers"]
        over.set()
    assert _is(got.state) and three[1].url in got.report.sources
    assert readers == 0


def test_all_of_them_lie(three: list[Endpoint]) -> None:
    """Nothing is written, and the error names each with what is wrong with it."""
    into = {"w": torch.zeros(ROWS, dtype=torch.uint8), "n": 0}
    with Between(three[0].url, _flipped) as one, Between(three[1].url, _flipped) as other:
        with pytest.raises(tr.errors.PeerLostError, match="wrong digest") as caught:
            _pull([one.url, other.url], into=into, timeout=30)
        assert one.url in str(caught.value) and other.url in str(caught.value)
    assert not into["w"].any() and into["n"] == 0


def test_without_atomic_the_state_is_torn_and_says_so(three: list[Endpoint]) -> None:
    into = {"w": torch.zeros(ROWS, dtype=torch.uint8), "n": 0}
    with Between(three[0].url, _flipped) as one, pytest.raises(tr.errors.TornStateError):
        _pull(one.url, into=into, atomic=False, timeout=30)


def test_endpoints_of_other_steps_or_bytes_are_left_out(three: list[Endpoint]) -> None:
    other = {**_state(), "n": 4}
    with (
        tr.serve(other, step=5, timeout=30) as elsewhere,
        tr.serve(_state(), step=4, timeout=30) as older,
    ):
        urls = [elsewhere.url, older.url, three[0].url, three[1].url, "http://127.0.0.1:9"]
        got = _pull(urls, timeout=30)
    assert _is(got.state) and got.step == 5
    assert got.report.failed[elsewhere.url] == "has other bytes of step 5"
    assert got.report.failed[older.url] == "has no step 5"
    assert "does not answer" in got.report.failed["http://127.0.0.1:9"]


def test_one_with_a_damaged_record_and_one_that_is_silent_are_left_out(
    three: list[Endpoint],
) -> None:
    with (
        Between(three[1].url, _other_record) as liar,
        socket.create_server(("127.0.0.1", 0)) as nobody,
    ):
        silent = f"http://127.0.0.1:{nobody.getsockname()[1]}"
        got = _pull([liar.url, silent, three[0].url], timeout=5)
    assert _is(got.state) and list(got.report.sources) == [three[0].url]
    assert "no valid record" in got.report.failed[liar.url]
    assert "took too long to answer" in got.report.failed[silent]


def _other_record(line: str, body: bytes) -> bytes:
    return body if "/record" not in line else body[:200] + b"7" + body[201:]


@pytest.mark.parametrize("asked", ["/steps.json", "/record"])
def test_an_answer_that_breaks_off_is_asked_for_again(three: list[Endpoint], asked: str) -> None:
    spoilt: list[str] = []

    def once(line: str, body: bytes) -> bytes | None:
        if asked in line and not spoilt:
            spoilt.append(line)
            return None
        return body

    with Between(three[0].url, once) as between:
        got = _pull(between.url, timeout=30)
    assert spoilt and _is(got.state) and not got.report.failed


def test_a_record_that_was_damaged_on_its_way_is_asked_for_again(
    three: list[Endpoint],
) -> None:
    spoilt: list[str] = []

    def once(line: str, body: bytes) -> bytes:
        if "/record" in line and not spoilt:
            spoilt.append(line)
            return _other_record(line, body)
        return body

    with Between(three[0].url, once) as between:
        got = _pull(between.url, timeout=30)
    assert spoilt and _is(got.state) and not got.report.failed


def test_nobody_is_there() -> None:
    with pytest.raises(tr.errors.PeerLostError, match=r"127.0.0.1:9.*refused"):
        _pull("http://127.0.0.1:9", timeout=5)
    with pytest.raises(tr.errors.UsageError, match="TORCHRELAY_TOKEN"):
        _pull("http://me:secret@127.0.0.1:9", timeout=5)
    for url in ("ftp://127.0.0.1:9", "http://", "http://a/b"):
        with pytest.raises(tr.errors.UsageError):
            _pull(url, timeout=5)
    with pytest.raises(tr.errors.CheckpointError, match="no such directory"):
        _pull("127.0.0.1:9", timeout=5)
