"""The sending side of a live transfer: offer, join, data, trailer, acknowledgement.

One loop in the caller's thread takes events from watcher threads and posts chunks; it decides
nothing about the schedule, which is `fanout`'s.
"""

from __future__ import annotations

import queue
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from torchrelay.errors import (
    PeerLostError,
    PeerRefusedError,
    RelayError,
    StepMismatchError,
    TransferTimeoutError,
)
from torchrelay.state import codec
from torchrelay.state.digest import digest
from torchrelay.state.snapshot import Snapshot
from torchrelay.transports import fanout, wire
from torchrelay.transports.buffers import IN_FLIGHT, BufferPool
from torchrelay.transports.clock import Deadline, Stopwatch
from torchrelay.transports.group import GRACE, Line, Post, Watcher

GATHER = 0.05  # seconds to hear from all who starve before choosing whom to feed


@dataclass
class Peer:
    """One receiver as the sender sees it."""

    rank: int
    line: Line
    stage: str = "called"  # called, joined, accepted, done, refused or failed
    reason: str = ""
    refusal: wire.Refuse | None = None
    joined_at: float = 0.0


@dataclass
class _Stream:
    """Chunks on their way to one receiver on one lane."""

    rank: int
    tag: int
    todo: deque[int]
    watcher: Watcher
    in_flight: int = 0
    moved_at: float = field(default_factory=time.monotonic)
    alive: bool = True


@dataclass(frozen=True)
class _Message:
    rank: int
    line: Line
    message: wire.Message | Exception


@dataclass(frozen=True)
class _Sent:
    stream: _Stream
    chunk: int
    buffer: torch.Tensor | None
    fault: Exception | None


