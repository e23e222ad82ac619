"""Clients of all kinds, for a soak of the servers: honest, slow, lying, malformed.

Each is a function that is called again and again until the time is over; what it raises is counted.
Dishonest ones are content with any end.
"""

from __future__ import annotations

import json
import random
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import torch

import torchrelay as tr
from torchrelay.sources.connection import Host

PATIENCE = 30.0


class Target(NamedTuple):
    """A server, its token, and one of its steps."""

    url: str
    token: str
    step: int
    snapshot: str
    volume: str
    nbytes: int


class Tally:
    """How often each kind was served, and how it failed."""

    def __init__(self) -> None:
        self.served: Counter[str] = Counter()
        self.failed: Counter[str] = Counter()
        self.slowest = 0.0
        self._lock = threading.Lock()

    def note(self, kind: str, seconds: float, fault: BaseException | None) -> None:
        with self._lock:
            if fault is None:
                self.served[kind] += 1
                self.slowest = max(self.slowest, seconds)
            else:
                self.failed[f"{kind}: {type(fault).__name__}: {fault}"[:200]] += 1


def connect(target: Target) -> socket.socket:
    place = urlsplit(target.url)
    return socket.create_connection((place.hostname or "", place.port or 0), timeout=PATIENCE)


def head(target: Target, path: str, *more: str, token: str | None = None) -> bytes:
    lines = [f"GET {path} HTTP/1.1", "Host: 127.0.0.1"]
    lines += [f"Authorization: Bearer {token or target.token}", *more, "", ""]
    return "\r\n".join(lines).encode()


# Honest ones: each of their calls has to be served.


def honest_pull(target: Target, draw: random.Random) -> None:
    access = tr.Access(token=target.token)
    got = tr.pull(
        target.url,
        access=access,
        no_dist=True,
        timeout=PATIENCE,
        options=tr.options.PullOptions(same_host=False),
    )
    assert torch.equal(got.state["w"], torch.arange(len(got.state["w"]), dtype=torch.float32))


def honest_mapped(target: Target, draw: random.Random) -> None:
    got = tr.pull(target.url, access=tr.Access(token=target.token), no_dist=True, timeout=PATIENCE)
    assert len(got.state["w"])


def honest_range(target: Target, draw: random.Random) -> None:
    """A small range of a volume, as a reader of ranges asks for it."""
    host = Host(target.url, token=target.token)
    try:
        start = draw.randrange(target.nbytes - 1000)
        view = memoryview(bytearray(1000))
        path = f"/volumes/{target.snapshot}/{target.volume}"
        assert sum(map(len, host.read(path, start, [view], seconds=PATIENCE))) == 1000
        assert host.get("/steps.json", seconds=PATIENCE).status == 200
    finally:
        host.close()


# Dishonest ones.


def silent(target: Target, draw: random.Random) -> None:
    with connect(target) as line:
        line.settimeout(3.0)
        line.recv(1)


def trickled(target: Target, draw: random.Random) -> None:
    """A request that never ends, a byte at a time."""
    with connect(target) as line:
        for byte in head(target, "/record?step=" + "1" * 3000)[:-2]:
            line.sendall(bytes([byte]))
            time.sleep(0.05)


def slow(target: Target, draw: random.Random) -> None:
    """A reader with the token that takes a few bytes of a whole step, now and then."""
    with connect(target) as line:
        line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        line.sendall(head(target, f"/volumes/{target.snapshot}/{target.volume}"))
        while line.recv(200):
            time.sleep(0.5)


def stuck(target: Target, draw: random.Random) -> None:
    """A reader with the token that asks for everything and takes nothing."""
    with connect(target) as line:
        line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        line.sendall(head(target, f"/volumes/{target.snapshot}/{target.volume}"))
        time.sleep(4.0)


def malformed(target: Target, draw: random.Random) -> None:
    shouts = [
        draw.randbytes(3000),
        b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 1000 + b"\r\n",
        b"GET /" + b"a" * 30_000 + b" HTTP/1.1\r\n\r\n",
        b"POST /seeds HTTP/1.1\r\nContent-Length: 99999999999999999999\r\n\r\n",
        b"POST /readers/x HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n",
        head(target, "/record", token="wrong"),
        head(target, "/%00%ff", "Range: bytes=9-1,5-"),
        head(target, f"/volumes/{target.snapshot}/{target.volume}", "Range: bytes=99999999999999-"),
        head(target, "/record", "Torchrelay-Reader: \x7f"),
    ]
    with connect(target) as line:
        line.settimeout(3.0)
        line.sendall(draw.choice(shouts))
        while line.recv(65536):
            pass


def lying(target: Target, draw: random.Random) -> None:
    """A seed that is not there, and readers that report nonsense, with the token."""
    host = Host(target.url, token=target.token, reader=draw.randbytes(16).hex())
    try:
        port = draw.randrange(1, 65536)
        said: list[tuple[str, Any]] = [
            ("/seeds", {"url": f"http://127.0.0.1:{port}", "snapshot": target.snapshot}),
            ("/seeds", {"url": "http://127.0.0.1:99999", "snapshot": target.snapshot}),
            ("/seeds", {"url": "x" * 3000, "snapshot": "y"}),
            ("/readers/" + "a" * 32, {"outcome": "done", "bytes": 1 << 61}),
            ("/readers/" + "a" * 32, {"outcome": "done", "bytes": -5}),
        ]
        path, body = draw.choice(said)
        host.post(path, json.dumps(body).encode(), seconds=5.0)
        host.get(f"/record?step={target.step}", seconds=5.0, limit=1 << 24)
    finally:
        host.close()
    time.sleep(0.5)


KINDS: dict[str, tuple[Callable[[Target, random.Random], None], int, float]] = {
    # how many of a thousand, and the seconds between two calls of one
    "honest_pull": (honest_pull, 12, 1.0),
    "honest_mapped": (honest_mapped, 8, 1.0),
    "honest_range": (honest_range, 180, 2.0),
    "silent": (silent, 200, 0.5),
    "trickled": (trickled, 100, 0.5),
    "slow": (slow, 120, 0.5),
    "stuck": (stuck, 80, 0.5),
    "malformed": (malformed, 200, 1.0),
    "lying": (lying, 100, 1.0),
}


def run_clients(kinds: dict[str, int], targets: list[Target], seconds: float, seed: int) -> Tally:
    """Run so many clients of each kind, each on a thread; whatever is not honest may fail."""
    tally = Tally()
    end = time.monotonic() + seconds

    def run(kind: str, number: int) -> None:
        act, _, pause = KINDS[kind]
        draw = random.Random(f"{seed} {kind} {number}")
        target = targets[number % len(targets)]
        time.sleep(draw.random() * pause)
        while time.monotonic() < end:
            begun = time.monotonic()
            if kind.startswith("honest"):
                fault: BaseException | None = None
                try:
                    act(target, draw)
                except BaseException as found:
                    fault = found
                tally.note(kind, time.monotonic() - begun, fault)
            else:
                with suppress(Exception):
                    act(target, draw)
                tally.note(kind, 0.0, None)
            time.sleep(pause * (0.5 + draw.random()))

    threads = [
        threading.Thread(target=run, args=(kind, number), daemon=True)
        for kind, count in kinds.items()
        for number in range(count)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, end + 2 * PATIENCE - time.monotonic()))
    return tally
