"""The sending side of a live transfer: offer, join, data, trailer, acknowledgement.

One loop in the caller's thread takes events from watcher threads and posts chunks; it decides
nothing about the schedule, which is `fanout`'s.
"""

from __future__ import annotations

import queue
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from torchrelay.errors import StateError, TransferTimeoutError
from torchrelay.state import codec
from torchrelay.state.digest import digest
from torchrelay.state.snapshot import Snapshot
from torchrelay.transports import fanout, wire
from torchrelay.transports.buffers import IN_FLIGHT, BufferPool
from torchrelay.transports.c10d import Watcher
from torchrelay.transports.clock import Deadline, Stopwatch
from torchrelay.transports.group import GRACE, Line, Post
from torchrelay.transports.peers import Peer, outcome
from torchrelay.transports.worker import Worker

GATHER = 2  # ticks to hear from all who are stuck before judging who is the cause


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


class _Lease:
    """A packed chunk's buffer, given back when it is both sent and hashed."""

    def __init__(self, buffer: torch.Tensor, uses: int) -> None:
        self.buffer, self.uses = buffer, uses


@dataclass(frozen=True)
class _Hashed:
    chunk: int
    digest: bytes
    lease: _Lease | None


@dataclass(frozen=True)
class _Message:
    rank: int
    line: Line
    message: wire.Message | Exception


@dataclass(frozen=True)
class _Sent:
    stream: _Stream
    chunk: int
    lease: _Lease | None
    fault: Exception | None


