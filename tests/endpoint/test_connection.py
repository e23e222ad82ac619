"""Bodies of an answer, however they are cut into packets: every byte comes, and none is waited for
in vain."""

from __future__ import annotations

import random
import re
import socket
import threading
from collections.abc import Iterator

import pytest

from torchrelay.sources import connection
from torchrelay.sources.connection import HEAD_BYTES, READ_BYTES, WAKE_BYTES, Host

DATA = random.Random(7).randbytes(3 * READ_BYTES)
SIZES = [
    1,
    HEAD_BYTES,
    WAKE_BYTES - 1,
    WAKE_BYTES,
    WAKE_BYTES + 1,
    READ_BYTES - 1,
    READ_BYTES + 1,
    READ_BYTES + WAKE_BYTES,
    2 * READ_BYTES + WAKE_BYTES - 1,
    3 * READ_BYTES,
]


def _serve(listener: socket.socket) -> None:
    """Answers ranges of DATA; headers, and bodies in bits, each packet by itself."""
    line, _ = listener.accept()
    with line:
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        heard = b""
        while True:
            while b"\r\n\r\n" not in heard:
                some = line.recv(4096)
                if not some:
                    return
                heard += some
            found = re.search(rb"bytes=(\d+)-(\d+)", heard)
            assert found is not None
            start, stop = int(found[1]), int(found[2]) + 1
            heard = b""
            head = f"Content-Range: bytes {start}-{stop - 1}/{len(DATA)}\r\n"
            head += f"Content-Length: {stop - start}\r\n\r\n"
            line.sendall(f"HTTP/1.1 206 Partial Content\r\n{head}".encode())
            bit = max(1, (stop - start) // 97)
            for at in range(start, stop, bit):
                line.sendall(DATA[at : min(at + bit, stop)])


@pytest.fixture
def host() -> Iterator[Host]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=_serve, args=(listener,), daemon=True)
        thread.start()
        made = Host(f"http://127.0.0.1:{listener.getsockname()[1]}")
        yield made
        made.close()
        thread.join(30)
        assert not thread.is_alive()


def test_bodies_of_all_sizes_over_one_connection(host: Host) -> None:
    for size in [*SIZES, *reversed(SIZES)]:
        room = bytearray(size)
        cut = size // 3
        views = [memoryview(room)[:cut], memoryview(room)[cut:]] if cut else [memoryview(room)]
        assert sum(map(len, host.read("/", 5 if size < 100 else 0, views, seconds=60))) == size
        assert room == DATA[5 : 5 + size] if size < 100 else room == DATA[:size]
    assert len(host._idle) == 1  # it was the same one all the time


def test_a_body_that_stops_in_the_middle_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever waits for many bytes is woken by the end of its time too."""
    monkeypatch.setattr(connection, "STALL_SECONDS", 0.5)
    monkeypatch.setattr(connection, "SLOW_RATE", 1 << 40)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        mute = Host(f"http://127.0.0.1:{listener.getsockname()[1]}")

        def half() -> None:
            line, _ = listener.accept()
            line.recv(4096)
            head = f"Content-Range: bytes 0-{len(DATA) - 1}/{len(DATA)}\r\n"
            head += f"Content-Length: {len(DATA)}\r\n\r\n"
            line.sendall(f"HTTP/1.1 206 Partial Content\r\n{head}".encode() + DATA[:100_000])
            line.recv(1)  # until the other end has had enough
            line.close()

        thread = threading.Thread(target=half, daemon=True)
        thread.start()
        with pytest.raises(TimeoutError, match="took too long"):
            list(mute.read("/", 0, [memoryview(bytearray(len(DATA)))], seconds=60))
        mute.close()
        thread.join(30)
        assert not thread.is_alive()
