"""The receiving side of a live transfer.

Chunks arrive in private buffers, are passed on to the next receiver, hashed, and handed to the
landing. Buffers, not the caller's tensors, are what the backend writes to: a peer that wakes up
after this side has given up cannot touch live weights.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from torchrelay.errors import (
    DigestError,
    ManifestError,
    PeerAbortedError,
    PeerLostError,
    RelayError,
    RemoteProtocolError,
    StateError,
    StepMismatchError,
    TornStateError,
    TransferTimeoutError,
    UnsupportedLeafError,
)
from torchrelay.state import codec
from torchrelay.state.digest import digest
from torchrelay.state.landing import Landed, Landing
from torchrelay.state.manifest import Manifest
from torchrelay.transports import wire
from torchrelay.transports.buffers import IN_FLIGHT, BufferPool
from torchrelay.transports.clock import Deadline, Stopwatch
from torchrelay.transports.group import Bell, Line, Post, Watcher

GRACE = 1.0
RETRIES = 2  # times a chunk whose digest does not hold is asked for again
CLOSED = (
    "the group's connection to this rank is closed for good: make a new process group with the "
    "ranks that live (torch.distributed.new_group) before the next transfer"
)


def answer(post: Post, sender: int, deadline: Deadline) -> int:
    """The first message of a sender: a torch sender's metadata length (positive), or our prelude.

    On a timeout the posted receive stays for the next call.
    """
    bell: Bell = post.bell(sender)
    if not bell.rung.wait(deadline.left()):
        post.leave_bell(sender, bell)
        raise TransferTimeoutError(
            f"timed out: nothing came from rank {sender} within {deadline.seconds:.3g} s",
            rank=sender,
            phase="join",
        )
    if bell.fault is not None or bell.value is None:
        raise PeerLostError(f"connection lost: {bell.fault}; {CLOSED}", rank=sender, phase="join")
    return bell.value


class _Slot:
    """A buffer that takes one chunk at a time and is passed on from."""

    __slots__ = ("buffer", "chunk", "data", "forwarding", "processed")

    def __init__(self, buffer: torch.Tensor) -> None:
        self.buffer = buffer
        self.data = buffer
        self.chunk = -1
        self.forwarding = False
        self.processed = False


class _Flow:
    """Chunks from one upstream on one lane, in a known order."""

    def __init__(self, upstream: int, tag: int, order: Sequence[int]) -> None:
        self.upstream, self.tag, self.order = upstream, tag, order
        self.posted = 0
        self.arrived = 0
        self.watcher = Watcher("data-in")


@dataclass(frozen=True)
class _Arrived:
    flow: _Flow
    slot: _Slot
    fault: Exception | None


@dataclass(frozen=True)
class _Forwarded:
    slot: _Slot
    data: torch.Tensor
    fault: Exception | None


_Event = _Arrived | _Forwarded | wire.Message | Exception


class Receiving:
    """One `recv` call, from the join on. `run` returns what landed."""

    def __init__(
        self,
        post: Post,
        sender: int,
        transfer: int,
        *,
        step: int | None,
        land: Callable[[Manifest], Landing],
        deadline: Deadline,
        buffers: BufferPool,
        watch: Stopwatch,
        progress: Callable[[int, int], None],
    ) -> None:
        self._group = post.group
        self._sender = sender
        self._line = Line(post.group, sender, transfer)
        self._step = step
        self._land = land
        self._deadline = deadline
        self._buffers = buffers
        self._watch = watch
        self._progress = progress
        self._events: queue.SimpleQueue[_Event] = queue.SimpleQueue()
        self._landing: Landing | None = None
        self._said_goodbye = False
        self._done_bytes = 0
        self._total_bytes = 0
        self.manifest: Manifest | None = None
        self.wire_bytes = 0
        self.forwarded_bytes = 0
        self.messages = 0
        self.retried: list[int] = []

    def run(self) -> Landed:
        self._line.listen(self._events.put)
        try:
            with self._watch("join"):
                self._line.send(wire.Join(wire.MINOR, self._step))
                landing, verify = self._consider(self._expect(wire.Offer))
                self._line.send(wire.Accept())
                go = self._expect(wire.Go)
            with self._watch("data"):
                self._receive(landing, go, verify)
            with self._watch("commit"):
                landed = landing.commit()
            self._goodbye(wire.Done())
            with self._watch("pass on"):
                self._finish_forwarding()
        except BaseException as fault:
            self._goodbye(wire.Leave(str(fault)[:500]))
            if self._landing is not None and self._landing.torn and isinstance(fault, Exception):
                raise TornStateError(
                    "the destination is part old, part new: receive into it again, or load it",
                    rank=self._sender,
                    step=self.manifest.step if self.manifest else None,
                    phase=self._watch.phase,
                ) from fault
            raise
        self._line.delivered.wait(GRACE)
        return landed

    # Joining

    def _consider(self, offer: wire.Offer) -> tuple[Landing, bool]:
        """Look at the offer; refuse it with a reason, or prepare to land it."""
        try:
            manifest = codec.decode(offer.manifest)
            self.manifest = manifest
            if self._step is not None and manifest.step != self._step:
                raise StepMismatchError(
                    f"step {manifest.step} is offered, step {self._step} was asked for",
                    rank=self._sender,
                    step=manifest.step,
                    phase="join",
                )
            self._landing = self._land(manifest)
        except (StateError, StepMismatchError, ManifestError) as fault:
            fault.rank = self._sender
            fault.phase = "join"
            kinds = {
                StepMismatchError: "step",
                ManifestError: "manifest",
                UnsupportedLeafError: "unsupported",
            }
            kind = kinds.get(type(fault), "mismatch")
            self._goodbye(wire.Refuse(kind, fault.message[:2000], fault.path))
            raise
        return self._landing, offer.verify

    def _expect(self, kind: type[wire.Offer] | type[wire.Go]) -> wire.Message:  # type: ignore[misc]
        message = self._next(self._deadline.left())
        if message is None:
            raise self._timeout(f"rank {self._sender} did not send {kind.__name__.lower()}")
        if not isinstance(message, kind):
            self._control(message)
            raise RemoteProtocolError(
                f"expected {kind.__name__}, got {type(message).__name__}", rank=self._sender
            )
        return message

    # Data

    def _receive(self, landing: Landing, go: wire.Go, verify: bool) -> None:
        self._chunks = landing.chunks
        self._count = len(landing.chunks)
        self._total_bytes = landing.chunks.stream_bytes
        self._digests: list[bytes] = [b""] * self._count
        self._missing = set(range(self._count))
        self._trailer: tuple[bytes, ...] | None = None
        self._verify = verify
        self._patience = go.patience
        self._downstream = go.downstream
        self._downstream_tag = wire.tag(go.downstream_id, 1)
        self._forwarder = Watcher("data-on") if go.downstream is not None else None
        self._lane = 1
        self._largest = max(landing.chunks.sizes, default=0)
        slots = min(self._count, IN_FLIGHT * (1 if go.downstream is None else 2))
        self._slots = [_Slot(self._buffers.take(self._largest)) for _ in range(slots)]
        self._free = list(self._slots)
        self._flow = _Flow(go.upstream, wire.tag(self._line.transfer, 1), range(self._count))
        self._heard_at = time.monotonic()
        self._passed_at = time.monotonic()
        while True:
            self._post_receives()
            if not self._missing and self._trailer is not None and self._holds():
                break
            event = self._next(min(self._deadline.left(), self._tick()))
            if event is not None:
                self._handle(event, landing)
            elif self._deadline.passed:
                raise self._timeout("the data did not all come")
            self._check_stalls()
        self._flow.watcher.close()

    def _tick(self) -> float:
        return min(self._patience / 4, 0.25) if self._patience else 1.0

    def _post_receives(self) -> None:
        flow = self._flow
        while self._free and flow.posted < len(flow.order):
            slot = self._free.pop(0)
            slot.chunk = flow.order[flow.posted]
            slot.data = slot.buffer[: self._chunks.sizes[slot.chunk]]
            slot.processed = slot.forwarding = False
            flow.posted += 1

            def report(fault: Exception | None, flow: _Flow = flow, slot: _Slot = slot) -> None:
                self._events.put(_Arrived(flow, slot, fault))

            try:
                work = self._group.recv([slot.data], flow.upstream, flow.tag)
                flow.watcher.watch(work, slot.data, report)
            except RuntimeError as fault:
                report(fault)
                return

    def _handle(self, event: _Event, landing: Landing) -> None:
        if isinstance(event, _Arrived):
            if event.flow is not self._flow:
                return  # from an upstream that was given up; its buffer was given up with it
            if event.fault is not None:
                self._change_upstream(str(event.fault))
                return
            self._arrived(event.slot, landing)
        elif isinstance(event, _Forwarded):
            self._forwarded(event)
        else:
            self._control(event)

    def _arrived(self, slot: _Slot, landing: Landing) -> None:
        self._flow.arrived += 1
        self._heard_at = time.monotonic()
        self.messages += 1
        self.wire_bytes += slot.data.numel()
        # Before hashing and landing, so that the next receiver waits for neither.
        if self._lane == 1 or slot.chunk not in self.retried:
            self._pass_on(slot)
        if self._verify:
            self._digests[slot.chunk] = digest(slot.data)
        landing.write(slot.chunk, slot.data)
        self._missing.discard(slot.chunk)
        self._done_bytes += slot.data.numel()
        self._progress(min(self._done_bytes, self._total_bytes), self._total_bytes)
        slot.processed = True
        if not slot.forwarding:
            self._free.append(slot)

    def _pass_on(self, slot: _Slot) -> None:
        if self._downstream is None or self._forwarder is None:
            return
        data = slot.data
        if not any(other.forwarding for other in self._slots):
            self._passed_at = time.monotonic()

        def report(fault: Exception | None) -> None:
            self._events.put(_Forwarded(slot, data, fault))

        slot.forwarding = True
        try:
            work = self._group.send([data], self._downstream, self._downstream_tag)
        except RuntimeError as fault:
            report(fault)
            return
        self._forwarder.watch(work, data, report)

    def _forwarded(self, event: _Forwarded) -> None:
        slot = event.slot
        if slot.data is not event.data:
            return  # given up before
        self._passed_at = time.monotonic()
        slot.forwarding = False
        if event.fault is not None:
            self._downstream = None
        else:
            self.forwarded_bytes += event.data.numel()
        if slot.processed:
            self._free.append(slot)

    def _change_upstream(self, reason: str) -> None:
        """Go on from the sender itself with what has not arrived."""
        if self._flow.upstream == self._sender:
            raise PeerLostError(
                f"connection lost after {self._done_bytes} of {self._total_bytes} bytes: "
                f"{reason}; {CLOSED}",
                rank=self._sender,
                step=self.manifest.step if self.manifest else None,
                phase="data",
            )
        self._ask_for(list(self._flow.order[self._flow.arrived :]))

    def _ask_for(self, chunks: list[int]) -> None:
        self._lane += 1
        if self._lane >= wire.LANES:
            raise PeerLostError("too many interruptions", rank=self._sender, phase="data")
        self._flow.watcher.close()
        for slot in self._slots:
            if slot not in self._free and not slot.processed and slot.data is not slot.buffer:
                # Still posted to the old upstream: its memory is not ours to use again.
                slot.buffer = self._buffers.take(self._largest)
                slot.data = slot.buffer
                self._free.append(slot)
        tag = wire.tag(self._line.transfer, self._lane)
        self._flow = _Flow(self._sender, tag, chunks)
        self._heard_at = time.monotonic()
        if chunks:
            self._line.send(wire.Need(tuple(chunks), self._lane))

    def _holds(self) -> bool:
        """Whether every chunk is the one that was sent; asks again for those that are not."""
        if not self._verify:
            return True
        assert self._trailer is not None
        if len(self._trailer) != self._count:
            raise RemoteProtocolError(
                f"{len(self._trailer)} digests for {self._count} chunks", rank=self._sender
            )
        pairs = zip(self._digests, self._trailer, strict=True)
        bad = [index for index, (mine, theirs) in enumerate(pairs) if mine != theirs]
        if not bad:
            return True
        if len(self.retried) >= RETRIES * len(bad):
            raise DigestError(
                f"chunk {bad[0]} does not have the digest it was sent with, after "
                f"{RETRIES} more tries: was the state changed while it was sent?",
                rank=self._sender,
                step=self.manifest.step if self.manifest else None,
                phase="data",
            )
        self.retried += bad
        self._missing.update(bad)
        self._ask_for(bad)
        return False

    def _check_stalls(self) -> None:
        if not self._patience:
            return
        now = time.monotonic()
        waiting = self._flow.posted > self._flow.arrived
        if waiting and self._flow.upstream != self._sender:
            if now > self._heard_at + self._patience:
                self._heard_at = now
                self._line.send(wire.Stalled(self._count - len(self._missing)))
        stuck = [slot for slot in self._slots if slot.forwarding]
        if stuck and now > self._passed_at + self._patience and self._downstream is not None:
            self._line.send(wire.Blocked(self._downstream))
            self._give_up_downstream(stuck)

    def _give_up_downstream(self, stuck: list[_Slot]) -> None:
        self._downstream = None
        for slot in stuck:
            slot.forwarding = False
            slot.buffer = self._buffers.take(self._largest)
            slot.data = slot.buffer
            if slot.processed:
                self._free.append(slot)

    def _finish_forwarding(self) -> None:
        """Let the next receiver have the last chunks; it is served by the sender otherwise."""
        limit = time.monotonic() + (self._patience or self._deadline.left())
        stuck = [slot for slot in self._slots if slot.forwarding]
        while stuck and time.monotonic() < limit and not self._deadline.passed:
            event = self._next(min(0.25, self._deadline.left()))
            if isinstance(event, _Forwarded):
                self._forwarded(event)
            stuck = [slot for slot in self._slots if slot.forwarding]
        if self._forwarder is not None:
            self._forwarder.close()
        for slot in self._slots:
            if slot not in stuck and slot in self._free:
                self._buffers.give(slot.buffer)

    # Messages

    def _next(self, timeout: float) -> _Event | None:
        try:
            return self._events.get(timeout=max(timeout, 0.001))
        except queue.Empty:
            return None

    def _control(self, message: _Event) -> None:
        if isinstance(message, wire.Trailer):
            self._trailer = message.digests
        elif isinstance(message, wire.Reroute):
            if self._flow.upstream != self._sender:
                self._change_upstream("the sender said so")
        elif isinstance(message, wire.Abort):
            raise PeerAbortedError(message.message, rank=self._sender, phase=self._watch.phase)
        elif isinstance(message, RelayError):
            message.phase = self._watch.phase
            if isinstance(message, PeerLostError):
                message.message = f"{message.message}; {CLOSED}"
            raise message
        else:
            raise RemoteProtocolError(
                f"{type(message).__name__} out of turn", rank=self._sender, phase=self._watch.phase
            )

    def _goodbye(self, message: wire.Message) -> None:
        if not self._said_goodbye:
            self._said_goodbye = True
            self._line.send(message)

    def _timeout(self, what: str) -> TransferTimeoutError:
        return TransferTimeoutError(
            f"timed out after {self._deadline.seconds:.3g} s: {what}; "
            f"{self._done_bytes} of {self._total_bytes} bytes done",
            rank=self._sender,
            step=self.manifest.step if self.manifest else self._step,
            phase=self._watch.phase,
        )
