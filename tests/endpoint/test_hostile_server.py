"""Servers that lie, trickle or never stop: a clear error in time, and nothing is written."""

from __future__ import annotations

import itertools
import resource
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
import torch

import torchrelay as tr
from tests.endpoint.conftest import Stage
from tests.endpoint.liars import Between, answering, asked
from tests.support import flat
from torchrelay.sources import connection

_pull = partial(flat.pull, same_host=False)  # over TCP, though this is the same host

STEPS = b'{"steps":[{"step":1,"snapshot":"%s","bytes":10}]}' % (b"0" * 32)
MEMORY = 64 << 20


@pytest.fixture(scope="module")
def stage() -> Iterator[Stage]:
    """Readers that are lied to say nothing at their end: no step is held for them."""
    with tr.serve(
        {"nothing": torch.zeros(1)},
        step=0,
        timeout=60,
        options=tr.options.ServeOptions(hold_seconds=0.001),
    ) as endpoint:
        yield Stage(endpoint)


def _answer(status: str, body: bytes, **headers: str) -> bytes:
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return ("\r\n".join(lines) + "\r\n\r\n").encode() + body


def _steps_then(rest: Callable[[socket.socket, str], None]) -> Callable[[socket.socket], None]:
    """Says that it has a step, and does something else with every other request."""

    def act(line: socket.socket) -> None:
        while True:
            first = asked(line)
            if "/steps.json" in first:
                line.sendall(_answer("200 OK", STEPS))
            else:
                rest(line, first)

    return act


def _says(data: bytes) -> Callable[[socket.socket], None]:
    def act(line: socket.socket) -> None:
        asked(line)
        line.sendall(data)
        asked(line)

    return act


def _forever(first: bytes, parts: Callable[[int], bytes], pause: float = 0.0) -> Any:
    def act(line: socket.socket) -> None:
        asked(line)
        line.sendall(first)
        for number in itertools.count():
            line.sendall(parts(number))
            if pause:
                time.sleep(pause)

    return act


def _refused(url: str, **options: Any) -> tr.errors.RelayError:
    """The error of a pull that must not touch its destination, nor take long or much memory."""
    into = {"w": torch.full((10,), 7.0)}
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    begun = time.monotonic()
    with pytest.raises(tr.errors.RelayError) as caught:
        _pull(url, into=into, **{"timeout": 2, **options})
    assert time.monotonic() - begun < 60
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10 < MEMORY
    assert (into["w"] == 7).all()
    return caught.value


@pytest.mark.parametrize(
    ("act", "text"),
    [
        (_says(b"\0" * 100), ""),
        (_says(b"HTTP/1.1 200 OK\r\n\r\n"), "unknown length"),
        (_says(b"HTTP/1.1 200 OK\r\nContent-Length: -5\r\n\r\n"), ""),
        (_says(b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999999\r\n\r\n"), "at most"),
        (_says(_answer("200 OK", b"not json")), "another way"),
        (_says(_answer("200 OK", b'{"steps":' + b"[" * 100_000)), "another way"),
        (_says(_answer("302 Found", b"", Location="http://127.0.0.1:1/")), "302"),
        (_says(_answer("500 Oh", b"trouble\nmore")), "500: trouble"),
        (_says(_answer("200 OK", b"x" * 100, Content_Encoding="gzip")), "another way"),
        (_forever(b"HTTP/1.1 200 OK\r\n", lambda n: b"X-%d: y\r\n" % n), "headers"),
        (_forever(b"HTTP/1.1 200 OK\r\nX: ", lambda n: b"y" * 1000), "longer than"),
        (_forever(b"HTTP/1.1 200 OK\r\nX: ", lambda n: b"y", 0.05), "too long|gave 0 bytes|took"),
        (_forever(b"", lambda n: b"HTTP/1.1 100 Continue\r\n\r\n", 0.01), "gave 0 bytes|took"),
    ],
    ids=[
        "no HTTP", "no length", "negative length", "huge length", "no JSON", "deep JSON",
        "redirect", "error", "encoded", "endless headers", "endless header", "trickled header",
        "endless continue",
    ],
)  # fmt: skip
def test_answers_that_are_none(act: Callable[[socket.socket], None], text: str) -> None:
    with answering(act) as url:
        fault = _refused(url)
        assert isinstance(
            fault,
            (tr.errors.EndpointError, tr.errors.PeerLostError, tr.errors.TransferTimeoutError),
        )
        import re

        assert url in str(fault) and re.search(text, str(fault)), fault


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 300000000\r\n\r\n", "at most"),
        (_answer("200 OK", b"{}"), "no valid record"),
        (_answer("200 OK", b"[" * 1_000_000), "no valid record"),
        (_answer("404 Not Found", b"gone"), "no step"),
    ],
    ids=["oversized", "empty", "deep", "missing"],
)
def test_records_that_are_none(data: bytes, text: str) -> None:
    with answering(_steps_then(lambda line, first: line.sendall(data))) as url:
        assert text in str(_refused(url))


