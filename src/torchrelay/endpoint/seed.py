"""A puller that serves what it has while the rest is still arriving."""

from __future__ import annotations

import ctypes
import http.client
import os
import threading
from collections.abc import Sequence
from contextlib import suppress

import msgspec

from torchrelay.endpoint.process import ServerProcess
from torchrelay.endpoint.security import Address, check_listening
from torchrelay.endpoint.server import messages as m
from torchrelay.errors import EndpointError
from torchrelay.memory.arena import Arena
from torchrelay.sources.connection import Host
from torchrelay.sources.mapped_step import VolumePlace
from torchrelay.stores.records import DataFile
from torchrelay.stores.writer.ranges import host_view
from torchrelay.version import __version__

PAGE = 4096
ANNOUNCE_SECONDS = 3.0
_SECONDS = 60.0


class Seed:
    """The volumes of a step in memory, served by a process beside this one until `close`.

    Behind the volumes there is a byte for each chunk: the server process sends chunks whose byte
    is set, and no others.
    """

    def __init__(self, host: str, token: str | None, files: Sequence[DataFile]) -> None:
        check_listening(Address(host, 0), token)
        self._closed = threading.Event()
        self._starts: dict[str, int] = {}
        self._files = list(files)
        end = 0
        for file in files:
            self._starts[file.name] = end
            end += -(-file.nbytes // PAGE) * PAGE
        self._marks = end
        chunks = sum(-(-file.nbytes // file.chunk_bytes) for file in files)
        self._arena = Arena(max(PAGE, end + chunks))
        ctypes.memset(self._arena.address + end, 0, chunks)
        listen = m.Listen(host, 0, token, None, None, 60.0, 256, 10.0, __version__)
        self._server = ServerProcess(listen)
        try:
            self._server.start()
        except BaseException:
            self._arena.close()
            raise
        shown = f"[{host}]" if ":" in host else host
        self.url = f"http://{shown}:{self._server.port}"

    def show(self, step: int, snapshot: str, record: bytes) -> None:
        """Serve what is here of a step, from now on."""
        self._server.attach(0, self._arena.fd, self._arena.nbytes, _SECONDS)
        volumes = [
            m.Volume(f.name, self._starts[f.name], f.nbytes, f.chunk_bytes, f.digests)
            for f in self._files
        ]
        places = [0] * len(volumes)
        shown = m.Show(0, step, snapshot, record, volumes, places=places, marks=self._marks)
        self._server.ask(shown, m.Obeyed, _SECONDS)

    def view(self, name: str, start: int, stop: int) -> memoryview:
        return host_view(self._arena.address + self._starts[name] + start, stop - start)

    def mark(self, first: int, count: int) -> None:
        ctypes.memset(self._arena.address + self._marks + first, 1, count)

    def place(self, name: str, nbytes: int) -> VolumePlace:
        """Where a volume lies, to be read like memory that was lent."""
        return VolumePlace(_OwnMemory(self._arena.fd), self._starts[name], nbytes)

    def announce(self, origin: Host, snapshot: str) -> None:
        """Have an endpoint name this seed to others, until it is closed."""
        word = msgspec.json.encode({"url": self.url, "snapshot": snapshot})

        def run() -> None:
            while not self._closed.wait(ANNOUNCE_SECONDS):
                with suppress(OSError, http.client.HTTPException, EndpointError):
                    if origin.post("/seeds", word, seconds=5.0).status == 410:
                        break
            origin.close()

        threading.Thread(target=run, name="torchrelay-seed", daemon=True).start()

    def close(self) -> None:
        """Stop serving, and free the memory."""
        self._closed.set()
        self._server.close()
        self._arena.close()

    def __enter__(self) -> Seed:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _OwnMemory:
    """A descriptor of this process's own arena."""

    def __init__(self, fd: int) -> None:
        self.fd = os.dup(fd)

    def close(self) -> None:
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)
