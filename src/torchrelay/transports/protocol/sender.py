"""The sending side of a live transfer: connections, workers and the clock for a `SenderMachine`.

One loop, in the thread that called `send`, takes events from an inbox and tells the machine, which
calls back what must be done.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial

from torchrelay.deadlines import Deadline
from torchrelay.describing.snapshot import Snapshot, SnapshotPart, capture
from torchrelay.errors import RelayError
from torchrelay.memory.pool import cores
from torchrelay.record.rank_reads import decode_reads
from torchrelay.results import Outcome, Report, Traffic
from torchrelay.transports.meeting.connection import ConnectionLost, MessageReceived
from torchrelay.transports.meeting.inbox import Inbox
from torchrelay.transports.meeting.matching import OpenSend, ReceiverJoined
from torchrelay.transports.meeting.node import DataTicket
from torchrelay.transports.protocol.options import SendOptions, TransferCall
from torchrelay.transports.protocol.peers import Peer, Stage, outcome
from torchrelay.transports.protocol.sender_machine import SenderMachine
from torchrelay.transports.resources import Member
from torchrelay.transports.routes import route as r
from torchrelay.transports.routes.choice import ALWAYS, BY_NAME, services
from torchrelay.transports.routes.outgoing import Outgoing
from torchrelay.transports.streams.chunk_sender import ChunkSent, FeedBroken
from torchrelay.transports.streams.workers import Workers
from torchrelay.transports.wire import messages as m
from torchrelay.transports.wire.handshake import new_id, new_key

EXCUSE_SECONDS = 2.0  # for receivers to come and hear that the state cannot be sent
LAST_SECONDS = 0.5  # past the deadline, for what is on its way
MOST_ANSWERS = 1024  # messages with digests, to a receiver that asks once


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
        self._tickets = {rank: DataTicket(new_id(), new_key()) for rank in ranks}
        self._peers = {rank: Peer(rank) for rank in ranks}
        seconds, begun = call.deadline.seconds, time.monotonic()
        self._machine = SenderMachine(options, seconds, self._peers, self, begun)

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
                give_way()
                self._record = self.snapshot.encoded()
            self._outgoing = Outgoing(self.snapshot, self._member, self._options.verify)
            give_way()
            with self._watch("join"):
                # A receiver that waits gets its offer first, and looks at it meanwhile.
                self._take(0.0)
                if self._options.route is None or BY_NAME[self._options.route].in_offer:
                    self._outgoing.get_ready()
                while self._machine.joining:
                    self._step()
            with self._watch("data"):
                while not self._machine.over:
                    self._step()
        except BaseException as fault:
            if not hasattr(self, "_outgoing"):
                self._excuse(fault)
            self._machine.abort(f"the sender gave up: {fault}")
            raise
        finally:
            self._close()

    def _report(self) -> Report:
        verify, options, peers = self._options.verify, self._options, self._peers.values()
        accepts = [peer.accept for peer in peers if peer.accept is not None]
        outcomes: dict[int | str, Outcome] = {peer.rank: self._outcome(peer) for peer in peers}
        taken = {one.route for one in outcomes.values() if one.route} or {
            options.route or ALWAYS.name
        }
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
        services = [peer.service for peer in self._peers.values()]
        return sum(getattr(service, what) for service in services if service is not None)

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

    def _step(self) -> None:
        """Handle the next event, if one comes in time, and look at the clock."""
        machine = self._machine
        left = machine.join_ends() - time.monotonic() if machine.joining else self._deadline.left()
        self._take(min(left, machine.tick_seconds))
        self._tick()
        if machine.joining:
            if time.monotonic() >= machine.join_ends():
                machine.end_join(time.monotonic())
        elif self._deadline.passed:
            # Messages that came while this process was stopped count, and a receiver may be about
            # to report that it is done.
            last = Deadline(LAST_SECONDS)
            while not last.passed and self._take(
                last.left() * bool(machine.among(Stage.CONFIRMED))
            ):
                pass
            machine.time_is_up()

    def _tick(self) -> None:
        now, silent, stuck = time.monotonic(), {}, {}
        for rank, peer in self._peers.items():
            if peer.connection is not None:
                silent[rank] = now - peer.connection.received_at
            # Asked once: the last chunk may leave between two looks.
            if peer.service is not None and (since := peer.service.stuck_since) is not None:
                stuck[rank] = now - since
        self._machine.tick(now, silent, stuck)

    def _close(self) -> None:
        self._workers.stop()
        for peer in self._peers.values():
            peer.close()

    # Events

    def _take(self, seconds: float) -> bool:
        """Handle the next event; False if none comes in time."""
        event = self._inbox.get(seconds)
        if event is not None:
            self._handle(event)
        return event is not None

    def _handle(self, event: object) -> None:
        now = time.monotonic()
        if isinstance(event, ReceiverJoined):
            if self._peers[event.rank].stage is Stage.EXPECTED:
                self._peers[event.rank].connection = event.connection
            if self._machine.joined(event.rank, event.message, event.several, now):
                return
            # It has come too late. One that no other open send fits goes now, the rest wait.
            if reason := self._machine.wrong_step(event.message):
                event.connection.send(m.Abort(reason, kind="step"))
                event.connection.close()
            else:
                self._node.put_back(event)
        elif isinstance(event, (MessageReceived, ConnectionLost)):
            peer = self._peers[event.connection.rank]
            if peer.connection is not event.connection:
                return  # it was put back
            if isinstance(event, MessageReceived):
                self._machine.heard(peer.rank, event.message, now)
            else:
                self._machine.lost(peer.rank, event.reason)
        elif isinstance(event, ChunkSent):
            self._count(event.index)
        elif isinstance(event, FeedBroken) and not event.may_mend:
            raise event.fault
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

    def offer(self, peer: Peer, several: bool) -> None:
        join = peer.join
        assert join is not None
        if join.address is not None:
            peer.settled = self._node.settle(join.address.node, join.committed)
        offer = self._make_offer(peer, join, several)
        self.send(peer, offer)
        of_gpus = any(BY_NAME[name].of_gpus for name in offer.routes)
        if of_gpus and join.location.devices and not join.parts and offer.verify:
            # Devices hash what lies there: the receiver is likely to ask for it.
            self._workers.submit(self._outgoing.hash_on_devices)

    def another_came(self, peer: Peer) -> bool:
        return peer.rank in self._open.overlaps

    def _make_offer(self, peer: Peer, join: m.Join, several: bool) -> m.Offer:
        """A record, and the routes by which the bytes can travel."""
        outgoing = self._outgoing
        assert peer.connection is not None
        receiver = r.Receiver(
            peer.rank,
            self._member,
            join,
            self._tickets,
            self._options.connections,
            peer.connection.send,
            self._inbox.put,
        )
        peer.services = services(receiver, self._options.route)
        said = {name: end.offer(outgoing) for name, end in peer.services.items()}
        return m.Offer(
            self._record,
            receiver.transfer,
            outgoing.verify is not False,
            self._options.route,
            {name: facts for name, facts in said.items() if isinstance(facts, bytes)},
            {name: why.because for name, why in said.items() if isinstance(why, r.Unavailable)},
            several,
            max(1, cores() // len(self._peers)),
            self._machine.patience,
        )

    def go(self, peer: Peer, link: r.Link) -> None:
        accept = peer.accept
        assert accept is not None
        peer.service, peer.asked = peer.services[accept.route], set()
        data = peer.service.begin(self._outgoing_of(accept), accept, link)
        if accept.reads is not None or not BY_NAME[accept.route].in_offer:
            self.send(peer, m.Go(data))

    def _outgoing_of(self, accept: m.Accept) -> Outgoing:
        """The bytes for a receiver: the state, or the parts of it that it asks for."""
        if accept.reads is None:
            return self._outgoing
        reads = decode_reads(accept.reads, self.snapshot.record)
        return Outgoing(SnapshotPart(self.snapshot, reads), self._member, self._options.verify)

    def serve(self, peer: Peer, asked: m.Need | m.Want | m.RouteNote) -> None:
        assert peer.service is not None and peer.service.outgoing is not None
        if isinstance(asked, m.RouteNote):
            peer.service.hear(asked.data)
        elif isinstance(asked, m.Need):
            self.snapshot.check_unchanged()
            peer.service.need(asked.chunks, restart=asked.restart)
        else:
            self._tell_digests(peer, peer.service.outgoing, asked)

    def _tell_digests(self, peer: Peer, outgoing: Outgoing, want: m.Want) -> None:
        """Have workers make the digests that a receiver asks for: each once, and sent at once."""
        chunks = m.from_ranges(want.chunks, len(outgoing.snapshot.chunks))
        again = not peer.asked.isdisjoint(chunks)
        peer.asked.update(chunks)
        # A device hashes all that lies there at once.
        on_gpu = [index for index in chunks if index in outgoing.on_gpu]
        others = [index for index in chunks if index not in outgoing.on_gpu]
        size = len(others) // MOST_ANSWERS + 1
        jobs = [others[at : at + size] for at in range(0, len(others), size)]

        def answer(some: list[int]) -> None:
            digests = b"".join(map(outgoing.digest, some))
            self.send(peer, m.Digests(tuple(some), digests))

        for job in [on_gpu, *jobs] if on_gpu else jobs:
            self._workers.submit(partial(answer, job))
        if again:
            self.snapshot.check_unchanged()  # one did not match

    def confirm(self, peer: Peer) -> None:
        self.snapshot.check_unchanged()
        if peer.accept is not None and BY_NAME[peer.accept.route].reads:
            self._progress(self.snapshot.chunks.stream_bytes, self.snapshot.chunks.stream_bytes)
        self.send(peer, m.Confirmed())

    def send(self, peer: Peer, message: m.Message) -> None:
        assert peer.connection is not None
        peer.connection.send(message)

    def drop(self, peer: Peer) -> None:
        address = None if peer.join is None else peer.join.address
        if peer.stage is Stage.UNKNOWN and address is not None:
            self._node.unknown.note(address.node, self._tickets[peer.rank].transfer)
        peer.close()


def give_way() -> None:
    """Let the I/O thread answer receivers that call: a thread that computes without a pause keeps
    the interpreter from it for 5 ms."""
    time.sleep(0)
