"""The sending side of a live transfer: offer, join, data, trailer, acknowledgement.

One loop takes events from watcher threads and posts chunks; the schedule is `fanout`'s.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial

from torchrelay.deadlines import TICK
from torchrelay.errors import RemoteProtocolError
from torchrelay.memory.pool import cores
from torchrelay.plan.snapshot import Snapshot
from torchrelay.record.columns import devices_of
from torchrelay.transports.group.lines import GRACE, ControlLine, GroupLines
from torchrelay.transports.protocol import fanout, wire
from torchrelay.transports.protocol.options import SendOptions, TransferCall
from torchrelay.transports.protocol.parts import Branches, MakeBranch
from torchrelay.transports.protocol.peers import (
    Peer,
    Said,
    connect,
    go,
    hang_up,
    join_ends,
    outcome,
    tell_hashes,
)
from torchrelay.transports.resources import Resources
from torchrelay.transports.routes.choice import GROUP, servers
from torchrelay.transports.routes.seam import Outgoing, PushStream, Unavailable
from torchrelay.transports.transfer.outflow import Hashed, Outflow, Sent
from torchrelay.transports.transfer.worker import Worker, hashers

MOMENT = 0.05  # seconds for a receiver to take its first digests
GATHER = 2  # ticks to hear from all who are stuck before judging who is the cause


class Sending:
    """One `send` call, with lines to its receivers. `run` returns when each is done or known to
    have failed."""

    def __init__(
        self,
        post: GroupLines,
        snapshot: Snapshot,
        receivers: Mapping[int, ControlLine],
        options: SendOptions,
        call: TransferCall,
        resources: Resources,
        branch: MakeBranch | None = None,
    ) -> None:
        self._post = post
        self._me = post.group.rank()
        self.snapshot = snapshot
        self._chunks = snapshot.chunks
        self._step = snapshot.manifest.step
        self._device = post.carrier(devices_of(snapshot.manifest.storages))
        self._deadline, self.watch, self._progress = call.deadline, call.watch, call.progress
        self._options, self._window = options, options.window
        # Digests guard what crosses a wire; memory that the kernel copies, by choice alone.
        self._verify = options.verify is not False
        self._route = options.route
        self._events: queue.SimpleQueue[object] = queue.SimpleQueue()
        self._worker = Worker(hashers())
        self.servers = servers(
            Outgoing(snapshot, post.group, resources, self._device, options, len(receivers))
        )
        self._out = Outflow(
            post.group, snapshot, self._device, resources.buffers, self._events, self._worker
        )
        self.peers = {rank: Peer(rank, line) for rank, line in receivers.items()}
        self.parts = Branches(branch, partial(self._events.put, None))
        self._hops: list[fanout.Hop] = []
        self._patience = 0.0
        self._joining = True
        self._jury = fanout.StallJudge()
        self.rerouted: list[int] = []

    @property
    def wire_bytes(self) -> int:
        copied = sum(server.copied_bytes for server in self.servers.values())
        return self._out.wire_bytes + copied + self.parts.wire_bytes

    @property
    def messages(self) -> int:
        return self._out.messages

    def run(self) -> None:
        for peer in self.peers.values():
            self._listen(peer)
        try:
            with self._deadline.wakes(self._events):
                for server in self.servers.values():
                    server.get_ready()
                with self.watch("join"):
                    self._join()
                if self._in("accepted"):
                    with self.watch("data"), self._alone():
                        self._transfer()
                while self._in("apart"):
                    self._take(TICK)  # each branch ends by the deadline
        except BaseException as cause:
            self._abort(f"the sender gave up: {cause}")
            raise
        finally:
            for peer in self.peers.values():
                if peer.stage == "unknown":
                    peer.line.listen(None)
                    self._post.wonder(peer.line)
                elif not peer.absent:
                    peer.line.leave()
            self._worker.stop()
            for peer in self.peers.values():
                self._end(peer, keep=peer.stage == "done")
            for server in self.servers.values():
                server.close()
        sent = f"{self.wire_bytes} of {self._chunks.stream_bytes} bytes sent"
        fault = outcome(self.peers.values(), sent=sent, step=self._step, phase=self.watch.phase)
        if fault is not None:
            raise fault

    def _alone(self) -> AbstractContextManager[None]:
        """From here until the data is over, where the backend that carries it has no tags."""
        tagged = self._device == "cpu" or not self._fed()
        return nullcontext() if tagged else self._post.alone(self._deadline)

    # Joining

    def _join(self) -> None:
        """Wait for receivers until all have answered, or the window closes on those who came."""
        begun = time.monotonic()
        while self._in("called", "joined"):
            ends = join_ends(
                self.peers.values(),
                begun + self._options.join_timeout,
                self._window,
                self._deadline,
            )
            left = min(ends - time.monotonic(), self._deadline.left())
            if left <= 0:
                break
            self._take(left)
        self._joining = False
        absent, silent = self._in("called"), self._in("joined")
        for peer in absent:
            peer.stage, peer.late = "failed", True
            peer.reason = f"did not join within {time.monotonic() - begun:.3g} s"
        for event in hang_up(self._post, self._events, absent):
            self._handle(event)
        for peer in silent:
            if peer.stage == "joined":
                self._fail(peer, "joined, but did not answer the offer", late=True)
        # Those who have connected must not wait for one who only says so.
        most = self._window / 4 if len(self.peers) > 1 else self._deadline.seconds
        connect(self._in("accepted"), self.servers, min(self._deadline.left(), most))

    def _joined(self, peer: Peer, join: wire.Join) -> None:
        peer.stage, peer.joined_at = "joined", time.monotonic()
        peer.place = join.place
        peer.reads = bool(join.nonce)
        routes = {}
        for name, server in self.servers.items():
            found = server.offer(join, peer.line)
            if not isinstance(found, Unavailable):
                routes[name] = found
        offer = wire.Offer(
            self.snapshot.encoded(),
            self._verify,
            self._device,
            routes,
            self._route,
            0 if len(self.peers) > 1 else cores(),
        )
        peer.line.send(offer)

    # Data

    def _transfer(self) -> None:
        accepted = self._fed()
        nearby = [peer for peer in self._in("accepted") if peer.route.pulls]
        beside = {peer.rank: to for peer in accepted if (to := self._stream(peer)) is not None}
        # Bytes cross to a machine once: receivers of one machine follow each other.
        chained = [peer for peer in accepted if peer.rank not in beside]
        chained = fanout.by_machine(chained, lambda peer: peer.place.machine)
        self._hops = fanout.chain(self._me, [peer.rank for peer in chained])
        self._hops += fanout.star(self._me, list(beside))
        # With one receiver there is nobody to protect from a slow one: the deadline alone counts.
        if len(accepted) + len(nearby) > 1:
            self._patience = min(self._window, self._deadline.seconds / 4, wire.MAX_SECONDS)
        # Memory that is read late may have changed: there must be digests to notice.
        reads = self._verify and self._device == "cpu" and self._route is None
        for hop in self._hops:
            peer = self.peers[hop.rank]
            route = peer.route.name if hop.rank in beside else GROUP.name
            peer.line.send(go(hop, self.peers, self._patience, may_read=reads, route=route))
        for peer in nearby:
            self._let_read(peer, share=len(nearby))
        self._out.verify = self._verify
        for rank, to in beside.items():
            self._out.open_beside(rank, to)
        if len(chained) > 1:
            self._tell_first(chained[0])
        if chained and chained[0].stage == "accepted":
            self._open_stream(chained[0].rank, 1, range(len(self._chunks)))
        while self._in("accepted"):
            tell_hashes(self._hops, self.peers, self._out.digests_from)
            self._out.pump()
            self._send_trailers()
            if self._deadline.passed:
                self._take(0.0)  # what has come while this process stood still counts
                for peer in self._in("accepted"):
                    self._fail(peer, f"not done after {self._deadline.seconds:.3g} s", late=True)
                break
            self._take(min(self._deadline.left(), self._tick()))
            self._check_stalls()
        ends = time.monotonic() + GRACE
        while any(not peer.line.ended.is_set() for peer in self._in("unknown")):
            if time.monotonic() > ends - GRACE / 2:
                break
            self._take(TICK)
        for peer in self._in("done"):
            peer.line.delivered.wait(max(0.0, ends - time.monotonic()))
        self._out.close()

    def _tell_first(self, head: Peer) -> None:
        """Tell the digests of the first chunks before there are chunks to wait behind: a receiver
        passes on only what is right."""
        first = self._out.hash_ahead()
        while len(self._out.digests_from(0)) < len(first) and not self._deadline.passed:
            self._take(min(self._deadline.left(), TICK))
        tell_hashes(self._hops, self.peers, self._out.digests_from)
        head.line.delivered.wait(min(self._deadline.left(), MOMENT))

    def _let_read(self, peer: Peer, share: int) -> None:
        """Have a receiver on this machine take the bytes itself, with its share of the cores."""
        word = self.servers[peer.route.name].begin(peer.rank)
        if isinstance(word, Unavailable):
            self._fail(peer, f"cannot be served: {word.because}")
            return
        self._out.hash(peer.accept.hashed)
        if len(self.peers) == 1 and not word:
            return  # it has begun already
        threads, name = max(1, cores() // share), peer.route.name
        peer.line.send(
            wire.Go(self._me, patience=self._patience, threads=threads, word=word, route=name)
        )

    def _stream(self, peer: Peer) -> PushStream | None:
        """How chunks go to a receiver beside the group, if they do."""
        server = self.servers.get(peer.route.name)
        return None if server is None else server.stream(peer.rank, peer.line.transfer)

    def _end(self, peer: Peer, *, keep: bool) -> None:
        for server in self.servers.values():
            server.end(peer.rank, keep=keep)

    def _tick(self) -> float:
        return min(self._patience / 4, 0.25) if self._patience else 1.0

    def _open_stream(self, rank: int, lane: int, chunks: Sequence[int]) -> None:
        self._out.open(rank, self.peers[rank].line.transfer, lane, chunks)

    def _send_trailers(self) -> None:
        """Tell those who have all bytes, or soon will, what they should be."""
        for peer in self._in("accepted"):
            if peer.trailed:
                continue
            pulls = peer.route.pulls
            hashed = self.servers[peer.route.name].hashes if pulls else self._verify
            digests = self._out.digests(peer.accept.hashed if pulls else None) if hashed else ()
            if digests is None:
                continue
            if pulls:
                ready = peer.pulled
            else:
                # Who lacks chunks cannot have the state, and is not told what would let it have it.
                # Without digests nothing tells bytes that changed on their way: they must have
                # left.
                first = fanout.head(self._hops, peer.rank, self._me)
                ready = not self._out.owes(first, sent=not hashed)
            if ready:
                if pulls:
                    self._count_pulled()
                self.snapshot.check_unchanged()
                peer.trailed = True
                word = self.servers[peer.route.name].trailer(peer.rank) if pulls else b""
                peer.line.send(wire.Trailer(digests, word))

    def _count_pulled(self) -> None:
        """What receivers take themselves is counted once one has all, unless chunks are posted."""
        if (total := self._chunks.stream_bytes) and not self._out.streams:
            self._progress(total, total)

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
        for stream in self._out.streams:
            if stream.alive and stream.in_flight and now > stream.moved_at + self._patience:
                stream.moved_at = now
                self._jury.blocked(stream.rank, now, GATHER * self._tick())
        verdict = self._jury.verdict(self._hops, self._me, now)
        if verdict is None:
            return
        culprits, starving = verdict
        for rank in culprits:
            if self.peers[rank].stage == "accepted":
                self._fail(self.peers[rank], f"took no data for {self._patience:.3g} s")
        self._reroute(() if starving is None else (starving,))

    # Events

    def _take(self, timeout: float) -> None:
        """Handle one event, and those that are there with it."""
        try:
            self._handle(self._events.get(timeout=max(timeout, 0.001)))
            for _ in range(self._events.qsize()):  # not those of a peer that goes on and on
                self._handle(self._events.get_nowait())
        except queue.Empty:
            return

    def _handle(self, event: object) -> None:
        if isinstance(event, Sent):
            self._sent(event)
            return
        if isinstance(event, Hashed):
            self._out.hashed(event)
            return
        if isinstance(event, Exception):
            raise event
        if event is None:  # a branch is over
            return
        assert isinstance(event, Said)
        peer = self.peers[event.rank]
        if event.line is not peer.line or peer.stage in ("done", "refused", "failed"):
            return
        message = event.message
        if peer.stage == "unknown":
            peer.settle(message)
            return
        if peer.stage == "apart":
            self.parts.hear(peer, message)
            return
        if isinstance(message, Exception):
            if peer.stage == "called" and peer.line.adopted:
                self._ring_again(peer)
            else:
                self._fail(peer, str(message))
        elif isinstance(message, wire.Join) and peer.stage == "called":
            self._joined(peer, message)
        elif isinstance(message, wire.Survey) and peer.stage == "called" and self.parts.served:
            self.parts.begin(peer)
        elif isinstance(message, wire.Accept) and peer.stage == "joined":
            if why := peer.take(message, self._route, self.servers):
                self._fail(peer, why)
        elif isinstance(message, wire.Word) and peer.stage == "accepted":
            if why := self._word(peer, message.word):
                self._fail(peer, why)
        elif isinstance(message, wire.Pulled) and peer.stage == "accepted":
            peer.pulled, peer.trailed = True, False
            if peer.deaf:
                self._fail(peer, "asks, and does not take the answers")
        elif isinstance(message, wire.Refuse):
            peer.stage, peer.reason, peer.refusal = "refused", message.message, message
            peer.line.send(wire.Fin())
        elif isinstance(message, wire.Leave):
            self._left(peer, message)
        elif isinstance(message, wire.Done) and peer.stage == "accepted":
            peer.stage = "done"
            peer.line.send(wire.Fin())
        elif isinstance(message, wire.Need) and any(hop.rank == peer.rank for hop in self._hops):
            self._need(peer, message)
        elif isinstance(message, wire.Unlink):
            self._reroute(hop.rank for hop in self._hops if hop.upstream == peer.rank)
        elif isinstance(message, wire.Stalled):
            self._jury.starving(peer.rank, time.monotonic(), GATHER * self._tick())
        elif isinstance(message, wire.Blocked):
            if any(hop[:2] == (message.rank, peer.rank) for hop in self._hops):
                self._jury.blocked(message.rank, time.monotonic(), GATHER * self._tick())
        else:
            self._fail(peer, f"sent {type(message).__name__} out of turn")

    def _word(self, peer: Peer, word: bytes) -> str:
        """Have a route hear what its other end says; what is wrong with that, if anything."""
        try:
            return self.servers[peer.route.name].hear(peer.line, word)
        except RemoteProtocolError as fault:
            return fault.message

    def _left(self, peer: Peer, message: wire.Leave) -> None:
        again = self._joining and (message.late or peer.line.adopted)
        if peer.stage == "accepted" or not again:
            self._fail(peer, f"gave up: {message.message}", late=message.late)
            peer.settle(message)
            return
        # It answered an earlier call, or had little time left: it may be calling anew.
        peer.line.send(wire.Fin())
        self._ring_again(peer)

    def _ring_again(self, peer: Peer) -> None:
        peer.line, peer.stage = self._post.call(peer.rank), "called"
        self._listen(peer)

    def _need(self, peer: Peer, need: wire.Need) -> None:
        if not peer.may_ask(need, len(self._chunks)):
            self._fail(peer, "asked for chunks that do not exist, or on a lane that it has used")
            return
        if not need.chunks:
            return
        if self._serve(peer.rank):
            self.rerouted.append(peer.rank)
        if self._out.is_beside(peer.rank):
            self._end(peer, keep=False)
            peer.trailed = False  # what it is sent now may have changed since
        self._out.cut(peer.rank)
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

    def _sent(self, event: Sent) -> None:
        stream = event.stream
        self._out.sent(event)
        if event.fault is not None:
            peer = self.peers[stream.rank]
            if not stream.alive or peer.stage != "accepted":
                return
            if stream.beside:
                # The receiver notices too, and asks for what it lacks over the group.
                stream.alive = False
                self._end(peer, keep=False)
            else:
                self._fail(peer, f"connection lost: {event.fault}")
        else:
            self._progress(self._out.gone_bytes, self._chunks.stream_bytes)

    def _fail(self, peer: Peer, reason: str, *, late: bool = False) -> None:
        """Give up on one receiver, and see to those around it."""
        peer.give_up(reason, late=late)
        peer.line.send(wire.Abort(wire.text(f"the sender gave up on this rank: {reason}")))
        self._out.cut(peer.rank)
        self._end(peer, keep=False)
        for hop in self._hops:
            if hop.downstream == peer.rank:
                self._detach(hop.rank)
        done = [p.rank for p in self._in("done")]
        lost = [p.rank for p in self._in("failed", "unknown")]
        self._reroute(fanout.orphans(self._hops, lost, done))

    def _reroute(self, ranks: Iterable[int]) -> None:
        for rank in ranks:
            if self.peers[rank].stage == "accepted":
                self.peers[rank].line.send(wire.Reroute())

    # Ends

    def _listen(self, peer: Peer) -> None:
        # A line outlives the call where the peer never ends it: it must not keep the state alive.
        line, rank, events = peer.line, peer.rank, self._events
        line.listen(lambda said: events.put(Said(rank, line, said)), events.qsize)

    def _fed(self) -> list[Peer]:
        """The receivers that chunks are pushed to."""
        return [peer for peer in self._in("accepted") if not peer.route.pulls]

    def _in(self, *stages: str) -> list[Peer]:
        return [peer for peer in self.peers.values() if peer.stage in stages]

    def _abort(self, reason: str) -> None:
        self.parts.stop(reason, GRACE)
        for peer in self._in("joined", "accepted"):
            peer.give_up(reason)
            peer.line.send(wire.Abort(wire.text(reason)))
        absent = self._in("called")
        for peer in absent:
            peer.stage, peer.reason = "failed", reason
        hang_up(self._post, self._events, absent)
        self._out.close()
