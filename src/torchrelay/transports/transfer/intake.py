"""The data phase of a receive: chunks in, hashed, landed, passed on, and asked for again.

Chunks that come over the group arrive in private buffers. Those, not the caller's tensors, are what
the backend writes to: a peer that wakes up after this side has given up cannot touch live weights.
A channel can be cut, so what comes by one arrives where it belongs.
"""

from __future__ import annotations

import queue
import time
from dataclasses import dataclass
from typing import Protocol

import torch

from torchrelay.errors import TransferTimeoutError
from torchrelay.memory.gpu.kernels import digest_of
from torchrelay.memory.gpu.side import in_use, on_side_stream
from torchrelay.memory.host import at_address
from torchrelay.transports.protocol import wire
from torchrelay.transports.protocol.machines.actions import AskSender, FreeChunk, PassOn, Say
from torchrelay.transports.protocol.machines.receiver_machine import FedMachine, FeedTerms, Flow
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


@dataclass(frozen=True)
class Arrived:
    flow: Flow
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


class Intake:
    """Receives every chunk of one transfer into a landing: memory and threads for a `FedMachine`.
    `run` returns when all of them hold."""

    def __init__(self, incoming: Incoming, go: wire.Go, feed: Feed | None) -> None:
        line, landing, offer = incoming.line, incoming.landing, incoming.offer
        self._line, self._events, self._landing = line, incoming.events, landing
        self._places = landing.places()
        self._near = self._places.host  # made here, not by the thread that writes to it
        self._there = incoming.on_gpu
        self._feed = feed
        self._group, self._sender = line.group, line.peer
        self._verify, self._device, self._cells = offer.verify, offer.device, offer.cells
        self._step, self._deadline = incoming.step, incoming.deadline
        self._buffers, self._progress = incoming.resources.buffers, incoming.progress
        self._chunks = landing.chunks
        terms = FeedTerms(
            line.peer,
            len(self._chunks),
            offer.verify,
            feed is not None,
            incoming.step,
            incoming.chunk_named,
        )
        self._machine = FedMachine(terms, go, time.monotonic())
        self._largest = max(self._chunks.sizes, default=0)
        self._buffers_left = slots = IN_FLIGHT * (1 if go.downstream is None else 2)
        self._spare: list[torch.Tensor] = []
        if feed is not None:
            self._buffers_left, slots = feed.buffers, feed.room
        self._slots = [_Slot() for _ in range(min(len(self._chunks), slots))]
        self._free = list(self._slots)
        self._held: dict[int, _Slot] = {}  # chunks that the machine has
        if feed is not None:
            hashes = offer.verify and on_the_way() and not offer.cells
            self._way_in = feed.way_in(line.transfer, hashes=hashes)
        else:
            self._way_in = self._from(go.upstream, 1, notes=go.reads, may_read=incoming.may_read)
        self._way_on: Way | None = None
        if go.downstream is not None:
            self._way_on = way_on(self._group, go.downstream, go.downstream_id, 1, notes=go.notes)
        self._done_bytes = 0
        self._worker = Worker(hashers())
        self.wire_bytes = 0
        self.handed_bytes = 0  # of those, read out of the upstream's memory
        self.messages = 0

    def run(self) -> None:
        while not self._complete():
            self._post_receives()
            event = self._next(min(self._deadline.left(), self._machine.tick_seconds))
            if event is not None:
                self._handle(event)
            if self._deadline.passed and not self._complete():
                raise TransferTimeoutError(
                    f"timed out after {self._deadline.seconds:.3g} s: not all data came; "
                    f"{self._machine.done}",
                    rank=self._sender,
                    step=self._step,
                    phase="data",
                )
            self._machine.tick(time.monotonic())
            self._act()

    def finish(self) -> None:
        """Let the next receiver have the last chunks; the sender serves it otherwise."""
        machine = self._machine
        limit = time.monotonic() + (machine.patience or self._deadline.left())
        while machine.forwarding and time.monotonic() < limit:
            event = self._next(min(0.25, self._deadline.left()))
            if isinstance(event, Forwarded):
                self._forwarded(event)
            elif isinstance(event, wire.Detach):
                machine.detach()
            elif self._deadline.passed:
                break
            self._act()
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
        whole = self._machine.complete(time.monotonic())
        self._act()
        return whole

    def _next(self, timeout: float) -> object:
        try:
            return self._events.get(timeout=max(timeout, 0.001))
        except queue.Empty:
            return None

    # Events

    def _handle(self, event: object) -> None:
        now = time.monotonic()
        if isinstance(event, Arrived):
            if event.flow is not self._machine.flow:
                return  # from an upstream that was given up, into a buffer given up with it
            if event.fault is not None:
                self._machine.broke(str(event.fault), now)
            else:
                self._arrived(event.slot, event.read, event.digest)
        elif isinstance(event, Taken):
            self._taken(event)
        elif isinstance(event, Forwarded):
            self._forwarded(event)
        else:
            self._machine.heard(event, now)
        self._act()

    def _arrived(self, slot: _Slot, read: bool, known: bytes) -> None:
        data, in_place, chunk = slot.data, slot.buffer is None, slot.chunk
        self._machine.arrived(chunk, time.monotonic())
        self.messages += 1
        self.wire_bytes += data.numel()
        self.handed_bytes += data.numel() if read else 0
        slot.posted = False
        if in_place and (known or not self._verify):
            self._taken(Taken(slot, data, chunk, known, None))
            return

        def take() -> None:
            mine, fault = known, None
            try:
                later = self._verify and chunk in self._there  # hashed where it has come to lie
                if self._verify and not known and not later:
                    mine = digest_of(data, cells=self._cells)
                if not in_place:
                    with on_side_stream():
                        self._landing.write(chunk, data)
                if later:
                    mine = self._there.digests([chunk])[chunk]
            except Exception as cause:
                fault = cause
            self._events.put(Taken(slot, data, chunk, mine, fault))

        self._worker.submit(take)

    def _taken(self, event: Taken) -> None:
        if event.fault is not None:
            raise event.fault
        total, chunk = self._chunks.stream_bytes, event.chunk
        self._done_bytes = min(self._done_bytes + event.data.numel(), total)
        self._machine.done = f"{self._done_bytes} of {total} bytes done"
        self._held[chunk] = event.slot
        self._machine.landed(chunk, event.digest, time.monotonic())
        if not self._machine.missing:
            self._landing.arrived()
        self._progress(self._done_bytes, total)
        self._act()

    def _forwarded(self, event: Forwarded) -> None:
        slot = event.slot
        if slot.data is not event.data:
            return  # given up before
        self._machine.forwarded(slot.chunk, time.monotonic(), lost=event.fault is not None)

    # Actions

    def _act(self) -> None:
        """Carry out what the machine has decided."""
        actions, self._machine.actions = self._machine.actions, []
        for action in actions:
            if isinstance(action, Say):
                self._line.send(action.message)
            elif isinstance(action, FreeChunk):
                self._clear(self._held.pop(action.chunk))
            elif isinstance(action, PassOn):
                self._pass_on(self._held[action.chunk])
            elif isinstance(action, AskSender):
                self._change_upstream(action.lane)
            else:
                for slot in [slot for slot in self._slots if slot.forwarding]:
                    self._held.pop(slot.chunk, None)
                    self._clear(slot, abandoned=True)

    def _change_upstream(self, lane: int) -> None:
        """Go on from the sender itself, over the group."""
        if self._feed is not None:
            self._feed.cut()
            self._feed = None
        self._way_in.close()
        for slot in self._slots:
            if slot.posted:
                self._clear(slot, abandoned=True)
        self._way_in = self._from(self._sender, lane)

    def _from(
        self, upstream: int, lane: int, *, notes: bool = False, may_read: bool = False
    ) -> Way:
        transfer = self._line.transfer
        return way_in(self._group, upstream, transfer, lane, notes=notes, may_read=may_read)

    def _pass_on(self, slot: _Slot) -> None:
        assert self._way_on is not None
        data, events = slot.data, self._events

        def report(fault: Exception | None, read: bool, digest: bytes = b"") -> None:
            events.put(Forwarded(slot, data, fault))

        slot.forwarding = True
        self._way_on.put(data, report)

    # Memory

    def _post_receives(self) -> None:
        flow, events = self._machine.flow, self._events  # a receive that never ends keeps these
        while self._free and (chunk := self._machine.next_chunk()) is not None:
            slot = self._free[0]
            if not self._make_room(slot, chunk):
                return
            self._free.pop(0)
            slot.chunk, slot.posted = chunk, True
            self._machine.awaited()

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
