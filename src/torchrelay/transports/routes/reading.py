"""The data phase of routes on which the receiver takes the bytes itself.

A route says how one chunk, or many pieces, are read. This shares the reads out to a few threads,
compares digests with those that the sender tells, and has read again what does not match.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from torchrelay.errors import RemoteProtocolError
from torchrelay.geometry import DIGEST_BYTES
from torchrelay.landing.seam import Landing
from torchrelay.memory.gpu.side import on_side_stream
from torchrelay.memory.pool import cores
from torchrelay.record.digest import digest
from torchrelay.transports.routes.route import (
    RETRIES,
    FetchProgress,
    Incoming,
    RouteFetch,
    chunk_named,
    on_gpu,
)
from torchrelay.transports.streams.workers import Workers
from torchrelay.transports.wire.messages import Digests, Message, RouteNote, Want, to_ranges


@dataclass(frozen=True)
class ReadDone:
    """A job of a reading route is over."""

    nbytes: int = 0
    fault: Exception | None = None
    slot: int | None = None  # of a ring, that is free again


class ReadingFetch(RouteFetch):
    """Runs until every byte is in its place, and has the digest that the sender tells."""

    landing: Landing
    _progress: FetchProgress

    def __init__(self, incoming: Incoming, *, verify: bool) -> None:
        self._incoming, self._talk = incoming, incoming.conversation
        self._verify = self.verified = verify
        self._buffers = incoming.resources.buffers
        self._cells = incoming.offer.cells
        self._workers: Workers | None = None
        self._outstanding = 0
        self._mine: dict[int, bytes] = {}  # digests of what was read
        self._theirs: dict[int, bytes] = {}
        self._untold: set[int] = set()  # chunks whose digests the sender was asked for
        self._tries: dict[int, int] = {}
        self._on_gpu: Any = None  # chunks that a GPU can hash

    # For routes to implement

    def _threads(self, most: int) -> int:
        """With how many threads to read, of `most`."""
        return most

    def _compared(self) -> list[int]:
        """The chunks whose digests are compared."""
        return list(range(len(self._chunks))) if self._verify else []

    def _begin(self) -> None:
        """Start to read everything."""
        raise NotImplementedError

    def _read_again(self, chunks: list[int]) -> None:
        """Start to read chunks again that did not match."""
        raise NotImplementedError

    def _hear(self, data: bytes) -> None:
        """The sender's end says something."""
        raise RemoteProtocolError("RouteNote out of turn", rank=self._talk.sender, phase="data")

    def _check(self) -> None:
        """All is read: compare what has no digests of chunks."""

    def _lost(self, fault: Exception) -> Exception:
        """The error that a failed read stands for."""
        return fault

    # The phase

    def run(self, go: bytes, landing: Landing, patience: float) -> None:
        self.landing, self._chunks = landing, landing.chunks
        self._progress = FetchProgress(self._incoming, self._chunks.stream_bytes)
        if self._on_gpu is None:
            self._on_gpu = on_gpu(self._incoming, landing)
        most = max(1, min(self._incoming.offer.threads, cores()))
        self._workers = Workers(self._threads(most))
        self._untold = set(self._compared())
        if self._untold:
            self._talk.send(Want(to_ranges(sorted(self._untold))))
        self._begin()
        self._wait(lambda: not self._outstanding and not self._untold)
        while bad := [one for one, mine in self._mine.items() if mine != self._theirs.get(one)]:
            self._retry(bad)
            self._wait(lambda: not self._outstanding and not self._untold)
        self._check()
        if self._progress.left:
            self._progress.add(self._progress.left)  # padding between tensors is never read

    def _retry(self, bad: list[int]) -> None:
        for index in bad:
            self._tries[index] = self._tries.get(index, 0) + 1
            if self._tries[index] > RETRIES:
                what = chunk_named(self._incoming, self.landing, index)
                raise self._incoming.differs(f"{what}, after {RETRIES} more tries,")
        # A sender whose state has changed says so when it is asked again.
        self._untold = set(bad)
        self._talk.send(Want(to_ranges(sorted(bad))))
        self._read_again(bad)

    def close(self) -> None:
        if self._workers is not None:
            self._workers.stop()

    def _land(self, chunk: int, data: torch.Tensor) -> None:
        later = self._verify and chunk in self._on_gpu  # hashed where it has come to lie
        if self._verify and not later:
            self._mine[chunk] = digest(data, cells=self._cells)
        with on_side_stream():
            self.landing.write(chunk, data)
        if later:
            self._mine |= self._on_gpu.digests([chunk])

    def _submit(self, job: Callable[[], ReadDone], *, counted: bool = False) -> None:
        """Have a worker do a job; `counted`: it is outstanding already."""
        assert self._workers is not None

        def run() -> None:
            try:
                self._talk.inbox.put(job())
            except Exception as fault:
                self._talk.inbox.put(ReadDone(fault=fault))

        self._outstanding += not counted
        self._workers.submit(run)

    def _wait(self, over: Callable[[], bool]) -> None:
        while not over():
            self._handle(self._talk.next("data"))

    def _handle(self, event: object) -> None:
        if isinstance(event, ReadDone):
            if event.fault is not None:
                raise self._lost(event.fault)
            self._outstanding -= 1
            self.messages += 1
            self._count(event.nbytes)
            self._did(event)
        elif isinstance(event, RouteNote):
            self._hear(event.data)
        elif isinstance(event, Digests):
            self._told(event.chunks, event.digests)
        elif isinstance(event, Message):
            raise self._talk.out_of_turn(event)

    def _did(self, event: ReadDone) -> None:
        """A job is over and counted."""

    def _count(self, nbytes: int) -> None:
        self.wire_bytes += nbytes
        self._progress.add(nbytes)

    def _told(self, chunks: Iterable[int], digests: bytes) -> None:
        found = [digests[at : at + DIGEST_BYTES] for at in range(0, len(digests), DIGEST_BYTES)]
        some = list(chunks)
        if len(found) != len(some):
            raise RemoteProtocolError(
                f"{len(found)} digests for {len(some)} chunks", rank=self._talk.sender
            )
        if not self._untold.issuperset(some):
            raise RemoteProtocolError("digests that were not asked for", rank=self._talk.sender)
        self._theirs.update(zip(some, found, strict=True))
        self._untold.difference_update(some)
