"""A puller that serves what it has while the rest is still arriving."""

from __future__ import annotations

import http.client
import mmap
import os
import ssl
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import msgspec

from torchrelay.endpoint.security import Address, check_listening
from torchrelay.endpoint.seed_server import SeededStep, SeedServer
from torchrelay.errors import EndpointError
from torchrelay.memory.arena import Arena
from torchrelay.memory.kept_ranges import KeptRanges
from torchrelay.memory.pages import PAGE, paged
from torchrelay.owner import Owner
from torchrelay.record.checkpoint.schema import DataFile
from torchrelay.sources.connection import Host
from torchrelay.sources.mapped_step import MappedStep, VolumePlace
from torchrelay.sources.swarm import Arrivals

ANNOUNCE_SECONDS = 3.0


class _Waiting(NamedTuple):
    """Somebody who waits for chunks [first, last)."""

    first: int
    last: int
    over: threading.Event


class Seed:
    """The volumes of a step in memory, served by threads of this process until `close`.

    Behind the volumes there is a byte for each chunk: chunks whose byte is set are sent, and no
    others.
    """

    def __init__(
        self,
        host: str,
        token: str | None,
        files: Sequence[DataFile],
        context: ssl.SSLContext | None = None,
    ) -> None:
        check_listening(Address(host, 0), token)
        self._owner = Owner("Seed")
        self._closed = threading.Event()
        self._files = {file.name: file for file in files}
        self._starts: dict[str, int] = {}
        self._firsts: dict[str, int] = {}  # the mark of a volume's first chunk
        end = chunks = 0
        for file in files:
            self._starts[file.name], self._firsts[file.name] = end, chunks
            end += paged(file.nbytes)
            chunks += -(-file.nbytes // file.chunk_bytes)
        self._marks = bytearray(chunks)
        self._lock = threading.Lock()
        self._waiting: list[_Waiting] = []
        self._swarm: Arrivals | None = None  # that brings the rest
        self._arena = Arena(max(PAGE, end), populate=False)
        # Views of it keep it: what is on its way when the seed is closed has where to go.
        memory: Any = self._arena.tensor.numpy()
        self._memory = memoryview(memory)
        self._kept = KeptRanges(self._arena.fd, self._arena.nbytes)
        self._where = host, token, context
        self._server: SeedServer | None = None

    def show(self, step: int, snapshot: str, record: bytes) -> None:
        """Serve what is here of a step, from now on."""
        host, token, context = self._where
        shown = SeededStep(step, snapshot, record, list(self._files.values()))
        self._server = SeedServer(host, token, self, shown, context)

    @property
    def url(self) -> str:
        """Where it serves, once it does."""
        return "" if self._server is None else self._server.url

    @property
    def fd(self) -> int:
        return self._arena.fd

    def start_of(self, name: str) -> int:
        return self._starts[name]

    def view(self, name: str, start: int, stop: int) -> memoryview:
        at = self._starts[name]
        return self._memory[at + start : at + stop]

    def space(self, name: str, start: int, stop: int) -> memoryview:
        """The same, for bytes that arrive; `MemoryError` where the system has no more memory."""
        if start < stop:
            self._arena.reserve(self._starts[name] + start, stop - start)
        return self.view(name, start, stop)

    def mark(self, first: int, count: int) -> None:
        with self._lock:
            self._marks[first : first + count] = b"\1" * count
            waiting = [one for one in self._waiting if all(self._marks[one.first : one.last])]
        for one in waiting:  # and nobody else: many wait for other chunks
            one.over.set()

    def follow(self, swarm: Arrivals) -> None:
        """Have what is asked for here come by a swarm, and tell it who asks."""
        self._swarm = swarm

    def meet(self, url: str) -> list[str]:
        """Another one fetches this step; who else is known to."""
        return [] if self._swarm is None else self._swarm.meet(url)

    def marks(self) -> bytes:
        return bytes(self._marks)

    def wait(self, name: str, start: int, stop: int, seconds: float) -> bool:
        """Whether every chunk of a range is here, after so long at most where it is on its way."""
        size, first = self._files[name].chunk_bytes, self._firsts[name]
        low, high = first + start // size, first - (-stop // size)
        with self._lock:
            if all(self._marks[low:high]):
                return True
            waiting = _Waiting(low, high, threading.Event())
            self._waiting.append(waiting)
        try:
            if self._swarm is not None and not self._closed.is_set() and self._swarm.awaits(low):
                waiting.over.wait(seconds)
        finally:
            with self._lock:
                self._waiting.remove(waiting)
        return all(self._marks[low:high])

    def lend(self, name: str, start: int, nbytes: int) -> memoryview:
        """Bytes of a volume, for a tensor that may write to them: what others read stays."""
        at = self._starts[name] + start
        first, last = at // PAGE * PAGE, at + nbytes
        private = mmap.mmap(
            self._arena.fd,
            last - first,
            flags=mmap.MAP_PRIVATE,
            prot=mmap.PROT_READ | mmap.PROT_WRITE,
            offset=first,
        )
        self._kept.add(private, first, last)
        return memoryview(private)[at - first :]

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
        if self._closed.is_set() or not self._owner.here:
            return
        self._closed.set()
        with self._lock:
            for one in self._waiting:
                one.over.set()
        self._memory = memoryview(b"")
        if self._server is None or self._server.close():
            self._kept.shrink()
            self._arena.close()

    def __enter__(self) -> Seed:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class SeededFiles(MappedStep):
    """A step that a seed has whole. New tensors keep its memory, and have it for themselves from
    the first time that they are written to."""

    def __init__(self, seed: Seed, url: str, record: bytes, files: Sequence[DataFile]) -> None:
        places = {file.name: seed.place(file.name, file.nbytes) for file in files}
        super().__init__(url, record, places, trusted=True)
        self._seed = seed

    def lend(self, name: str, start: int, nbytes: int) -> memoryview:
        return self._seed.lend(name, start, nbytes)


class _OwnMemory:
    """A descriptor of this process's own arena."""

    def __init__(self, fd: int) -> None:
        self.fd = os.dup(fd)

    def close(self) -> None:
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)