def _altered(stage: Stage, alter: Callable[[str, bytes], bytes | None], **options: Any) -> str:
    stage.show({"w": torch.ones(10)})
    with Between(stage.url, alter) as between:
        return str(_refused(between.url, **options))


def test_a_record_of_something_else(stage: Stage) -> None:
    """It is whole, and it is not that of the step that was listed."""
    other: list[bytes] = []

    def alter(line: str, body: bytes) -> bytes:
        return other[0] if "/record" in line else body

    with tr.serve({"w": torch.zeros(10)}, step=stage.show({}) + 1, timeout=60) as elsewhere:
        step = tr.pull(elsewhere.url, timeout=60).step  # from here on it is shown
        asking = connection.Host(elsewhere.url)
        other.append(asking.get(f"/record?step={step}", seconds=20).body)
        asking.close()
    assert "something else" in _altered(stage, alter, timeout=30)


def test_a_record_with_a_flipped_byte(stage: Stage) -> None:
    def alter(line: str, body: bytes) -> bytes:
        return body if "/record" not in line else body[:200] + b"7" + body[201:]

    assert "no valid record" in _altered(stage, alter)


def test_a_replayed_range(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes of one range in the place of another have another digest, or are said to be others."""
    stage.show({"w": torch.arange(5_000_000.0)})
    kept: list[bytes] = []

    def alter(line: str, body: bytes) -> bytes:
        if "/volumes/" not in line or len(body) < 16 << 20:
            return body
        kept.append(body)
        return kept[0][: len(body)]

    into = {"w": torch.zeros(5_000_000)}
    with Between(stage.url, alter) as between:
        got = _pull(between.url, into=into, timeout=20)
    assert torch.equal(got.state["w"], torch.arange(5_000_000.0))


class _Liar:
    """Answers ranges of volumes with something else, and everything else truly."""

    def __init__(self, url: str, says: Callable[[int, int], bytes]) -> None:
        self._url, self._says = url, says

    def __call__(self, line: socket.socket) -> None:
        host, port = self._url.removeprefix("http://").split(":")
        while True:
            data = b""
            while b"\r\n\r\n" not in data:
                part = line.recv(4096)
                if not part:
                    return
                data += part
            if b"/volumes/" not in data.split(b"\r\n")[0]:
                with socket.create_connection((host, int(port)), 10) as there:
                    there.sendall(data.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"))
                    while part := there.recv(65536):
                        line.sendall(part)
                return
            wanted = next(x for x in data.split(b"\r\n") if x.lower().startswith(b"range:"))
            low, high = wanted.split(b"=")[1].split(b"-")
            with suppress(OSError):
                line.sendall(self._says(int(low), int(high)))


@pytest.mark.parametrize(
    "says",
    [
        lambda a, b: _answer("206 P", b"x" * (b - a + 1), Content_Range=f"bytes {a + 1}-{b + 1}/9"),
        lambda a, b: _answer("206 P", b"x" * (b - a), Content_Range=f"bytes {a}-{b - 1}/9"),
        lambda a, b: _answer("206 P", b"x" * (b - a + 1)),
        lambda a, b: _answer("206 P", b"x" * (b - a + 1), Content_Range=f"bytes {a}-{b}/9"),
        lambda a, b: _answer("206 P", b"x" * (b - a + 1), Content_Range=f"bytes {a}-{b}/9")[:-2],
        lambda a, b: _answer("200 OK", b"x" * 50),
        lambda a, b: _answer("410 Gone", b"gone"),
    ],
    ids=["shifted", "short range", "no range", "wrong bytes", "cut", "whole", "gone"],
)
def test_lies_about_ranges(
    stage: Stage, says: Callable[[int, int], bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "STALL_SECONDS", 0.5)
    monkeypatch.setattr("torchrelay.sources.remote_step.LAST_TRIES", 2)
    stage.show({"w": torch.ones(10)})
    with answering(_Liar(stage.url, says)) as url:
        fault = _refused(url)
    assert isinstance(
        fault,
        (tr.errors.PeerLostError, tr.errors.StepNotFoundError, tr.errors.TransferTimeoutError),
    )


def test_a_volume_that_trickles(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "STALL_SECONDS", 0.5)
    monkeypatch.setattr("torchrelay.sources.remote_step.LAST_TRIES", 2)
    stage.show({"w": torch.ones(10)})

    def says(low: int, high: int) -> bytes:
        return _answer("206 P", b"x" * (high - low + 1), Content_Range=f"bytes {low}-{high}/9")[:-9]

    with answering(_Liar(stage.url, says)) as url:
        fault = _refused(url, timeout=10)
    assert isinstance(fault, (tr.errors.PeerLostError, tr.errors.TransferTimeoutError))
