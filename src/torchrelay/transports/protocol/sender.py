"""The sending side of a live transfer: connections, workers and the clock for a `SenderMachine`.

One loop, in the thread that called `send`, takes events from an inbox and tells the machine, which
calls back what must be done.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

from torchrelay.errors import RelayError, RemoteProtocolError
from torchrelay.plan.snapshot import Snapshot, SnapshotPart
from torchrelay.record.reads import decode_reads
from torchrelay.transports.meeting.connection import ConnectionLost, Inbox, MessageHeard
from torchrelay.transports.meeting.matching import OpenSend
from torchrelay.transports.meeting.node import Node, ReceiverJoined, WrongStep
from torchrelay.transports.meeting.turns import short_turns
from torchrelay.transports.protocol.digests import AskedDigests
from torchrelay.transports.protocol.fanout import Link
from torchrelay.transports.protocol.options import SendOptions, TransferCall
from torchrelay.transports.protocol.peers import Peer, Stage, outcome
from torchrelay.transports.protocol.sender_machine import SenderMachine
from torchrelay.transports.protocol.served import Served
from torchrelay.transports.resources import Resources
from torchrelay.transports.routes.choice import BY_NAME
from torchrelay.transports.routes.route import (
    Hop,
    Outgoing,
    Receiver,
    RouteFault,
    ServiceFailed,
)
from torchrelay.transports.routes.tcp import TcpService
from torchrelay.transports.streams.chunk_sender import ChunkSent, FeedBroken
from torchrelay.transports.wire.handshake import new_id
from torchrelay.transports.wire.messages import (
    Abort,
    Accept,
    Confirmed,
    Go,
    Join,
    Message,
    Need,
    RouteNote,
    Want,
    text,
)

EXCUSE_SECONDS = 2.0  # for receivers to come and hear that the state cannot be sent
LAST_SECONDS = 0.5  # past the deadline, for what is on its way


class Sending:
    """One `send` call. `run` returns when each receiver is done or known to have failed."""

    snapshot: Snapshot
    _outgoing: Outgoing

    def __init__(
        self,
        node: Node,
        group: Any,
        me: int,
        ranks: Sequence[int],
        options: SendOptions,
        call: TransferCall,
        resources: Resources,
    ) -> None:
        self._node, self._group, self._me = node, group, me
        self._options, self._resources, self.step = options, resources, options.step
        self._deadline, self.watch, self._progress = call.deadline, call.watch, call.progress
        self._inbox = Inbox()
        self._open = OpenSend(options.step, frozenset(ranks), options.window)
        self._digests = AskedDigests(self._inbox.put)
        self._gone: set[int] = set()  # chunks that have left at least once
        self._gone_bytes = 0
        self.served: dict[int, Served] = {}  # by rank
        self.settled: dict[int, bool] = {}  # receivers that were unknown: whether they committed
        self.peers = {rank: Peer(rank) for rank in ranks}
        seconds, chains = call.deadline.seconds, node.directory.finds_all
        begun = time.monotonic()
        self.machine = SenderMachine(options, seconds, chains, self.peers, self, begun)

    # The call

    def run(self, describe: Callable[[], Snapshot]) -> None:
        """Send what `describe` returns."""
        try:
            with self._node.open(self._open, self._inbox):
                self._run(describe)
        finally:
            # Driver and machine hold each other, and with them the state.
            del self.machine.effects
        sent = f"{self.total('wire_bytes')} of {self.snapshot.chunks.stream_bytes} bytes sent"
        step, phase = self._options.step, self.watch.phase
        failure = outcome(self.peers.values(), sent=sent, step=step, phase=phase)
        if failure is not None:
            raise failure

    def _run(self, describe: Callable[[], Snapshot]) -> None:
        try:
            # Receivers come while the state is described.
            with self.watch("capture"), short_turns():
                self.snapshot = describe()
        except BaseException as fault:
            self._excuse(fault)
            raise
        self._outgoing = Outgoing(self.snapshot, self._resources, self._options.verify)
        try:
            with self.watch("join"):
                while self.machine.joining:
                    self._join()
            with self.watch("data"):
                while not self.machine.over:
                    self._serve()
        except BaseException as cause:
            self.machine.abort(f"the sender gave up: {cause}")
            raise
        finally:
            self._close()

    @cached_property
    def _record(self) -> bytes:
        return self.snapshot.encoded()

    @property
    def described(self) -> bool:
        """Whether the state could be described."""
        return hasattr(self, "snapshot")

    def total(self, what: str) -> int:
        """The sum of "wire_bytes", "messages" or "connections" of all receivers."""
        services = [one.service for one in self.served.values() if one.service is not None]
        return sum(getattr(service, what) for service in services)

    def _excuse(self, fault: BaseException) -> None:
        """Tell receivers why the state does not come. A receiver that is about to come is waited
        for, unless the caller was interrupted."""
        reason = text(f"the sender cannot send its state: {type(fault).__name__}: {fault}")
        waits = EXCUSE_SECONDS if isinstance(fault, Exception) else 0.0
        ends = time.monotonic() + min(waits, self._deadline.left())
        untold = set(self.peers)
        while untold and (event := self._inbox.get(ends - time.monotonic())) is not None:
            if isinstance(event, ReceiverJoined):
                event.connection.send(Abort(reason))
                event.connection.close()
                untold.discard(event.connection.rank)
            elif isinstance(event, WrongStep):
                untold.discard(event.rank)

    def _join(self) -> None:
        left = min(self.machine.join_ends() - time.monotonic(), self._deadline.left())
        if left > 0:
            self._take(min(left, self.machine.tick_seconds))
            self._tick()
        else:
            self.machine.end_join(time.monotonic())

    def _serve(self) -> None:
        self._take(min(self._deadline.left(), self.machine.tick_seconds))
        self._tick()
        if self._deadline.passed:
            # Messages that came while this process was stopped count, and a receiver may be about
            # to report that it is done.
            ends = time.monotonic() + LAST_SECONDS
            while self.machine.among(Stage.CONFIRMED) and time.monotonic() < ends:
                self._take(ends - time.monotonic())
            self._take(0.0)
            self.machine.time_is_up()

    def _tick(self) -> None:
        now = time.monotonic()
        silent, stuck = {}, {}
        for rank, one in self.served.items():
            silent[rank] = now - one.connection.heard_at
            since = one.service.stuck_since if isinstance(one.service, TcpService) else None
            if since is not None:  # asked once: the last chunk may leave between two looks
                stuck[rank] = now - since
        self.machine.tick(now, silent, stuck)

    def _close(self) -> None:
        for rank, peer in self.peers.items():
            if peer.stage is Stage.UNKNOWN and rank in self.served:
                self._node.note_unknown(rank, self.served[rank].transfer)
        self._digests.close()
        for one in self.served.values():
            one.close()
            one.connection.close()

    # Events

    def _take(self, seconds: float) -> None:
        """Handle the next event, and those that are there with it."""
        for event in self._inbox.take(seconds):
            self._handle(event)

    def _handle(self, event: object) -> None:
        now = time.monotonic()
        if isinstance(event, ReceiverJoined):
            rank = event.connection.rank
            if self.peers[rank].stage is Stage.EXPECTED:
                self.served[rank] = Served(event.connection, new_id())
            if not self.machine.joined(rank, event.join, event.several, now):
                self._node.put_back(event)
        elif isinstance(event, WrongStep):
            self.machine.wrong_step(event.rank, event.step, self._options.step)
        elif isinstance(event, (MessageHeard, ConnectionLost)):
            one = self.served.get(event.connection.rank)
            if one is not None and one.connection is event.connection:
                if isinstance(event, MessageHeard):
                    self.machine.heard(event.connection.rank, event.message, now)
                else:
                    self.machine.lost(event.connection.rank, event.reason)
        elif isinstance(event, ChunkSent):
            self._count(event.index)
        elif isinstance(event, FeedBroken) and not isinstance(event.fault, OSError):
            raise event.fault  # the state cannot be read
        elif isinstance(event, ServiceFailed):
            if self.peers[event.rank].stage is Stage.ACTIVE:
                self.machine.fail(self.peers[event.rank], event.reason)
        elif isinstance(event, Exception):
            raise event

    def _count(self, index: int) -> None:
        chunks = self.snapshot.chunks
        if index not in self._gone and index < len(chunks):
            self._gone.add(index)
            self._gone_bytes += chunks.sizes[index]
            self._progress(self._gone_bytes, chunks.stream_bytes)

    # Effects of the machine

    def offer(self, rank: int, join: Join, several: bool) -> str:
        one = self.served[rank]
        found = self._node.settle(rank, join.committed)
        if found is not None:
            self.settled[rank] = found
        receiver = Receiver(
            rank,
            self._me,
            one.transfer,
            join,
            self._node,
            self._group,
            len(self.peers),
            self._options.connections,
            one.connection.send,
            self._inbox.put,
        )
        route = self._options.route
        try:
            offer = one.make_offer(receiver, self._outgoing, self._record, route, several=several)
        except Exception as fault:
            return _reason(fault)
        one.connection.send(offer)
        if one.likely == "cuda_ipc":
            self._digests.begin(self._outgoing)
        return ""

    def go(self, link: Link, patience: float) -> str:
        one, accept = self.served[link.rank], self.peers[link.rank].accept
        assert accept is not None
        if accept.route == one.likely and accept.reads is None:
            one.service, one.outgoing = one.services[one.likely], self._outgoing
            return ""
        one.service = one.services[BY_NAME[accept.route].name]
        try:
            one.outgoing = self._outgoing_of(accept)
            data = one.service.begin(one.outgoing, accept, self._hop(link))
        except Exception as fault:
            return _reason(fault)
        one.connection.send(Go(data, patience))
        return ""

    def _outgoing_of(self, accept: Accept) -> Outgoing:
        """The bytes for a receiver: the state, or the parts of it that it asks for."""
        if accept.reads is None:
            return self._outgoing
        reads = decode_reads(accept.reads, self.snapshot.record)
        return Outgoing(SnapshotPart(self.snapshot, reads), self._resources, self._options.verify)

    def _hop(self, link: Link) -> Hop:
        ticket = None
        if link.downstream is not None:
            service = self.served[link.downstream].services["tcp"]
            assert isinstance(service, TcpService)
            ticket = service.ticket
        return Hop(link.upstream, ticket, link.depth)

    def serve(self, rank: int, asked: Need | Want | RouteNote) -> str:
        one = self.served[rank]
        assert one.service is not None and one.outgoing is not None
        try:
            if isinstance(asked, RouteNote):
                one.service.hear(asked.data)
            elif isinstance(asked, Need):
                self.snapshot.check_unchanged()
                one.service.need(asked.chunks, restart=asked.restart)
            elif self._digests.want(rank, one.outgoing, asked, one.connection.send):
                self.snapshot.check_unchanged()  # one did not match
        except (RouteFault, RemoteProtocolError) as fault:
            return str(fault)
        return ""

    def confirm(self, rank: int) -> None:
        self.snapshot.check_unchanged()
        accept = self.peers[rank].accept
        if accept is not None and BY_NAME[accept.route].reads:
            self._progress(self.snapshot.chunks.stream_bytes, self.snapshot.chunks.stream_bytes)
        self.served[rank].connection.send(Confirmed())

    def send(self, rank: int, message: Message) -> None:
        self.served[rank].connection.send(message)

    def drop(self, rank: int) -> None:
        self.served[rank].close()
        self.served[rank].connection.close()


def _reason(fault: Exception) -> str:
    return fault.message if isinstance(fault, RelayError) else repr(fault)
