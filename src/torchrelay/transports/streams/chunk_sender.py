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

import torch

from torchrelay.errors import ResourceError
from torchrelay.memory import threads
from torchrelay.transports.streams.sockets import DataSocket

MAX_CONNECTIONS = 16  # data connections of one transfer

# Within: a chunk in host memory, which stays where it is, and its digest where that is known.
Borrow = Callable[[int], AbstractContextManager[tuple[torch.Tensor, bytes]]]


@dataclass(frozen=True)
class ChunkSent:
    """A chunk has left."""

    index: int


@dataclass(frozen=True)
class FeedBroken:
    """No more chunks leave by a data connection: it broke (`OSError`), a chunk could not be read,
    or no thread could be started for it."""

    fault: Exception

    @property
    def may_mend(self) -> bool:
        """Whether the receiver may make another connection, that does not break."""
        return isinstance(self.fault, OSError) and not isinstance(self.fault, ResourceError)


class ChunkSender:
    """Feeds one receiver. Reports `ChunkSent` and `FeedBroken`. With `hashed` the digests of chunks
    are made on the way, and given to it."""

    def __init__(
        self,
        borrow: Borrow,
        report: Callable[[object], None],
        hashed: Callable[[int, bytes], None] | None = None,
    ) -> None:
        self._borrow, self._report, self._hashed = borrow, report, hashed
        self._todo: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._open: list[tuple[DataSocket, threads.Running]] = []
        self._unused: list[DataSocket] = []  # open, without a thread of their own
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
            return max([self._put_at, *(sock.moved_at for sock, _ in self._open)])

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
            refused = self._over or self.connections >= MAX_CONNECTIONS
            if not refused:
                self.connections += 1
                try:
                    running = threads.run(partial(self._run, sock), "worker")
                except ResourceError as fault:
                    # The connections that have a thread send everything; without any, none does.
                    self._unused.append(sock)
                    broken = None if self._open else FeedBroken(fault)
                else:
                    broken = None
                    self._open.append((sock, running))
        if refused:
            sock.cut()
        elif broken is not None:
            self._report(broken)

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
        with self._borrow(index) as (data, known):
            view = memoryview(data.numpy())  # type: ignore[arg-type]
            digest = sock.send_chunk(index, view, known, hashes=self._hashed is not None)
            nbytes = view.nbytes
            del view, data
        if digest and not known and self._hashed is not None:
            self._hashed(index, digest)
        with self._lock:
            self.unsent -= 1
            self.messages += 1
            self.wire_bytes += nbytes
        self._report(ChunkSent(index))

    def finish(self, seconds: float) -> None:
        """All chunks have left, and no more are put: say so to the receiver."""
        with self._lock:
            connections = list(self._open)
        for _ in connections:
            self._todo.put(None)
        ends = time.monotonic() + seconds
        for _, running in connections:
            running.wait(max(0.0, ends - time.monotonic()))
        for sock in self._unused:
            with suppress(OSError):
                sock.send_end()

    def close(self) -> None:
        """Cut the connections; returns when no thread reads the chunks any more."""
        with self._lock:
            self._over = True
            connections, self._open = self._open, []
            unused, self._unused = self._unused, []
        for sock in unused:
            sock.cut()
        with suppress(queue.Empty):
            while True:
                self._todo.get_nowait()
        for sock, _ in connections:
            sock.cut()
            self._todo.put(None)
        for _, running in connections:
            running.wait()