class Sending:
    """One `send` call. `run` returns when every receiver is done or known to have failed."""

    def __init__(
        self,
        post: Post,
        snapshot: Snapshot,
        receivers: Sequence[int],
        *,
        deadline: Deadline,
        window: float,
        verify: bool,
        buffers: BufferPool,
        watch: Stopwatch,
        progress: Callable[[int, int], None],
    ) -> None:
        self._post = post
        self._group = post.group
        self._me = post.group.rank()
        self._snapshot = snapshot
        self._chunks = snapshot.chunks
        self._step = snapshot.manifest.step
        self._deadline = deadline
        self._window = window
        self._verify = verify
        self._buffers = buffers
        self._watch = watch
        self._progress = progress
        self._events: queue.SimpleQueue[_Message | _Sent] = queue.SimpleQueue()
        self.peers = {rank: Peer(rank, post.call(rank)) for rank in receivers}
        self._digests: list[bytes | None] = [None] * len(self._chunks)
        self._unhashed = len(self._chunks) if verify else 0
        self._streams: list[_Stream] = []
        self._hops: list[fanout.Hop] = []
        self._patience = 0.0
        self._stalled: set[int] = set()
        self._choose_at = 0.0
        self._trailer_sent = False
        self.wire_bytes = 0
        self.messages = 0
        self.rerouted: list[int] = []

    def run(self) -> None:
        for peer in self.peers.values():
            self._listen(peer)
        try:
            with self._watch("join"):
                self._join()
            if self._in("accepted"):
                with self._watch("data"):
                    self._transfer()
        except BaseException as fault:
            self._abort(f"the sender gave up: {fault}")
            raise
        self._raise_if_nobody()

    # Joining

    def _join(self) -> None:
        """Wait for receivers until all have answered, or the window closes on those who came."""
        closes = time.monotonic() + self._window
        while self._in("called", "joined") and not self._deadline.passed:
            now = time.monotonic()
            if now >= closes and self._in("accepted"):
                late = [p for p in self._in("joined") if now < p.joined_at + self._window]
                if not late:
                    break
            self._take(min(self._deadline.left(), max(closes - now, 0.0) or 0.05))
        for peer in self._in("called"):
            waited = min(self._window if self._in("accepted") else 1e18, self._deadline.seconds)
            peer.stage, peer.reason = "failed", f"did not join within {waited:.3g} s"
            self._post.hang_up(peer.line)
        for peer in self._in("joined"):
            self._fail(peer, "joined, but did not answer the offer")

    def _joined(self, peer: Peer, join: wire.Join) -> None:
        peer.stage, peer.joined_at = "joined", time.monotonic()
        peer.line.send(wire.Offer(self._manifest(), self._verify))

    def _manifest(self) -> bytes:
        if not hasattr(self, "_encoded"):
            self._encoded = codec.encode(self._snapshot.manifest)
        return self._encoded

    # Data

    def _transfer(self) -> None:
        accepted = [peer.rank for peer in self._in("accepted")]
        self._hops = fanout.chain(self._me, accepted)
        # With one receiver there is nobody to protect from a slow one: the deadline alone counts.
        if len(accepted) > 1:
            self._patience = min(self._window, self._deadline.seconds / 4)
        for hop in self._hops:
            behind = None if hop.downstream is None else self.peers[hop.downstream]
            self.peers[hop.rank].line.send(
                wire.Go(
                    hop.upstream,
                    hop.downstream,
                    behind.line.transfer if behind else 0,
                    self._patience,
                )
            )
        self._open_stream(accepted[0], 1, range(len(self._chunks)))
        while self._in("accepted"):
            self._pump()
            self._send_trailer()
            if self._deadline.passed:
                for peer in self._in("accepted"):
                    self._fail(peer, f"not done after {self._deadline.seconds:.3g} s")
                break
            self._take(min(self._deadline.left(), self._tick()))
            self._check_stalls()
        for peer in self._in("done"):
            peer.line.delivered.wait(GRACE)
        for stream in self._streams:
            stream.watcher.close()

    def _tick(self) -> float:
        return min(self._patience / 4, 0.25) if self._patience else 1.0

    def _open_stream(self, rank: int, lane: int, chunks: Sequence[int]) -> None:
        tag = wire.tag(self.peers[rank].line.transfer, lane)
        self._streams.append(_Stream(rank, tag, deque(chunks), Watcher("data-out")))

    def _pump(self) -> None:
        """Post chunks on every stream that has room."""
        for stream in self._streams:
            while stream.alive and stream.todo and stream.in_flight < IN_FLIGHT:
                self._post_chunk(stream, stream.todo.popleft())

    def _post_chunk(self, stream: _Stream, index: int) -> None:
        data, buffer = self._snapshot.view(index), None
        if data is None:
            nbytes = self._chunks.sizes[index]
            buffer = self._buffers.take(max(self._chunks.sizes))
            data = buffer[:nbytes]
            self._snapshot.read(index, data)
        if stream.in_flight == 0:
            stream.moved_at = time.monotonic()
        stream.in_flight += 1
        self.wire_bytes += data.numel()
        self.messages += 1

        def report(fault: Exception | None) -> None:
            self._events.put(_Sent(stream, index, buffer, fault))

        try:
            stream.watcher.watch(self._group.send([data], stream.rank, stream.tag), data, report)
        except RuntimeError as fault:
            report(fault)
        if self._verify and self._digests[index] is None:
            # While the chunk is on its way: hashing and sending share no core.
            self._digests[index] = digest(data)
            self._unhashed -= 1

    def _send_trailer(self) -> None:
        if self._trailer_sent or self._unhashed:
            return
        if self._verify or not any(s.todo or s.in_flight for s in self._streams):
            self._trailer_sent = True
            digests = tuple(d for d in self._digests if d is not None)
            for peer in self._in("accepted"):
                peer.line.send(wire.Trailer(digests))

    def _check_stalls(self) -> None:
        now = time.monotonic()
        if self._patience:
            for stream in self._streams:
                if stream.alive and stream.in_flight and now > stream.moved_at + self._patience:
                    self._fail(self.peers[stream.rank], f"took no data for {self._patience:.3g} s")
        if self._stalled and now >= self._choose_at:
            rank = fanout.first_starving(self._hops, self._stalled, self._me)
            self._stalled.clear()
            if rank is not None:
                self.peers[rank].line.send(wire.Reroute())

    # Events

    def _take(self, timeout: float) -> None:
        """Handle one event, and those that are there with it."""
        try:
            event = self._events.get(timeout=max(timeout, 0.001))
            while True:
                self._handle(event)
                event = self._events.get_nowait()
        except queue.Empty:
            return

    def _handle(self, event: _Message | _Sent) -> None:
        if isinstance(event, _Sent):
            self._sent(event)
            return
        peer = self.peers[event.rank]
        if event.line is not peer.line or peer.stage in ("done", "refused", "failed"):
            return
        message = event.message
        if isinstance(message, Exception):
            if peer.stage == "called" and peer.line.adopted:
                self._ring_again(peer)
            else:
                self._fail(peer, str(message))
        elif isinstance(message, wire.Join) and peer.stage == "called":
            self._joined(peer, message)
        elif isinstance(message, wire.Accept) and peer.stage == "joined":
            peer.stage = "accepted"
        elif isinstance(message, wire.Refuse):
            peer.stage, peer.reason, peer.refusal = "refused", message.message, message
            peer.line.send(wire.Fin())
        elif isinstance(message, wire.Leave):
            self._left(peer, message)
        elif isinstance(message, wire.Done) and peer.stage == "accepted":
            peer.stage = "done"
            peer.line.send(wire.Fin())
        elif isinstance(message, wire.Need) and peer.stage == "accepted":
            self._need(peer, message)
        elif isinstance(message, wire.Stalled):
            self._stalled.add(peer.rank)
            self._choose_at = time.monotonic() + GATHER
        elif isinstance(message, wire.Blocked):
            blocked = self.peers.get(message.rank)
            fed = any(hop[:2] == (message.rank, peer.rank) for hop in self._hops)
            if fed and blocked is not None and blocked.stage == "accepted":
                self._fail(blocked, f"took no data from rank {peer.rank}")
        else:
            self._fail(peer, f"sent {type(message).__name__} out of turn")

    def _left(self, peer: Peer, message: wire.Leave) -> None:
        if peer.stage == "accepted" or self._hops:
            self._fail(peer, f"gave up: {message.message}")
            return
        # A receiver of an earlier call that is gone. Ring again; a new call may be waiting.
        peer.line.send(wire.Fin())
        self._ring_again(peer)

    def _ring_again(self, peer: Peer) -> None:
        peer.line, peer.stage = self._post.call(peer.rank), "called"
        self._listen(peer)

    def _need(self, peer: Peer, need: wire.Need) -> None:
        known = range(len(self._chunks))
        if not 1 < need.lane < wire.LANES or any(index not in known for index in need.chunks):
            self._fail(peer, "asked for chunks that do not exist")
            return
        if not need.chunks:
            return
        self.rerouted.append(peer.rank)
        self._hops = fanout.served_by(self._hops, peer.rank, self._me)
        for stream in self._streams:
            if stream.rank == peer.rank:
                stream.alive = False
        self._open_stream(peer.rank, need.lane, need.chunks)

    def _sent(self, event: _Sent) -> None:
        stream = event.stream
        stream.in_flight -= 1
        stream.moved_at = time.monotonic()
        if event.fault is not None:
            peer = self.peers[stream.rank]
            if stream.alive and peer.stage == "accepted":
                self._fail(peer, f"connection lost: {event.fault}")
            return
        if event.buffer is not None:
            self._buffers.give(event.buffer)
        if stream is self._streams[0]:
            done = self._chunks.offsets[event.chunk] + self._chunks.sizes[event.chunk]
            self._progress(done, self._chunks.stream_bytes)

    def _fail(self, peer: Peer, reason: str) -> None:
        """Give up on one receiver, and see to those it fed."""
        peer.stage, peer.reason = "failed", reason
        peer.line.send(wire.Abort(f"the sender gave up on this rank: {reason}"))
        for stream in self._streams:
            if stream.rank == peer.rank:
                stream.alive = False
        lost = {p.rank for p in self.peers.values() if p.stage == "failed"}
        settled = {p.rank for p in self.peers.values() if p.stage in ("done", "refused")}
        for rank in fanout.orphans(self._hops, lost, settled):
            self._hops = fanout.served_by(self._hops, rank, self._me)
            self.peers[rank].line.send(wire.Reroute())

    # Ends

    def _listen(self, peer: Peer) -> None:
        line, rank = peer.line, peer.rank
        line.listen(lambda message: self._events.put(_Message(rank, line, message)))

    def _in(self, *stages: str) -> list[Peer]:
        return [peer for peer in self.peers.values() if peer.stage in stages]

    def _abort(self, reason: str) -> None:
        for peer in self._in("joined", "accepted"):
            peer.stage, peer.reason = "failed", reason
            peer.line.send(wire.Abort(reason))
        for peer in self._in("called"):
            peer.stage = "failed"
            self._post.hang_up(peer.line)
        for stream in self._streams:
            stream.watcher.close()

    def _raise_if_nobody(self) -> None:
        """The error that `send` ends with: a refusal, or that nobody got the state."""
        refused = self._in("refused")
        if refused:
            raise self._refusal(refused[0])
        if self._in("done") or not self.peers:
            return
        peer = self._in("failed")[0]
        reasons = "; ".join(f"rank {p.rank} {p.reason}" for p in self._in("failed"))
        timed_out = self._deadline.passed or "did not" in peer.reason
        kind: type[RelayError] = TransferTimeoutError if timed_out else PeerLostError
        word = "timed out" if timed_out else "failed"
        sent = f"{self.wire_bytes} of {self._chunks.stream_bytes} bytes sent"
        raise kind(
            f"send {word}, no receiver got the state: {reasons}; {sent}",
            rank=peer.rank,
            step=self._step,
            phase=self._watch.phase,
        )

    def _refusal(self, peer: Peer) -> RelayError:
        refusal = peer.refusal
        assert refusal is not None
        kind: type[RelayError] = StepMismatchError if refusal.kind == "step" else PeerRefusedError
        return kind(
            f"rank {peer.rank} refused the state: {refusal.message}",
            rank=peer.rank,
            step=self._step,
            phase="join",
            path=refusal.path,
        )
