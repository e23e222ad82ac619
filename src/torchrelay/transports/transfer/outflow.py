"""Chunks on their way out over the group, and their digests.

Chunks are sent from where they lie, or from a buffer that they are packed into; each is hashed
beside the transfer, once, whoever it goes to.
"""

from __future__ import annotations

import itertools
import queue
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from torchrelay.memory import vectors
from torchrelay.memory.gpu.device_chunks import DeviceChunks
from torchrelay.memory.gpu.kernels import digest_of
from torchrelay.memory.gpu.side import on_side_stream
from torchrelay.transports.routes.hops import way_on
from torchrelay.transports.routes.seam import Outgoing, PushStream
from torchrelay.transports.transfer.buffers import IN_FLIGHT
from torchrelay.transports.transfer.worker import Worker

FIRST_BYTES = 16 << 20  # whose digests are told before any chunk: more than a link's queues hold


@dataclass
class OutStream:
    """Chunks on their way to one receiver, by one way."""

    rank: int
    to: PushStream
    todo: deque[int]
    beside: bool = False  # the group: the receiver is not lost with it
    in_flight: int = 0
    packed: int = 0  # in buffers
    alive: bool = True


class Lease:
    """A packed chunk's buffer, given back when it is both sent and hashed."""

    def __init__(self, buffer: torch.Tensor, uses: int) -> None:
        self.buffer, self.uses = buffer, uses


@dataclass(frozen=True)
class Hashed:
    chunk: int
    digest: bytes
    lease: Lease | None


@dataclass(frozen=True)
class Sent:
    stream: OutStream
    chunk: int
    lease: Lease | None
    fault: Exception | None
    digest: bytes  # if it was hashed on its way


