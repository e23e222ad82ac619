"""The data phase of routes on which the receiver takes the bytes itself.

A route says how one chunk, or many pieces, are read. This shares the reads out to a few threads,
compares digests with those of the sender, and reads chunks again that do not match.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from torchrelay.errors import RemoteProtocolError
from torchrelay.geometry import DIGEST_BYTES
from torchrelay.geometry.runs import Moves, Runs, moves
from torchrelay.memory.gpu.device_chunks import DeviceChunks
from torchrelay.memory.gpu.kernels import digest_of
from torchrelay.memory.gpu.side import on_side_stream
from torchrelay.memory.pool import cores
from torchrelay.transports.routes.route import FetchProgress, Incoming, RouteFetch
from torchrelay.transports.streams.workers import Workers
from torchrelay.transports.wire.messages import Digests, Message, RouteNote, Want, to_ranges


@dataclass(frozen=True)
class ReadDone:
    """A job of a reading route is over. `then` is called in the thread of the transfer."""

    nbytes: int
    then: Callable[[], None] | None = None


class ReadingFetch(RouteFetch):
    """Runs until every piece is filled, and each chunk has the digest that the sender sends."""

    _on_gpu: DeviceChunks  # the chunks that a GPU can hash where they land, from `get_ready` on

    def __init__(self, incoming: Incoming, *, verify: bool) -> None:
        self._incoming, self._talk = incoming, incoming.conversation
        self.target, self._chunks = incoming.target, incoming.target.chunks
        self._progress = FetchProgress(incoming)
        self._verify = self.verified = verify
        self._workers: Workers | None = None
        self._outstanding = 0
        self._mine: dict[int, bytes] = {}  # digests of what was read
        self._theirs: dict[int, bytes] = {}
        self._awaited: set[int] = set()  # chunks whose digests the sender was asked for

    def get_ready(self) -> None:
        self._on_gpu = self._incoming.on_gpu()

    # For routes to implement

    def _threads(self, most: int) -> int:
        """With how many threads to read, of `most`."""
        return most

    def _compared(self) -> list[int]:
        """The chunks whose digests are compared."""
        return list(range(len(self._chunks))) if self._verify else []

    def _begin(self) -> None:
        """Start to read everything."""
        self._read_chunks(list(range(len(self._chunks))))

    def _read_chunks(self, chunks: list[int]) -> None:
        """Start to read these, for the first time or because they did not match."""
        raise NotImplementedError

    def _handle_note(self, data: bytes) -> None:
        """A message of the sender's end."""
        raise self._wrong("RouteNote out of turn")

    def _lost(self, fault: Exception) -> Exception:
        """The error that a failed read stands for."""
        return fault

    # The phase

    def run(self, go: bytes) -> None:
        most = max(1, min(self._incoming.offer.threads, cores()))
        self._workers = Workers(self._threads(most), self._talk.inbox.put)
        self._want(self._compared())
        self._begin()
        self._wait()
        while bad := [one for one, mine in self._mine.items() if mine != self._theirs.get(one)]:
            for index in bad:
                self._progress.retry(index)
            self._want(bad)  # a sender whose state has changed says so when it is asked again
            self._read_chunks(bad)
            self._wait()
        self._progress.complete()

    def close(self) -> None:
        if self._workers is not None:
            self._workers.stop()

    def _want(self, chunks: list[int]) -> None:
        """Ask the sender for digests."""
        self._awaited = set(chunks)
        if chunks:
            self._talk.send(Want(to_ranges(sorted(self._awaited))))

    def _land(self, chunk: int, data: torch.Tensor) -> None:
        later = self._verify and chunk in self._on_gpu  # hashed where it has come to lie
        if self._verify and not later:
            self._mine[chunk] = digest_of(data)
        with on_side_stream():
            self.target.write(chunk, data)
        if later:
            self._mine |= self._on_gpu.digests([chunk])

    def _read_and_land(
        self, chunk: int, sources: Runs, buffer: torch.Tensor, fill: Callable[[Moves], None]
    ) -> ReadDone:
        """Read a chunk by way of a buffer: `fill` copies to it what the sources have."""
        begin, size = self._chunks.offsets[chunk], self._chunks.sizes[chunk]
        data = buffer[:size]
        found = moves(sources, Runs([begin], [data.data_ptr()], [size]))
        if int(found.nbytes.sum()) < size:
            ctypes.memset(data.data_ptr(), 0, size)  # alignment leaves gaps, which are zeros
        if len(found.nbytes):
            fill(found)
        self._land(chunk, data)
        return ReadDone(size)

    def _submit(self, job: Callable[[], ReadDone], *, counted: bool = False) -> None:
        """Have a worker do a job; `counted`: it is outstanding already."""
        assert self._workers is not None
        self._outstanding += not counted
        self._workers.submit(lambda: self._talk.inbox.put(job()))

    def _wait(self) -> None:
        """Returns when everything that was asked for is here."""
        while self._outstanding or self._awaited:
            event = self._talk.next("data")
            if isinstance(event, Exception):
                raise self._lost(event)
            if isinstance(event, ReadDone):
                self._outstanding -= 1
                self.messages += 1
                self._count(event.nbytes)
                if event.then is not None:
                    event.then()
            elif isinstance(event, RouteNote):
                self._handle_note(event.data)
            elif isinstance(event, Digests):
                self._take_digests(event.chunks, event.digests)
            elif isinstance(event, Message):
                raise self._talk.out_of_turn(event)

    def _count(self, nbytes: int) -> None:
        self.wire_bytes += nbytes
        self._progress.add(nbytes)

    def _take_digests(self, chunks: Iterable[int], digests: bytes) -> None:
        found = [digests[at : at + DIGEST_BYTES] for at in range(0, len(digests), DIGEST_BYTES)]
        some = list(chunks)
        if len(found) != len(some):
            raise self._wrong(f"{len(found)} digests for {len(some)} chunks")
        if not self._awaited.issuperset(some):
            raise self._wrong("digests that were not asked for")
        self._theirs.update(zip(some, found, strict=True))
        self._awaited.difference_update(some)

    def _wrong(self, message: str) -> RemoteProtocolError:
        """The error for what the sender must not say."""
        return RemoteProtocolError(message, rank=self._talk.sender, phase="data")
