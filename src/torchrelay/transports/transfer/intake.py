"""The data phase of a receive: chunks in, hashed, landed, passed on, and asked for again.

A chunk is passed on once it is known to be what the sender sent. Before that it is whatever another
rank sent or pointed at, which might be memory that is nobody's business.

Chunks that come over the group arrive in private buffers. Those, not the caller's tensors, are what
the backend writes to: a peer that wakes up after this side has given up cannot touch live weights.
A channel can be cut, so what comes by one arrives where it belongs.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from torchrelay.errors import (
    DigestError,
    PeerLostError,
    RemoteProtocolError,
    TransferTimeoutError,
)
from torchrelay.memory.host import at_address
from torchrelay.memory.side import in_use, on_side_stream
from torchrelay.record.digest import digest
from torchrelay.transports.group.lines import CLOSED
from torchrelay.transports.protocol import wire
from torchrelay.transports.protocol.events import RETRIES, failure
from torchrelay.transports.routes.hops import Way, way_in, way_on
from torchrelay.transports.routes.seam import Incoming
from torchrelay.transports.transfer.buffers import IN_FLIGHT
from torchrelay.transports.transfer.worker import Worker, hashers, on_the_way


class Feed(Protocol):
    """Chunks that come beside the group. It can be cut, so they come straight to their places."""

    @property
    def room(self) -> int:
        """Chunks that should be under way."""

    @property
    def buffers(self) -> int:
        """Of those, the ones that may be in buffers."""

    def way_in(self, transfer: int, *, hashes: bool = False) -> Way:
        """Of one transfer. `hashes`: each chunk is reported with its digest."""

    def cut(self) -> None:
        """What is under way fails. No memory that was put in is touched from here on."""


_NOTHING = torch.empty(0, dtype=torch.uint8, device="cpu")


class _Slot:
    """Takes one chunk at a time, which is passed on from there: in a buffer, or in its place."""

    __slots__ = ("buffer", "chunk", "data", "forwarding", "posted")

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self.buffer: torch.Tensor | None = None  # none for a chunk that comes to its place
        self.data = _NOTHING
        self.chunk = -1
        self.posted = self.forwarding = False


class _Flow:
    """Chunks from one upstream, in a known order."""

    def __init__(self, upstream: int, order: Sequence[int]) -> None:
        self.upstream, self.order = upstream, order
        self.posted = 0
        self.arrived: set[int] = set()

    @property
    def lacking(self) -> list[int]:
        return [chunk for chunk in self.order if chunk not in self.arrived]


@dataclass(frozen=True)
class Arrived:
    flow: _Flow
    slot: _Slot
    fault: Exception | None
    read: bool  # out of the upstream's memory
    digest: bytes  # if it was hashed on its way


@dataclass(frozen=True)
class Taken:
    """A chunk has been hashed and handed to the landing."""

    slot: _Slot
    data: torch.Tensor
    chunk: int
    digest: bytes
    fault: Exception | None


@dataclass(frozen=True)
class Forwarded:
    slot: _Slot
    data: torch.Tensor
    fault: Exception | None
    read: bool


class Intake:
    """Receives every chunk of one transfer into a landing. `run` returns when all of them hold."""

    def __init__(self, incoming: Incoming, go: wire.Go, feed: Feed | None) -> None:
        line, landing, offer = incoming.line, incoming.landing, incoming.offer
        self._line, self._events, self._landing = line, incoming.events, landing
        self._places = landing.places()
        self._near = self._places.host  # made here, not by the thread that writes to it
        # The sender pushes beside the group, and what is left of that.
        self._beside, self._feed = feed is not None, feed
        self._group, self._sender = line.group, line.peer
        self._verify, self._device = offer.verify, offer.device
        self._step, self._deadline = incoming.step, incoming.deadline
        self._buffers, self._progress = incoming.resources.buffers, incoming.progress
        verify = offer.verify
        self._chunks = landing.chunks
        self._count = len(landing.chunks)
        self._missing = set(range(self._count))
        self._digests = [b""] * self._count
        self._told = [b""] * self._count if verify else []  # by the sender, what they should be
        self._turn = 0  # the chunk that is to be passed on next
        self._waiting: dict[int, _Slot] = {}  # chunks that are here and not yet passed on
        self._trailer: tuple[bytes, ...] | None = None
        self._patience = go.patience
        self._downstream = go.downstream
        self._largest = max(self._chunks.sizes, default=0)
        self._buffers_left = slots = IN_FLIGHT * (1 if go.downstream is None else 2)
        self._spare: list[torch.Tensor] = []
        if feed is not None:
            self._buffers_left, slots = feed.buffers, feed.room
        self._slots = [_Slot() for _ in range(min(self._count, slots))]
        self._free = list(self._slots)
        self._lane = 1
        self._flow = _Flow(go.upstream, range(self._count))
        if feed is not None:
            self._way_in = feed.way_in(line.transfer, hashes=verify and on_the_way())
        else:
            self._way_in = self._from(go.upstream, notes=go.reads, may_read=incoming.may_read)
        self._way_on: Way | None = None
        if go.downstream is not None:
            self._way_on = way_on(self._group, go.downstream, go.downstream_id, 1, notes=go.notes)
        self._heard_at = self._passed_at = time.monotonic()
        self._done_bytes = 0
        self._lost: PeerLostError | None = None
        self._worker = Worker(hashers())
        self.wire_bytes = 0
        self.handed_bytes = 0  # of those, read out of the upstream's memory
        self.forwarded_bytes = 0  # sent on; what the next one reads is not
        self.messages = 0
        self.retried: list[int] = []

    @property
    def done(self) -> str:
        return f"{self._done_bytes} of {self._chunks.stream_bytes} bytes done"

    def run(self) -> None:
        while not self._complete():
            self._post_receives()
            event = self._next(min(self._deadline.left(), self._tick()))
            if event is not None:
                self._handle(event)
            if self._deadline.passed and not self._complete():
                raise TransferTimeoutError(
                    f"timed out after {self._deadline.seconds:.3g} s: not all data came; "
                    f"{self.done}",
                    rank=self._sender,
                    step=self._step,
                    phase="data",
                )
            self._check_stalls()

    def finish(self) -> None:
        """Let the next receiver have the last chunks; the sender serves it otherwise."""
        limit = time.monotonic() + (self._patience or self._deadline.left())
        while any(slot.forwarding for slot in self._slots) and time.monotonic() < limit:
            event = self._next(min(0.25, self._deadline.left()))
            if isinstance(event, Forwarded):
                self._forwarded(event)
            elif isinstance(event, wire.Detach):
                self._detach()
            elif self._deadline.passed:
                break
        for buffer in self._spare:
            self._buffers.give(buffer)

    def close(self) -> None:
        """Nothing is written after this; watchers end with what they still wait for."""
        if self._feed is not None and any(slot.posted for slot in self._slots):
            self._feed.cut()
        self._worker.stop()
        self._way_in.close()
        if self._way_on is not None:
            self._way_on.close()

    def _complete(self) -> bool:
        return not self._missing and self._trailer is not None and self._holds(self._trailer)

    def _tick(self) -> float:
        return min(self._patience / 4, 0.25) if self._patience else 1.0

    def _next(self, timeout: float) -> object:
        try:
            return self._events.get(timeout=max(timeout, 0.001))
        except queue.Empty:
            return None

    def _handle(self, event: object) -> None:
        if isinstance(event, Arrived):
            if event.flow is not self._flow:
                return  # from an upstream that was given up, into a buffer given up with it
            if event.fault is not None:
                self._change_upstream(str(event.fault))
            else:
                self._arrived(event.slot, event.read, event.digest)
        elif isinstance(event, Taken):
            self._taken(event)
        elif isinstance(event, Forwarded):
            self._forwarded(event)
        elif isinstance(event, wire.Hashes):
            self._learn(event.first, event.digests)
        elif isinstance(event, wire.Trailer):
            self._trailer = event.digests
            self._learn(0, event.digests)
        elif isinstance(event, wire.Reroute):
            if self._flow.upstream != self._sender:
                self._change_upstream("the sender said so")
        elif isinstance(event, wire.Detach):
            self._detach()
        elif isinstance(event, PeerLostError) and self._trailer is not None:
            self._lost = event  # what is on its way may be all that is missing
        elif not isinstance(event, wire.Knock):
            raise failure(event, self._sender, "data")

    # Chunks in

    def _from(self, upstream: int, *, notes: bool = False, may_read: bool = False) -> Way:
        return way_in(
            self._group, upstream, self._line.transfer, self._lane, notes=notes, may_read=may_read
        )

    def _post_receives(self) -> None:
        flow, events = self._flow, self._events  # a receive that never ends keeps those alone
        while self._free and flow.posted < len(flow.order):
            chunk = flow.order[flow.posted]
            slot = self._free[0]
            if not self._make_room(slot, chunk):
                return
            self._free.pop(0)
            slot.chunk, slot.posted = chunk, True
            flow.posted += 1

            def report(
                fault: Exception | None, read: bool, digest: bytes = b"", slot: _Slot = slot
            ) -> None:
                events.put(Arrived(flow, slot, fault, read, digest))

            self._way_in.put(slot.data, report)

    def _make_room(self, slot: _Slot, chunk: int) -> bool:
        """Memory for a chunk: where it belongs, if that may be written to, or a buffer; whether
        there is one."""
        begin, size = self._chunks.offsets[chunk], self._chunks.sizes[chunk]
        if self._feed is not None and chunk not in self._places.indirect:
            address = self._near.whole(begin, begin + size)
            if address is not None:
                self._landing.torn = self._landing.torn or self._places.live
                slot.data = at_address(address, size)
                return True
        if self._spare:
            slot.buffer = self._spare.pop()
        elif self._buffers_left:
            self._buffers_left -= 1
            pinned = self._device == "cpu" and self._landing.on_device and in_use()
            slot.buffer = self._buffers.take(self._largest, self._device, pinned=pinned)
            if not self._verify:
                slot.buffer.zero_()  # a message may be shorter than it should, and nobody notice
        else:
            return False
        slot.data = slot.buffer[:size]
        return True

    def _clear(self, slot: _Slot, *, abandoned: bool = False) -> None:
        """Make a slot free. The buffer of an abandoned operation may still be written to."""
        if abandoned:
            self._buffers_left += slot.buffer is not None
        elif slot.buffer is not None:
            self._spare.append(slot.buffer)
        slot.clear()
        self._free.append(slot)

    def _arrived(self, slot: _Slot, read: bool, known: bytes) -> None:
        data, in_place = slot.data, slot.buffer is None
        self._flow.arrived.add(slot.chunk)
        self._heard_at = time.monotonic()
        self.messages += 1
        self.wire_bytes += data.numel()
        self.handed_bytes += data.numel() if read else 0
        slot.posted = False
        chunk = slot.chunk
        if in_place and (known or not self._verify):
            self._taken(Taken(slot, data, chunk, known, None))
            return

        def take() -> None:
            mine, fault = known, None
            try:
                if self._verify and not known:
                    mine = digest(data)
                if not in_place:
                    with on_side_stream():
                        self._landing.write(chunk, data)
            except Exception as cause:
                fault = cause
            self._events.put(Taken(slot, data, chunk, mine, fault))

        self._worker.submit(take)

    def _taken(self, event: Taken) -> None:
        if event.fault is not None:
            raise event.fault
        self._digests[event.chunk] = event.digest
        self._missing.discard(event.chunk)
        if not self._missing:
            self._landing.arrived()
        self._done_bytes = min(self._done_bytes + event.data.numel(), self._chunks.stream_bytes)
        self._progress(self._done_bytes, self._chunks.stream_bytes)
        if self._downstream is None:
            self._clear(event.slot)
        else:
            self._waiting[event.chunk] = event.slot
            self._pass_on_in_turn()

    def _holds(self, trailer: tuple[bytes, ...]) -> bool:
        """Whether every chunk is the one that was sent; asks again for those that are not."""
        if not self._verify:
            return True
        if len(trailer) != self._count:
            raise RemoteProtocolError(
                f"{len(trailer)} digests for {self._count} chunks", rank=self._sender
            )
        pairs = zip(self._digests, trailer, strict=True)
        bad = [index for index, (mine, theirs) in enumerate(pairs) if mine != theirs]
        if not bad:
            return True
        if any(self.retried.count(index) >= RETRIES for index in bad):
            raise DigestError(
                f"chunk {bad[0]} does not have the digest it was sent with, after {RETRIES} more "
                "tries: was the state changed while it was sent?",
                rank=self._sender,
                step=self._step,
                phase="data",
            )
        self.retried += bad
        self._missing.update(bad)
        self._ask_for(bad)
        return False

    # Another upstream

    def _change_upstream(self, reason: str) -> None:
        """Go on from the sender itself, over the group, with what has not arrived."""
        if self._flow.upstream == self._sender and self._feed is None:
            raise PeerLostError(
                f"connection lost: {reason}; {self.done}; {CLOSED}",
                rank=self._sender,
                step=self._step,
                phase="data",
            )
        self._ask_for(self._flow.lacking)

    def _ask_for(self, chunks: Sequence[int]) -> None:
        if self._lost is not None:
            raise failure(self._lost, self._sender, "data")
        self._lane += 1
        if self._lane >= wire.LANES:
            raise PeerLostError("too many interruptions", rank=self._sender, phase="data")
        if self._beside:
            self._trailer = None  # the sender looks again at what it sends again
        if self._feed is not None:
            self._feed.cut()
            self._feed = None
        self._way_in.close()
        for slot in self._slots:
            if slot.posted:
                self._clear(slot, abandoned=True)
        self._flow = _Flow(self._sender, chunks)
        self._way_in = self._from(self._sender)
        self._heard_at = time.monotonic()
        self._line.send(wire.Need(tuple(chunks), self._lane))

    # Chunks on

    def _learn(self, first: int, digests: tuple[bytes, ...]) -> None:
        """What the sender says that chunks should be."""
        if not self._verify:
            return
        if first + len(digests) > self._count:
            raise RemoteProtocolError(
                f"digests of {first + len(digests)} chunks, of {self._count}", rank=self._sender
            )
        self._told[first : first + len(digests)] = digests
        self._pass_on_in_turn()

    def _pass_on_in_turn(self) -> None:
        """Pass on what is right, in order. The first that is not is the last: the sender feeds the
        next receiver from there on."""
        while self._downstream is not None and (slot := self._waiting.get(self._turn)):
            mine, theirs = self._digests[self._turn], self._told[self._turn : self._turn + 1]
            if theirs == [b""]:
                return  # not known yet
            if theirs not in ([], [mine]):
                self._line.send(wire.Unlink())
                self._detach()
                return
            del self._waiting[self._turn]
            self._turn += 1
            self._pass_on(slot)

    def _pass_on(self, slot: _Slot) -> None:
        assert self._way_on is not None
        data, events = slot.data, self._events
        if not any(other.forwarding for other in self._slots):
            self._passed_at = time.monotonic()

        def report(fault: Exception | None, read: bool, digest: bytes = b"") -> None:
            events.put(Forwarded(slot, data, fault, read))

        slot.forwarding = True
        self._way_on.put(data, report)

    def _forwarded(self, event: Forwarded) -> None:
        slot = event.slot
        if slot.data is not event.data:
            return  # given up before
        self._passed_at = time.monotonic()
        slot.forwarding = False
        if event.fault is not None:
            self._downstream = None  # the sender sees to it
            self._drop_waiting()
        elif not event.read:
            self.forwarded_bytes += event.data.numel()
        self._clear(slot)

    def _detach(self) -> None:
        self._downstream = None
        self._drop_waiting()
        for slot in self._slots:
            if slot.forwarding:
                self._clear(slot, abandoned=True)

    def _drop_waiting(self) -> None:
        for slot in self._waiting.values():
            self._clear(slot)
        self._waiting.clear()

    def _check_stalls(self) -> None:
        if not self._patience:
            return
        now = time.monotonic()
        starving = (
            self._flow.posted > len(self._flow.arrived) and self._flow.upstream != self._sender
        )
        if starving and now > self._heard_at + self._patience:
            self._heard_at = now
            if self._lost is not None:
                raise failure(self._lost, self._sender, "data")
            self._line.send(wire.Stalled(self._count - len(self._missing)))
        stuck = any(slot.forwarding for slot in self._slots)
        if stuck and self._downstream is not None and now > self._passed_at + self._patience:
            self._passed_at = now
            self._line.send(wire.Blocked(self._downstream))