_Event = _Message | _Sent | _Hashed


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
        join_timeout: float,
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
        self._device = post.carrier({storage.device for storage in snapshot.manifest.storages})
        self._deadline = deadline
        self._window = window
        self._join_timeout = join_timeout
        self._verify = verify
        self._buffers = buffers
        self._watch = watch
        self._progress = progress
        self._events: queue.SimpleQueue[_Event] = queue.SimpleQueue()
        self._worker = Worker()
        self.peers = {rank: Peer(rank, post.call(rank)) for rank in receivers}
        self._digests: list[bytes | None] = [None] * len(self._chunks)
        self._unhashed = len(self._chunks) if verify else 0
        self._hashing: set[int] = set()
        self._streams: list[_Stream] = []
        self._hops: list[fanout.Hop] = []
        self._patience = 0.0
        self._joining = True
        self._blocked: set[int] = set()
        self._starving: set[int] = set()
        self._judge_at = float("inf")
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
                with self._watch("data"), self._alone():
                    self._transfer()
        except BaseException as cause:
            self._abort(f"the sender gave up: {cause}")
            raise
        finally:
            self._worker.stop()
        sent = f"{self.wire_bytes} of {self._chunks.stream_bytes} bytes sent"
        fault = outcome(self.peers.values(), sent=sent, step=self._step, phase=self._watch.phase)
        if fault is not None:
            raise fault

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Nobody else sends through a backend without tags, from here until the data is over."""
        if self._device == "cpu":
            yield
            return
        if not self._post.one_at_a_time.acquire(timeout=self._deadline.left()):
            raise TransferTimeoutError(
                "timed out: another transfer on this group did not end", phase="data"
            )
        try:
            yield
        finally:
            self._post.one_at_a_time.release()

    # Joining

    def _join(self) -> None:
        """Wait for receivers until all have answered, or the window closes on those who came."""
        begun = time.monotonic()
        while self._in("called", "joined"):
            left = min(self._join_ends(begun) - time.monotonic(), self._deadline.left())
            if left <= 0:
                break
            self._take(left)
        self._joining = False
        absent, silent = self._in("called"), self._in("joined")
        for peer in absent:
            peer.stage, peer.late = "failed", True
            peer.reason = f"did not join within {time.monotonic() - begun:.3g} s"
        for event in self._hang_up(absent):
            self._handle(event)
        for peer in silent:
            if peer.stage == "joined":
                self._fail(peer, "joined, but did not answer the offer", late=True)

    def _join_ends(self, begun: float) -> float:
        """Until when to wait. The first to come waits a window for the others to come, and as long
        for each that came to answer; it must not lose to them the time to be served in.
        """
        here = self._in("joined", "accepted", "refused")
        if not here:
            return begun + self._join_timeout
        if not self._in("accepted", "refused"):
            return float("inf")
        waits = [min(peer.joined_at for peer in here), *(p.joined_at for p in self._in("joined"))]
        end = time.monotonic() + self._deadline.left()
        return max(came + min(self._window, (end - came) / 2) for came in waits)

    def _hang_up(self, peers: Sequence[Peer]) -> list[_Event]:
        """Leave the lines of absent receivers to the next call, with what was said on them since.

        Returns the events that concern others.
        """
        said: dict[Line, list[wire.Message | Exception]] = {peer.line: [] for peer in peers}
        others: list[_Event] = []
        for line in said:
            line.listen(None)
        while not self._events.empty():
            event = self._events.get()
            if isinstance(event, _Message) and event.line in said:
                said[event.line].append(event.message)
            else:
                others.append(event)
        for line, messages in said.items():
            line.put_back(messages)
            self._post.hang_up(line)
        return others

    def _joined(self, peer: Peer, join: wire.Join) -> None:
        peer.stage, peer.joined_at = "joined", time.monotonic()
        peer.line.send(wire.Offer(self._manifest(), self._verify, self._device))

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
                    self._fail(peer, f"not done after {self._deadline.seconds:.3g} s", late=True)
                break
            self._take(min(self._deadline.left(), self._tick()))
            self._check_stalls()
        ends = time.monotonic() + GRACE
        for peer in self._in("done"):
            peer.line.delivered.wait(max(0.0, ends - time.monotonic()))
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
        data, lease = self._snapshot.view(index, self._device), None
        hashing = self._verify and index not in self._hashing
        if data is None:
            buffer = self._buffers.take(max(self._chunks.sizes), self._device)
            lease = _Lease(buffer, uses=2 if hashing else 1)
            data = buffer[: self._chunks.sizes[index]]
            self._snapshot.read(index, data)
        if stream.in_flight == 0:
            stream.moved_at = time.monotonic()
        stream.in_flight += 1
        self.wire_bytes += data.numel()
        self.messages += 1

        def report(fault: Exception | None) -> None:
            self._events.put(_Sent(stream, index, lease, fault))

        try:
            stream.watcher.watch(self._group.send([data], stream.rank, stream.tag), data, report)
        except RuntimeError as fault:
            report(fault)
        if hashing:
            self._hashing.add(index)
            self._worker.submit(lambda: self._events.put(_Hashed(index, digest(data), lease)))

    def _send_trailer(self) -> None:
        if self._trailer_sent or self._unhashed:
            return
        # Without digests nothing tells bytes that changed on their way: they must have left.
        if self._verify or not any(s.alive and (s.todo or s.in_flight) for s in self._streams):
            self._trailer_sent = True
            if (path := self._snapshot.changed()) is not None:
                raise StateError(
                    "changed while it was sent: keep the state as it is until send returns",
                    step=self._step,
                    phase="data",
                    path=path,
                )
            digests = tuple(d for d in self._digests if d is not None)
            for peer in self._in("accepted"):
                peer.line.send(wire.Trailer(digests))

    def _check_stalls(self) -> None:
        if not self._patience:
            return
        now = time.monotonic()
        for peer in self._in("accepted"):
            if peer.line.unanswered() > self._patience:
                self._fail(peer, f"took no message for {self._patience:.3g} s")
            elif now > peer.knocked_at + self._patience / 2:
                peer.knocked_at = now
                peer.line.send(wire.Knock())
        for stream in self._streams:
            if stream.alive and stream.in_flight and now > stream.moved_at + self._patience:
                stream.moved_at = now
                self._note(self._blocked, stream.rank)
        if now >= self._judge_at:
            self._judge()

    def _note(self, stuck: set[int], rank: int) -> None:
        stuck.add(rank)
        self._judge_at = min(self._judge_at, time.monotonic() + GATHER * self._tick())

    def _judge(self) -> None:
        """Give up on whoever holds up others, and feed who starves."""
        for rank in fanout.culprits(self._hops, self._blocked):
            if self.peers[rank].stage == "accepted":
                self._fail(self.peers[rank], f"took no data for {self._patience:.3g} s")
        starving = fanout.first_starving(self._hops, self._starving, self._me)
        if starving is not None and self.peers[starving].stage == "accepted":
            self.peers[starving].line.send(wire.Reroute())
        self._blocked.clear()
        self._starving.clear()
        self._judge_at = float("inf")

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

    def _handle(self, event: _Event) -> None:
        if isinstance(event, _Sent):
            self._sent(event)
            return
        if isinstance(event, _Hashed):
            self._digests[event.chunk] = event.digest
            self._unhashed -= 1
            self._release(event.lease)
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
        elif isinstance(message, wire.Need) and peer.stage == "accepted" and self._hops:
            self._need(peer, message)
        elif isinstance(message, wire.Stalled):
            self._note(self._starving, peer.rank)
        elif isinstance(message, wire.Blocked):
            if any(hop[:2] == (message.rank, peer.rank) for hop in self._hops):
                self._note(self._blocked, message.rank)
        else:
            self._fail(peer, f"sent {type(message).__name__} out of turn")

    def _left(self, peer: Peer, message: wire.Leave) -> None:
        again = self._joining and (message.late or peer.line.adopted)
        if peer.stage == "accepted" or not again:
            self._fail(peer, f"gave up: {message.message}", late=message.late)
            return
        # It answered an earlier call, or had little time left: it may be calling anew.
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
        if self._serve(peer.rank):
            self.rerouted.append(peer.rank)
        for stream in self._streams:
            if stream.rank == peer.rank:
                stream.alive = False
        self._open_stream(peer.rank, need.lane, need.chunks)

    def _serve(self, rank: int) -> bool:
        """Become the upstream of a receiver; whether another was. That one need not try on."""
        before = next(hop.upstream for hop in self._hops if hop.rank == rank)
        self._hops = fanout.served_by(self._hops, rank, self._me)
        self._detach(before)
        return before != self._me

    def _detach(self, rank: int) -> None:
        peer = self.peers.get(rank)
        if peer is not None and peer.stage == "accepted":
            peer.line.send(wire.Detach())

    def _sent(self, event: _Sent) -> None:
        stream = event.stream
        stream.in_flight -= 1
        stream.moved_at = time.monotonic()
        if event.fault is not None:
            peer = self.peers[stream.rank]
            if stream.alive and peer.stage == "accepted":
                self._fail(peer, f"connection lost: {event.fault}")
            return
        self._release(event.lease)
        if stream is self._streams[0]:
            done = self._chunks.offsets[event.chunk] + self._chunks.sizes[event.chunk]
            self._progress(done, self._chunks.stream_bytes)

    def _release(self, lease: _Lease | None) -> None:
        if lease is not None:
            lease.uses -= 1
            if not lease.uses:
                self._buffers.give(lease.buffer)

    def _fail(self, peer: Peer, reason: str, *, late: bool = False) -> None:
        """Give up on one receiver, and see to those around it."""
        peer.stage, peer.reason, peer.late = "failed", reason, late
        peer.line.send(wire.Abort(f"the sender gave up on this rank: {reason}"))
        for stream in self._streams:
            if stream.rank == peer.rank:
                stream.alive = False
        for hop in self._hops:
            if hop.downstream == peer.rank:
                self._detach(hop.rank)
        done = [p.rank for p in self._in("done")]
        for rank in fanout.orphans(self._hops, [p.rank for p in self._in("failed")], done):
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
        absent = self._in("called")
        for peer in absent:
            peer.stage, peer.reason = "failed", reason
        self._hang_up(absent)
        for stream in self._streams:
            stream.watcher.close()
