"""The sending side of a live transfer: lines, threads and the clock for a `SenderMachine`.

One loop takes events from watcher threads, tells the machine, and does what it says.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial

from torchrelay.deadlines import TICK
from torchrelay.errors import RemoteProtocolError
from torchrelay.memory.pool import cores
from torchrelay.plan.snapshot import Snapshot
from torchrelay.record import codec
from torchrelay.record.columns import devices_of
from torchrelay.transports.group.lines import GRACE, ControlLine, GroupLines
from torchrelay.transports.protocol import wire
from torchrelay.transports.protocol.machines.actions import (
    CallAnew,
    CutOff,
    FeedBeside,
    FeedChunks,
    HashAhead,
    HearWord,
    KeepLines,
    LetRead,
    MakeOffer,
    Say,
    SenderAction,
    ServeParts,
    Trail,
)
from torchrelay.transports.protocol.machines.peers import (
    Peer,
    Said,
    Stage,
    connect,
    hang_up,
    outcome,
)
from torchrelay.transports.protocol.machines.sender_machine import SenderMachine, SendTerms
from torchrelay.transports.protocol.options import SendOptions, TransferCall
from torchrelay.transports.protocol.parts import Branches, MakeBranch
from torchrelay.transports.resources import Resources
from torchrelay.transports.routes.choice import servers
from torchrelay.transports.routes.seam import Outgoing, PushStream, Unavailable
from torchrelay.transports.transfer.outflow import Hashed, Outflow, Sent
from torchrelay.transports.transfer.worker import Worker, hashers

MOMENT = 0.05  # seconds for a receiver to take its first digests


class Sending:
    """One `send` call, with lines to its receivers. `run` returns when each is done or known to
    have failed. What is to be done decides a `SenderMachine`; this does it."""

    def __init__(
        self,
        group_lines: GroupLines,
        snapshot: Snapshot,
        receivers: Mapping[int, ControlLine],
        options: SendOptions,
        call: TransferCall,
        resources: Resources,
        branch: MakeBranch | None = None,
    ) -> None:
        self._group_lines = group_lines
        self.snapshot = snapshot
        self._chunks = snapshot.chunks
        self._device = group_lines.carrier(devices_of(snapshot.manifest.storages))
        self._deadline, self.watch, self._progress = call.deadline, call.watch, call.progress
        self._options = options
        # Digests guard what crosses a wire; memory that the kernel copies, by choice alone.
        self._verify = options.verify is not False
        self._events: queue.SimpleQueue[object] = queue.SimpleQueue()
        self._worker = Worker(hashers())
        outgoing = Outgoing(
            snapshot, group_lines.group, resources, self._device, options, len(receivers)
        )
        self._cells = outgoing.cells
        self.servers = servers(outgoing)
        self._out = Outflow(outgoing, self._events, self._worker)
        self._lines = dict(receivers)
        self._streams: dict[int, PushStream] = {}
        self.parts = Branches(branch, partial(self._events.put, None))
        # Memory that is read late may have changed: there must be digests to notice.
        reads = self._verify and self._device == "cpu" and options.route is None
        terms = SendTerms(
            group_lines.group.rank(),
            len(self._chunks),
            self._verify,
            reads,
            options.route,
            frozenset(self.servers),
            options.window,
            options.join_timeout,
            call.deadline.seconds,
            self.parts.served,
        )
        self.peers = {rank: Peer(rank, line.transfer) for rank, line in receivers.items()}
        self.machine = SenderMachine(terms, self.peers, time.monotonic())

    @property
    def wire_bytes(self) -> int:
        copied = sum(server.copied_bytes for server in self.servers.values())
        return self._out.wire_bytes + copied + self.parts.wire_bytes

    @property
    def messages(self) -> int:
        return self._out.messages

    def run(self) -> None:
        for rank in self.peers:
            self._listen(rank)
        try:
            with self._deadline.wakes(self._events):
                for server in self.servers.values():
                    server.get_ready()
                with self.watch("join"):
                    self._join()
                if self._in(Stage.ACCEPTED):
                    with self.watch("data"), self._alone():
                        self._transfer()
                while self._in(Stage.APART):
                    self._take(TICK)  # each branch ends by the deadline
        except BaseException as cause:
            reason = f"the sender gave up: {cause}"
            self.parts.stop(reason, GRACE)
            self.machine.abort(reason)
            self._act()
            self._out.close()
            raise
        finally:
            self._leave()
        sent = f"{self.wire_bytes} of {self._chunks.stream_bytes} bytes sent"
        step, phase = self.snapshot.manifest.step, self.watch.phase
        fault = outcome(self.peers.values(), sent=sent, step=step, phase=phase)
        if fault is not None:
            raise fault

    def _leave(self) -> None:
        for rank, peer in self.peers.items():
            if peer.stage is Stage.UNKNOWN:
                self._lines[rank].listen(None)
                self._group_lines.wonder(self._lines[rank])
            elif not peer.absent:
                self._lines[rank].leave()
        self._worker.stop()
        for rank, peer in self.peers.items():
            self._end(rank, keep=peer.stage is Stage.DONE)
        for server in self.servers.values():
            server.close()

    def _alone(self) -> AbstractContextManager[None]:
        """From here until the data is over, where the backend that carries it has no tags."""
        fed = any(not peer.route.pulls for peer in self._in(Stage.ACCEPTED))
        tagged = self._device == "cpu" or not fed
        return nullcontext() if tagged else self._group_lines.alone(self._deadline)

    # The two phases

    def _join(self) -> None:
        """Wait for receivers until all have answered, or the window closes on those who came."""
        while (left := self._left_to_join()) > 0:
            self._take(left)
        self.machine.end_join(time.monotonic())
        self._act()
        # Those who have connected must not wait for one who only says so.
        most = self._options.window / 4 if len(self.peers) > 1 else self._deadline.seconds
        connect(self._in(Stage.ACCEPTED), self.servers, min(self._deadline.left(), most))

    def _left_to_join(self) -> float:
        return min(self.machine.join_ends() - time.monotonic(), self._deadline.left())

    def _joined(self, rank: int, join: wire.Join) -> None:
        """Offer the state to a receiver that has joined."""
        routes = {}
        for name, server in self.servers.items():
            found = server.offer(join, self._lines[rank])
            if not isinstance(found, Unavailable):
                routes[name] = found
        encoded = self.snapshot.encoded()
        manifest = codec.shortened(encoded, join.knows, wire.tables(routes))
        if manifest is not encoded:  # the receiver has the tables too
            routes = {name: wire.RouteOffer(route.fresh) for name, route in routes.items()}
        offer = wire.Offer(
            manifest,
            self._verify,
            self._device,
            self._cells,
            routes,
            self._options.route,
            0 if len(self.peers) > 1 else cores(),
        )
        self._lines[rank].send(offer)
        for server in self.servers.values():
            server.offered()

    def _transfer(self) -> None:
        for peer in self._in(Stage.ACCEPTED):
            server = self.servers.get(peer.route.name)
            to = server.stream(peer.rank, peer.transfer) if server is not None else None
            if to is not None:
                self._streams[peer.rank] = to
        self._out.verify = self._verify
        self.machine.begin(self._streams, len(self._out.first_chunks()), time.monotonic())
        self._act()
        while self._in(Stage.ACCEPTED):
            self._tell_hashes()
            self._pump()
            self.machine.trail()
            self._act()
            if self._deadline.passed:
                self._take(0.0)  # what has come while this process stood still counts
                self.machine.time_is_up()
                self._act()
                break
            self._take(min(self._deadline.left(), self.machine.tick_seconds))
            unanswered = {rank: line.unanswered() for rank, line in self._lines.items()}
            self.machine.tick(time.monotonic(), unanswered)
            self._act()
        self._hear_last_words()
        self._out.close()

    def _hear_last_words(self) -> None:
        ends = time.monotonic() + GRACE
        while any(not self._lines[peer.rank].ended.is_set() for peer in self._in(Stage.UNKNOWN)):
            if time.monotonic() > ends - GRACE / 2:
                break
            self._take(TICK)
        for peer in self._in(Stage.DONE):
            self._lines[peer.rank].delivered.wait(max(0.0, ends - time.monotonic()))

    def _tell_hashes(self) -> None:
        """Tell those who pass chunks on what these should be, as far as it is new to them."""
        self._look_at_lines()
        for rank in self.machine.tell_hashes():
            peer = self.peers[rank]
            digests = self._out.digests_from(peer.hashes)
            self._lines[rank].send(wire.Hashes(peer.hashes, digests))
            peer.hashes += len(digests)

    def _pump(self) -> None:
        """Post chunks on every stream that has room."""
        for rank in self._out.pump():
            self.machine.moved(rank, *self._out.owed(rank), time.monotonic())

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
        elif isinstance(event, Hashed):
            self._out.hashed(event)
            self.machine.hashed(event.chunk, time.monotonic())
        elif isinstance(event, Exception):
            raise event
        elif isinstance(event, Said) and event.line is self._lines[event.rank]:
            if self.peers[event.rank].stage is Stage.APART:
                self.parts.hear(self.peers[event.rank], event.message)
            else:
                self._look_at_lines()
                self.machine.heard(event.rank, event.message, time.monotonic())
        self._act()

    def _look_at_lines(self) -> None:
        for rank, peer in self.peers.items():
            peer.adopted, peer.untaken = self._lines[rank].adopted, self._lines[rank].untaken

    def _sent(self, event: Sent) -> None:
        stream = event.stream
        self._out.sent(event)
        now = time.monotonic()
        if event.digest:
            self.machine.hashed(event.chunk, now)
        if event.fault is None:
            if stream.alive:
                self.machine.moved(stream.rank, *self._out.owed(stream.rank), now)
            self._progress(self._out.gone_bytes, self._chunks.stream_bytes)
        elif stream.alive:
            self.machine.broke(stream.rank, str(event.fault), beside=stream.beside)

    # Actions

    def _act(self) -> None:
        """Carry out what the machine has decided."""
        while self.machine.actions:
            self._do(self.machine.actions.pop(0))

    def _do(self, action: SenderAction) -> None:
        if isinstance(action, Say):
            self._lines[action.rank].send(action.message)
        elif isinstance(action, MakeOffer):
            self._joined(action.rank, action.join)
        elif isinstance(action, CallAnew):
            self._lines[action.rank] = line = self._group_lines.call(action.rank)
            self.peers[action.rank].transfer = line.transfer
            self._listen(action.rank)
        elif isinstance(action, KeepLines):
            lines = [self._lines[rank] for rank in action.ranks]
            others = hang_up(self._group_lines, self._events, lines)
            for event in others if not self.machine.aborted else ():
                self._handle(event)
        elif isinstance(action, ServeParts):
            self.parts.begin(self.peers[action.rank], self._lines[action.rank])
        elif isinstance(action, LetRead):
            self._let_read(self.peers[action.rank], action.share)
        elif isinstance(action, HashAhead):
            self._out.hash_ahead()
        elif isinstance(action, HearWord):
            self._hear_word(self.peers[action.rank], action.word)
        elif isinstance(action, Trail):
            self._trail(self.peers[action.rank])
        elif isinstance(action, CutOff):
            self._out.cut(action.rank)
            if action.end:
                self._end(action.rank, keep=False)
        else:
            self._feed(action)

    def _feed(self, action: FeedChunks | FeedBeside) -> None:
        rank = action.rank
        if isinstance(action, FeedBeside):
            self._out.open_beside(rank, self._streams[rank])
            return
        if action.lane == 1:
            self._tell_hashes()  # before there are chunks to wait behind
            self._lines[rank].delivered.wait(min(self._deadline.left(), MOMENT))
        self._out.open(rank, self.peers[rank].transfer, action.lane, action.chunks)

    def _let_read(self, peer: Peer, share: int) -> None:
        """Have a receiver take the bytes itself, with its share of the cores."""
        word = self.servers[peer.route.name].begin(peer.rank)
        if isinstance(word, Unavailable):
            self.machine.fail(peer, f"cannot be served: {word.because}")
            return
        self._out.hash(peer.accept.hashed)
        if len(self.peers) == 1 and not word:
            return  # it has begun already
        threads, name = max(1, cores() // share), peer.route.name
        patience = self.machine.patience
        self._lines[peer.rank].send(
            wire.Go(self._group_lines.group.rank(), None, 0, patience, threads, word, route=name)
        )

    def _hear_word(self, peer: Peer, word: bytes) -> None:
        """Have a route hear what its other end says."""
        try:
            why = self.servers[peer.route.name].hear(self._lines[peer.rank], word)
        except RemoteProtocolError as fault:
            why = fault.message
        if why:
            self.machine.fail(peer, why)

    def _trail(self, peer: Peer) -> None:
        """Tell a receiver what its bytes should be."""
        self.snapshot.check_unchanged()
        digests, word = self._out.all_digests() if self._verify else (), b""
        if peer.route.pulls:
            server = self.servers[peer.route.name]
            word = server.trailer(peer.rank)
            digests = self._out.all_digests() if server.hashes else ()
            # What receivers take themselves is counted once one has all, unless chunks are posted.
            if (total := self._chunks.stream_bytes) and not self._out.streams:
                self._progress(total, total)
        self._lines[peer.rank].send(wire.Trailer(digests, word))

    def _end(self, rank: int, *, keep: bool) -> None:
        for server in self.servers.values():
            server.end(rank, keep=keep)

    def _listen(self, rank: int) -> None:
        # A line outlives the call where the peer never ends it: it must not keep the state alive.
        line, events = self._lines[rank], self._events
        line.listen(lambda said: events.put(Said(rank, line, said)), events.qsize)

    def _in(self, *stages: Stage) -> list[Peer]:
        return self.machine.among(*stages)
