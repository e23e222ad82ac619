"""The data phase of a receive in which this process takes the bytes itself.

A route says how one chunk, or many pieces, are read; this shares the reads out to a few threads,
asks the sender at the end whether all is still what it sent, and has read again what is not. Only
then is the state whole.
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from torchrelay.errors import DigestError, RemoteProtocolError, TransferTimeoutError
from torchrelay.memory.gpu.side import on_side_stream
from torchrelay.memory.pool import cores
from torchrelay.record.digest import digest
from torchrelay.transports.protocol import wire
from torchrelay.transports.protocol.machines.events import RETRIES, failure
from torchrelay.transports.routes.seam import Incoming, Mover
from torchrelay.transports.transfer.worker import Worker

TICK = 1.0


@dataclass(frozen=True)
class Did:
    """A job is over."""

    nbytes: int = 0
    fault: Exception | None = None
    free_slot: int | None = None


class Pull(Mover):
    """Runs until every byte is in its place and the sender has confirmed it."""

    def __init__(self, incoming: Incoming, *, verify: bool) -> None:
        self._line, self._events, self._landing = incoming.line, incoming.events, incoming.landing
        self._incoming, self._sender = incoming, incoming.line.peer
        self._verify, self.verified = verify, verify
        self._deadline, self._buffers = incoming.deadline, incoming.resources.buffers
        self._chunks = incoming.landing.chunks
        self._digests: dict[int, bytes] = {}
        self._cells = incoming.offer.cells  # what digests are of
        self._worker: Worker | None = None
        self._outstanding = 0
        self._trailer: wire.Trailer | None = None
        self._done_bytes = 0
        self.retried: list[int] = []

    # What a route does

    def _threads(self, most: int) -> int:
        """With how many threads to read, of so many."""
        return most

    def _begin(self, go: wire.Go) -> None:
        """Start to read everything."""
        raise NotImplementedError

    def _read_again(self, chunks: Iterable[int]) -> None:
        """Start to read chunks that were not what the sender has."""
        raise NotImplementedError

    def _hear(self, word: bytes) -> None:
        """The sender's end says something."""
        raise RemoteProtocolError("Word out of turn", rank=self._sender, phase="data")

    def _use_wait(self) -> None:
        """All is read, and the sender's word on it is awaited: do what need not wait for that."""
        self._landing.arrived()

    def _check(self, word: bytes) -> None:
        """Look at what came with the digests; `DigestError` if something is not what was sent."""

    def _lost(self, fault: Exception) -> Exception:
        """What a fault of a read means."""
        return fault

    # The phase

    @property
    def done(self) -> str:
        return f"{self._done_bytes} of {self._chunks.stream_bytes} bytes done"

    def run(self, go: wire.Go) -> None:
        most = max(1, min(go.threads, cores()))
        self._worker = Worker(self._threads(most), niceness=0)
        self._begin(go)
        self._wait()
        self._confirm()
        while bad := self._unequal():
            self._read_again(bad)
            self._wait()
            self._confirm()
        if self._done_bytes < self._chunks.stream_bytes:
            # Padding between tensors is counted with the rest, and never read.
            self._count(self._chunks.stream_bytes - self._done_bytes, moved=False)

    def close(self, *, keep: bool) -> None:
        if self._worker is not None:
            self._worker.stop()

    def _land(self, chunk: int, data: torch.Tensor) -> None:
        later = self._verify and chunk in self._incoming.on_gpu  # hashed where it has come to lie
        if self._verify and not later:
            self._digests[chunk] = digest(data, cells=self._cells)
        with on_side_stream():
            self._landing.write(chunk, data)
        if later:
            self._digests |= self._incoming.on_gpu.digests([chunk])

    def _submit(self, job: Callable[[], Did], *, counted: bool = False) -> None:
        """Have a job done beside; `counted`: as outstanding already."""
        assert self._worker is not None

        def run() -> None:
            try:
                self._events.put(job())
            except Exception as fault:
                self._events.put(Did(fault=fault))

        self._outstanding += not counted
        self._worker.submit(run)

    def _wait(self) -> None:
        while self._outstanding:
            self._handle(self._next())

    def _confirm(self) -> None:
        self._trailer = None
        self._line.send(wire.Pulled())
        self._use_wait()
        while self._trailer is None:
            self._handle(self._next())

    def _next(self) -> object:
        while not self._deadline.passed:
            try:
                return self._events.get(timeout=max(min(TICK, self._deadline.left()), 0.001))
            except queue.Empty:
                continue
        raise TransferTimeoutError(
            f"timed out after {self._deadline.seconds:.3g} s: not all data was read; {self.done}",
            rank=self._sender,
            step=self._incoming.step,
            phase="data",
        )

    def _handle(self, event: object) -> None:
        if isinstance(event, Did):
            if event.fault is not None:
                raise self._lost(event.fault)
            self._outstanding -= 1
            self.messages += 1
            self._count(event.nbytes)
            self._did(event)
        elif isinstance(event, wire.Word):
            self._hear(event.word)
        elif isinstance(event, wire.Trailer):
            self._trailer = event
        elif not isinstance(event, wire.Knock):
            raise failure(event, self._sender, "data")

    def _did(self, event: Did) -> None:
        """A job is over and counted."""

    def _count(self, nbytes: int, *, moved: bool = True) -> None:
        self.wire_bytes += nbytes if moved else 0
        self._done_bytes = min(self._done_bytes + nbytes, self._chunks.stream_bytes)
        self._incoming.progress(self._done_bytes, self._chunks.stream_bytes)

    def _unequal(self) -> list[int]:
        """The chunks that are not what was sent; raises once they have been read often enough."""
        assert self._trailer is not None
        self._check(self._trailer.word)
        if not self._verify:
            return []
        theirs = self._trailer.digests
        if len(theirs) != len(self._chunks):
            raise RemoteProtocolError(
                f"{len(theirs)} digests for {len(self._chunks)} chunks", rank=self._sender
            )
        bad = [index for index, mine in self._digests.items() if mine != theirs[index]]
        if any(self.retried.count(index) >= RETRIES for index in bad):
            raise self._differs(
                f"{self._incoming.chunk_named(bad[0])}, after {RETRIES} more tries,"
            )
        self.retried += bad
        return bad

    def _differs(self, what: str) -> DigestError:
        return DigestError(
            f"{what} does not have the digest it was sent with: "
            "was the state changed while it was sent?",
            rank=self._sender,
            step=self._incoming.step,
            phase="data",
        )
