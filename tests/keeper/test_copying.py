"""A copy that a keeper makes of another's memory ends, whatever becomes of that one."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

import torchrelay as tr
from torchrelay.endpoint.server.messages import Show, StepRecord, Volume
from torchrelay.endpoint.server.snapshots import ServedSnapshot, Slot
from torchrelay.keeper.choice import KeeperRing
from torchrelay.keeper.server.replication import CopyThread, WantedCopy
from torchrelay.memory.digest import digest
from torchrelay.memory.sealed import sealed_memory
from torchrelay.sources import remote_step

NBYTES, CHUNK = 1 << 20, 1 << 16
DATA = os.urandom(NBYTES)


class Source(ThreadingHTTPServer):
    """A keeper that sends so many bytes of each range, and then is gone."""

    daemon_threads = True

    def __init__(self, sends: int) -> None:
        super().__init__(("127.0.0.1", 0), _Answer)
        self.sends = sends
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()


class _Answer(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Source

    def do_GET(self) -> None:
        first, last = map(int, self.headers["Range"].removeprefix("bytes=").split("-"))
        self.send_response(206)
        self.send_header("Content-Length", str(last + 1 - first))
        self.send_header("Content-Range", f"bytes {first}-{last}/{NBYTES}")
        self.end_headers()
        self.wfile.write(DATA[first : last + 1][: self.server.sends])
        self.close_connection = True

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_step, "PAUSES", (0.001, 0.001))


@pytest.fixture
def slot() -> Iterator[Slot]:
    made = Slot(sealed_memory(NBYTES), NBYTES)
    yield made
    made.close()


def copy_from(url: str, slot: Slot) -> CopyThread:
    digests = b"".join(digest(DATA[at : at + CHUNK]) for at in range(0, NBYTES, CHUNK))
    volume = Volume("volume", 0, NBYTES, CHUNK, digests)
    shown = Show(1, 1, "snapshot", [volume], StepRecord(b"{}", [volume], 1, [url], [0]))
    step = ServedSnapshot(shown)
    step.add(shown, slot)
    over = threading.Event()
    copy = CopyThread(
        WantedCopy.of(step, [url]),
        1,
        slot,
        None,
        KeeperRing([url], "own"),
        tr.Access(),
        rate=1e12,
        done=lambda _: over.set(),
    )
    copy.start()
    assert over.wait(30), "nobody was told that the copy is over"
    return copy


def test_a_copy(slot: Slot) -> None:
    with Source(NBYTES) as source:
        copy = copy_from(f"http://127.0.0.1:{source.server_port}", slot)
        source.shutdown()
    assert copy.why == "" and copy.fetched == NBYTES
    assert bytes(slot.view) == DATA


@pytest.mark.parametrize("sends", [0, CHUNK // 2, CHUNK - 1])
def test_a_source_that_breaks_off(quick: None, slot: Slot, sends: int) -> None:
    with Source(sends) as source:
        copy = copy_from(f"http://127.0.0.1:{source.server_port}", slot)
        source.shutdown()
    assert "cannot be read further" in copy.why


def test_a_source_that_is_gone(quick: None, slot: Slot) -> None:
    with Source(0) as source:
        url = f"http://127.0.0.1:{source.server_port}"
        source.shutdown()
    assert "cannot be read further" in copy_from(url, slot).why


def test_a_fault_that_nobody_thought_of(slot: Slot, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CopyThread, "_unchanged", lambda *_: 1 / 0)
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    assert "ZeroDivisionError" in copy_from("http://127.0.0.1:9", slot).why