class Outflow:
    """Streams to the receivers that are fed from here. Reports to `events`; the owner of those
    hands `Sent` and `Hashed` back to `sent` and `hashed`.
    """

    def __init__(
        self,
        outgoing: Outgoing,
        events: queue.SimpleQueue[object],
        worker: Worker,
    ) -> None:
        self._group, self._device = outgoing.group, outgoing.device
        self._snapshot, self._chunks = outgoing.snapshot, outgoing.snapshot.chunks
        self._buffers, self._events, self._worker = outgoing.resources.buffers, events, worker
        self._layout, self._cells = outgoing.layout, outgoing.cells
        self._from_gpu = outgoing.from_gpu
        self._digests: list[bytes | None] = [None] * len(self._chunks)
        self._hashing: set[int] = set()
        self.verify = False  # hash what is posted
        self.streams: list[OutStream] = []
        self._gone: set[int] = set()
        self.gone_bytes = 0  # of the stream, that have left at least once
        self.wire_bytes = 0
        self.messages = 0

    def open(self, rank: int, transfer: int, lane: int, chunks: Sequence[int]) -> None:
        """Send chunks over the group."""
        to = PushStream(way_on(self._group, rank, transfer, lane), IN_FLIGHT, IN_FLIGHT)
        self.streams.append(OutStream(rank, to, deque(chunks)))

    def open_beside(self, rank: int, to: PushStream) -> None:
        """Send all chunks by a stream beside the group."""
        self.streams.append(OutStream(rank, to, deque(range(len(self._chunks))), beside=True))

    def cut(self, rank: int) -> None:
        """Post no more chunks to a receiver."""
        for stream in self.streams:
            if stream.rank == rank:
                stream.alive = False

    def close(self) -> None:
        for stream in self.streams:
            stream.to.way.close()

    def owed(self, rank: int) -> tuple[int, int]:
        """Chunks that go from here to a receiver: yet to be posted, and on their way."""
        mine = [stream for stream in self.streams if stream.rank == rank and stream.alive]
        return sum(len(one.todo) for one in mine), sum(one.in_flight for one in mine)

    @property
    def _there(self) -> DeviceChunks:
        """Found out where chunks are hashed: most routes on one machine take none of this."""
        return self._layout.on_gpu

    def pump(self) -> list[int]:
        """Post chunks on every stream that has room; the ranks that they go to."""
        moved = []
        for stream in self.streams:
            while stream.alive and stream.todo and stream.in_flight < stream.to.room:
                if stream.packed == stream.to.buffers:
                    break
                self._post(stream, stream.todo.popleft())
                moved.append(stream.rank)
        return list(dict.fromkeys(moved))

    def _post(self, stream: OutStream, index: int) -> None:
        if self.verify and index in self._there and index not in self._hashing:
            self.hash(self._there)  # all of them at once
        hashing = self.verify and index not in self._hashing and not stream.to.hashes
        data, lease = self._bytes_of(index, self._device, uses=2 if hashing else 1)
        stream.in_flight += 1
        stream.packed += lease is not None
        self.wire_bytes += data.numel()
        self.messages += 1

        events = self._events  # alone: a send that never ends must not keep the state alive

        def report(fault: Exception | None, read: bool, digest: bytes = b"") -> None:
            events.put(Sent(stream, index, lease, fault, digest))

        stream.to.way.put(data, report)
        if hashing:
            self._hashing.add(index)
            made = partial(digest_of, data, cells=self._cells)
            self._worker.submit(lambda: self._events.put(Hashed(index, made(), lease)))

    def _bytes_of(self, index: int, device: str, uses: int) -> tuple[torch.Tensor, Lease | None]:
        data = self._snapshot.view(index, device)
        if data is not None:
            return data, None
        pinned = device == "cpu" and self._from_gpu
        lease = Lease(self._buffers.take(max(self._chunks.sizes), device, pinned=pinned), uses)
        data = lease.buffer[: self._chunks.sizes[index]]
        with on_side_stream():
            self._snapshot.read(index, data, vectors.copy)
        return data, lease

    def sent(self, event: Sent) -> None:
        event.stream.in_flight -= 1
        event.stream.packed -= event.lease is not None
        if event.fault is not None:
            return
        self._release(event.lease)
        if event.digest and self._digests[event.chunk] is None:
            self._hashing.add(event.chunk)
            self._digests[event.chunk] = event.digest
        if event.chunk not in self._gone:
            self._gone.add(event.chunk)
            self.gone_bytes += self._chunks.sizes[event.chunk]

    # Digests

    def hash(self, chunks: Iterable[int]) -> None:
        """Hash those that have not been, for receivers that take the bytes themselves."""
        new = [one for one in chunks if one not in self._hashing and 0 <= one < len(self._chunks)]
        self._hashing.update(new)
        if there := [index for index in new if index in self._there]:
            self._worker.submit(lambda: self._hash_there(there))
        for index in new:
            if index not in self._there:
                self._worker.submit(lambda index=index: self._hash(index))  # type: ignore[misc]

    def first_chunks(self) -> range:
        """Those whose digests are told before any chunk leaves: a receiver that passes chunks on
        is to know their digests when they come."""
        if not self.verify or self._device != "cpu":
            return range(0)
        most = max(IN_FLIGHT + 1, FIRST_BYTES // max(self._chunks.sizes, default=1))
        return range(len(self._chunks))[:most]

    def hash_ahead(self) -> None:
        """Hash all chunks before they are sent, where they need not be copied for that."""
        if self.verify and self._device == "cpu":
            self.hash(range(len(self._chunks)))

    def _hash(self, index: int) -> None:
        try:
            data, lease = self._bytes_of(index, "cpu", uses=1)
            found = digest_of(data, cells=self._cells)
            self._release(lease)
            self._events.put(Hashed(index, found, None))
        except Exception as fault:
            self._events.put(fault)

    def _hash_there(self, chunks: list[int]) -> None:
        try:
            for index, found in self._there.digests(chunks).items():
                self._events.put(Hashed(index, found, None))
        except Exception as fault:
            self._events.put(fault)

    def hashed(self, event: Hashed) -> None:
        self._digests[event.chunk] = event.digest
        self._release(event.lease)

    def all_digests(self) -> tuple[bytes, ...]:
        """Of all chunks; empty where one is not known."""
        return tuple([found or b"" for found in self._digests])

    def digests_from(self, first: int) -> tuple[bytes, ...]:
        """Of the chunks from this one on, up to the first whose digest is not known yet."""
        known = itertools.takewhile(bool, itertools.islice(self._digests, first, None))
        return tuple(digest for digest in known if digest is not None)

    def _release(self, lease: Lease | None) -> None:
        if lease is not None:
            lease.uses -= 1
            if not lease.uses:
                self._buffers.give(lease.buffer)
