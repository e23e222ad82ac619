"""Chunks to one receiver, over its data connections: each takes the next one.

The sender of a state feeds receivers by it, and a receiver feeds the next one in a chain.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Protocol

import torch

from torchrelay.memory import threads
from torchrelay.transports.streams.sockets import DataSocket

LANES = 16  # data connections of one transfer, at most


class LentChunk(NamedTuple):
    """A chunk in host memory, and its digest where that is known."""

    data: torch.Tensor
    digest: bytes


class ChunkSource(Protocol):
    """Where the bytes of chunks are."""

    hashes: bool  # chunks are sent with digests

    def borrow(self, index: int) -> AbstractContextManager[LentChunk]:
        """Within: the chunk, which stays where it is."""

    def note_digest(self, index: int, digest: bytes) -> None:
        """The digest of a chunk was made on the way."""


@dataclass(frozen=True)
class ChunkSent:
    """A chunk has left."""

    index: int


@dataclass(frozen=True)
class FeedBroken:
    """No more chunks leave by a data connection: it broke (`OSError`), or a chunk could not be
    read."""

    fault: Exception


class ChunkSender:
    """Feeds one receiver. Reports `ChunkSent` and `FeedBroken`."""

    def __init__(self, source: ChunkSource, report: Callable[[object], None]) -> None:
        self._source, self._report = source, report
        self._todo: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._lanes: list[tuple[DataSocket, threads.Running]] = []
        self._over = False
        self.unsent = 0  # chunks that have not left yet
        self._put_at = time.monotonic()
        self.connections = 0
        self.messages = 0
        self.wire_bytes = 0

    @property
    def moved_at(self) -> float:
        """When bytes last left, or chunks were put that none had left before."""
        with self._lock:
            return max([self._put_at, *(sock.moved_at for sock, _ in self._lanes)])

    def put(self, chunks: Iterable[int]) -> None:
        """Send these too."""
        for index in chunks:
            with self._lock:
                if not self.unsent:
                    self._put_at = time.monotonic()
                self.unsent += 1
            self._todo.put(index)

    def add(self, sock: DataSocket) -> None:
        """The receiver has made another data connection."""
        with self._lock:
            refused = self._over or self.connections >= LANES
            if not refused:
                self.connections += 1
                running = threads.run(partial(self._run, sock), "worker")
                self._lanes.append((sock, running))
        if refused:
            sock.cut()

    def _run(self, sock: DataSocket) -> None:
        try:
            while (index := self._todo.get()) is not None:
                self._send(sock, index)
            if not self._over:
                sock.send_end()
        except Exception as fault:
            sock.cut()  # the receiver must not wait for more
            with self._lock:
                self.unsent -= 1
            self._report(FeedBroken(fault))

    def _send(self, sock: DataSocket, index: int) -> None:
        source = self._source
        with source.borrow(index) as (data, known):
            view = memoryview(data.numpy())  # type: ignore[arg-type]
            digest = sock.send_chunk(index, view, known, hashes=source.hashes)
            nbytes = view.nbytes
            del view, data
        if digest and not known:
            source.note_digest(index, digest)
        with self._lock:
            self.unsent -= 1
            self.messages += 1
            self.wire_bytes += nbytes
        self._report(ChunkSent(index))

    def finish(self, seconds: float) -> None:
        """All chunks have left, and no more are put: say so to the receiver."""
        with self._lock:
            lanes = list(self._lanes)
        for _ in lanes:
            self._todo.put(None)
        ends = time.monotonic() + seconds
        for _, running in lanes:
            running.wait(max(0.0, ends - time.monotonic()))

    def close(self) -> None:
        """Cut the connections; returns when no thread reads the chunks any more."""
        with self._lock:
            self._over = True
            lanes, self._lanes = self._lanes, []
        with suppress(queue.Empty):
            while True:
                self._todo.get_nowait()
        for sock, _ in lanes:
            sock.cut()
            self._todo.put(None)
        for _, running in lanes:
            running.wait()
