"""The sending side of a live transfer: connections, workers and the clock for a `SenderMachine`.

One loop, in the thread that called `send`, takes events from an inbox and tells the machine, which
calls back what must be done.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

from torchrelay.errors import RelayError, RemoteProtocolError
from torchrelay.memory.pool import cores
from torchrelay.plan.snapshot import Snapshot, SnapshotPart, capture
from torchrelay.record.reads import decode_reads
from torchrelay.results import Outcome, Report, Traffic
from torchrelay.transports.meeting.connection import Connection, ConnectionLost, Inbox, MessageHeard
from torchrelay.transports.meeting.matching import OpenSend, ReceiverJoined, WrongStep
from torchrelay.transports.meeting.node import DataTicket
from torchrelay.transports.protocol.options import SendOptions, TransferCall
from torchrelay.transports.protocol.peers import Peer, Stage, outcome
from torchrelay.transports.protocol.sender_machine import SenderMachine
from torchrelay.transports.resources import Member
from torchrelay.transports.routes import route as r
from torchrelay.transports.routes.choice import BY_NAME, services
from torchrelay.transports.routes.outgoing import Outgoing
from torchrelay.transports.streams.chunk_sender import ChunkSent, FeedBroken
from torchrelay.transports.streams.workers import Workers
from torchrelay.transports.wire import messages as m
from torchrelay.transports.wire.handshake import new_id, new_key

EXCUSE_SECONDS = 2.0  # for receivers to come and hear that the state cannot be sent
LAST_SECONDS = 0.5  # past the deadline, for what is on its way
MOST_ANSWERS = 1024  # messages with digests, to a receiver that asks once


@dataclass
class Served:
    """The sender's side of one receiver: its connection, and the sender's ends of its routes."""

    connection: Connection
    services: dict[str, r.RouteService] = field(default_factory=dict)
    service: r.RouteService | None = None  # of the route that it took
    asked: set[int] = field(default_factory=set)  # chunks whose digests it has asked for

    def close(self) -> None:
        for service in self.services.values():
            service.close()
        self.connection.close()


class Sending:
    """One `send` call. `run` returns when each receiver is done or known to have failed."""

    snapshot: Snapshot
    _outgoing: Outgoing

    def __init__(
        self, member: Member, ranks: Sequence[int], options: SendOptions, call: TransferCall
    ) -> None:
        self._member, self._node, self._options = member, member.node, options
        self._deadline, self._watch, self._progress = call.deadline, call.watch, call.progress
        self._inbox = Inbox()
        self._open = OpenSend(options.step, frozenset(ranks), options.window, self._inbox)
        # They make digests. Where cores are few, receivers that read need them.
        self._workers = Workers(max(1, min(4, cores() // 4)), self._inbox.put)
        self._gone: set[int] = set()  # chunks that have left at least once
        self._gone_bytes = 0
        self.served: dict[int, Served] = {}  # by rank
        self._tickets = {rank: DataTicket(new_id(), new_key()) for rank in ranks}
        self._peers = {rank: Peer(rank) for rank in ranks}
        seconds, chains = call.deadline.seconds, self._node.directory.finds_all
        begun = time.monotonic()
        self._machine = SenderMachine(options, seconds, chains, self._peers, self, begun)

    # The call

    def run(self, state: object) -> Report:
        try:
            with self._node.open(self._open):
                self._run(state)
            sent = f"{self._total('wire_bytes')} of {self.snapshot.chunks.stream_bytes} bytes sent"
            step, phase = self._options.step, self._watch.phase
            failure = outcome(self._peers.values(), sent=sent, step=step, phase=phase)
            if failure is not None:
                raise failure
            return self._report()
        except RelayError as fault:
            if hasattr(self, "snapshot"):
                fault.report = self._report()
            raise
        finally:
            # Driver and machine hold each other, and with them the state.
            del self._machine.effects

    def _run(self, state: object) -> None:
        try:
            # Receivers come while the state is described.
            with self._watch("capture"):
                self.snapshot = capture(
                    state,
                    self._options.step,
                    receivers=len(self._peers),
                    chunk_bytes=self._options.chunk_bytes,
                    objects=True,
                )
                self._record = self.snapshot.encoded()
        except BaseException as fault:
            self._excuse(fault)
            raise
        self._outgoing = Outgoing(self.snapshot, self._member, self._options.verify)
        try:
            with self._watch("join"):
                while self._machine.joining:
                    self._join()
            with self._watch("data"):
                while not self._machine.over:
                    self._serve()
        except BaseException as cause:
            self._machine.abort(f"the sender gave up: {cause}")
            raise
        finally:
            self._close()

    def _report(self) -> Report:
        verify, options, peers = self._options.verify, self._options, self._peers.values()
        accepts = [peer.accept for peer in peers if peer.accept is not None]
        outcomes: dict[int | str, Outcome] = {peer.rank: self._outcome(peer) for peer in peers}
        taken = {one.route for one in outcomes.values() if one.route} or {options.route or "tcp"}
        return Report(
            step=options.step,
            bytes=self.snapshot.chunks.nbytes,
            seconds=self._watch.seconds,
            peers=outcomes,
            verified=all(BY_NAME[name].compares(verify) for name in taken),
            instead={name: why for one in accepts for name, why in one.instead.items()},
            traffic=Traffic(*map(self._total, ("wire_bytes", "messages", "connections"))),
        )

    def _outcome(self, peer: Peer) -> Outcome:
        done, unknown = peer.stage is Stage.DONE, peer.stage is Stage.UNKNOWN
        return Outcome(
            "done" if done else "unknown" if unknown else "failed",
            "" if done else peer.reason,
            peer.accept.route if done and peer.accept is not None else "",
            rerouted=peer.rerouted,
            settled=peer.settled,
        )

    def _total(self, what: str) -> int:
        """The sum of "wire_bytes", "messages" or "connections" of all receivers."""
        services = [one.service for one in self.served.values() if one.service is not None]
        return sum(getattr(service, what) for service in services)

    def _excuse(self, fault: BaseException) -> None:
        """Tell receivers why the state does not come. A receiver that is about to come is waited
        for, unless the caller was interrupted."""
        reason = m.text(f"the sender cannot send its state: {type(fault).__name__}: {fault}")
        waits = EXCUSE_SECONDS if isinstance(fault, Exception) else 0.0
        ends = time.monotonic() + min(waits, self._deadline.left())
        untold = set(self._peers)
        while untold and (event := self._inbox.get(ends - time.monotonic())) is not None:
            if isinstance(event, ReceiverJoined):
                event.connection.send(m.Abort(reason))
                event.connection.close()
                untold.discard(event.rank)
            elif isinstance(event, WrongStep):
                untold.discard(event.join.rank)

    def _join(self) -> None:
        left = self._machine.join_ends() - time.monotonic()
        if left > 0:
            self._take(min(left, self._machine.tick_seconds))
            self._tick()
        else:
            self._machine.end_join(time.monotonic())

    def _serve(self) -> None:
        self._take(min(self._deadline.left(), self._machine.tick_seconds))
        self._tick()
        if self._deadline.passed:
            # Messages that came while this process was stopped count, and a receiver may be about
            # to report that it is done.
            ends = time.monotonic() + LAST_SECONDS
            while self._machine.among(Stage.CONFIRMED) and time.monotonic() < ends:
                self._take(ends - time.monotonic())
            self._take(0.0)
            self._machine.time_is_up()

    def _tick(self) -> None:
        now = time.monotonic()
        silent = {rank: now - one.connection.heard_at for rank, one in self.served.items()}
        # Asked once: the last chunk may leave between two looks.
        since = {rank: one.service.stuck_since for rank, one in self.served.items() if one.service}
        stuck = {rank: now - at for rank, at in since.items() if at is not None}
        self._machine.tick(now, silent, stuck)

    def _close(self) -> None:
        self._workers.stop()
        for one in self.served.values():
            one.close()

    # Events

    def _take(self, seconds: float) -> None:
        """Handle the next event, and those that are there with it."""
        for event in self._inbox.take(seconds):
            self._handle(event)

    def _handle(self, event: object) -> None:
        now = time.monotonic()
        if isinstance(event, ReceiverJoined):
            if self._peers[event.rank].stage is Stage.EXPECTED:
                self.served[event.rank] = Served(event.connection)
            if not self._machine.joined(event.rank, event.message, event.several, now):
                self._node.put_back(event)
        elif isinstance(event, WrongStep):
            self._machine.wrong_step(event.join.rank, event.reason)
        elif isinstance(event, (MessageHeard, ConnectionLost)):
            one = self.served.get(event.connection.rank)
            if one is not None and one.connection is event.connection:
                if isinstance(event, MessageHeard):
                    self._machine.heard(event.connection.rank, event.message, now)
                else:
                    self._machine.lost(event.connection.rank, event.reason)
        elif isinstance(event, ChunkSent):
            self._count(event.index)
        elif isinstance(event, FeedBroken) and not isinstance(event.fault, OSError):
            raise event.fault  # the state cannot be read
        elif isinstance(event, r.ServiceFailed):
            if self._peers[event.rank].stage is Stage.ACTIVE:
                self._machine.fail(self._peers[event.rank], event.reason)
        elif isinstance(event, Exception):
            raise event

    def _count(self, index: int) -> None:
        chunks = self.snapshot.chunks
        if index not in self._gone and index < len(chunks):
            self._gone.add(index)
            self._gone_bytes += chunks.sizes[index]
            self._progress(self._gone_bytes, chunks.stream_bytes)

    # Effects of the machine

    def offer(self, rank: int, join: m.Join, several: bool) -> str:
        self._peers[rank].settled = self._node.settle(rank, join.committed)
        try:
            offer = self._make_offer(rank, join, several)
        except Exception as fault:
            return _reason(fault)
        self.send(rank, offer)
        likely = join.place.devices and not join.parts and "cuda_ipc" in offer.routes
        if likely and offer.verify:
            # Devices hash what lies there: the receiver is likely to ask for it.
            self._workers.submit(self._outgoing.hash_on_devices)
        return ""

    def _make_offer(self, rank: int, join: m.Join, several: bool) -> m.Offer:
        """A record, and the routes by which the bytes can travel."""
        one, outgoing = self.served[rank], self._outgoing
        receiver = r.Receiver(
            rank,
            self._member,
            join,
            self._tickets,
            self._options.connections,
            one.connection.send,
            self._inbox.put,
        )
        one.services = services(receiver, self._options.route)
        said = {name: end.offer(outgoing) for name, end in one.services.items()}
        return m.Offer(
            self._record,
            receiver.transfer,
            outgoing.verify is not False,
            outgoing.cells,
            self._options.route,
            {name: facts for name, facts in said.items() if isinstance(facts, bytes)},
            {name: why.because for name, why in said.items() if isinstance(why, r.Unavailable)},
            several,
            max(1, cores() // len(self._peers)),
        )

    def go(self, link: r.Link, patience: float) -> str:
        one, accept = self.served[link.rank], self._peers[link.rank].accept
        assert accept is not None
        one.service, one.asked = one.services[accept.route], set()
        try:
            data = one.service.begin(self._outgoing_of(accept), accept, link)
        except Exception as fault:
            return _reason(fault)
        one.connection.send(m.Go(data, patience))
        return ""

    def _outgoing_of(self, accept: m.Accept) -> Outgoing:
        """The bytes for a receiver: the state, or the parts of it that it asks for."""
        if accept.reads is None:
            return self._outgoing
        reads = decode_reads(accept.reads, self.snapshot.record)
        return Outgoing(SnapshotPart(self.snapshot, reads), self._member, self._options.verify)

    def serve(self, rank: int, asked: m.Need | m.Want | m.RouteNote) -> str:
        one = self.served[rank]
        assert one.service is not None and one.service.outgoing is not None
        try:
            if isinstance(asked, m.RouteNote):
                one.service.hear(asked.data)
            elif isinstance(asked, m.Need):
                self.snapshot.check_unchanged()
                one.service.need(asked.chunks, restart=asked.restart)
            else:
                self._tell_digests(one, one.service.outgoing, asked)
        except (r.RouteFault, RemoteProtocolError) as fault:
            return str(fault)
        return ""

    def _tell_digests(self, one: Served, outgoing: Outgoing, want: m.Want) -> None:
        """Have workers make the digests that a receiver asks for: each once, and sent at once."""
        chunks = m.from_ranges(want.chunks, len(outgoing.snapshot.chunks))
        again = not one.asked.isdisjoint(chunks)
        one.asked.update(chunks)
        # A device hashes all that lies there at once.
        on_gpu = [index for index in chunks if index in outgoing.on_gpu]
        others = [index for index in chunks if index not in outgoing.on_gpu]
        size = len(others) // MOST_ANSWERS + 1
        jobs = [others[at : at + size] for at in range(0, len(others), size)]

        def answer(some: list[int]) -> None:
            digests = b"".join(map(outgoing.digest, some))
            one.connection.send(m.Digests(tuple(some), digests))

        for job in [on_gpu, *jobs] if on_gpu else jobs:
            self._workers.submit(partial(answer, job))
        if again:
            self.snapshot.check_unchanged()  # one did not match

    def confirm(self, rank: int) -> None:
        self.snapshot.check_unchanged()
        accept = self._peers[rank].accept
        if accept is not None and BY_NAME[accept.route].reads:
            self._progress(self.snapshot.chunks.stream_bytes, self.snapshot.chunks.stream_bytes)
        self.served[rank].connection.send(m.Confirmed())

    def send(self, rank: int, message: m.Message) -> None:
        self.served[rank].connection.send(message)

    def drop(self, rank: int) -> None:
        if self._peers[rank].stage is Stage.UNKNOWN:
            self._node.unknown[rank] = self._tickets[rank].transfer
        self.served[rank].close()


def _reason(fault: Exception) -> str:
    return fault.message if isinstance(fault, RelayError) else repr(fault)
