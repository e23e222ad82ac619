"""The sending side of a live transfer: the call, and its loop over events for a `SenderMachine`.

The loop runs in the thread that called `send`. The machine decides, and `Serving` does it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from torchrelay.deadlines import Deadline
from torchrelay.describing.snapshot import Snapshot, capture
from torchrelay.errors import RelayError
from torchrelay.results import Outcome, Report, Traffic
from torchrelay.transports.meeting.connection import ConnectionLost, MessageReceived
from torchrelay.transports.meeting.inbox import Inbox
from torchrelay.transports.meeting.matching import OpenSend, ReceiverJoined
from torchrelay.transports.meeting.node import DataTicket, Node
from torchrelay.transports.protocol.options import SendOptions, TransferCall
from torchrelay.transports.protocol.peers import Peer, Stage, outcome
from torchrelay.transports.protocol.sender_machine import SenderMachine, patience_of
from torchrelay.transports.protocol.serving import Serving
from torchrelay.transports.resources import Member
from torchrelay.transports.routes import route as r
from torchrelay.transports.routes.choice import ALWAYS, BY_NAME
from torchrelay.transports.routes.outgoing import Outgoing
from torchrelay.transports.streams.chunk_sender import ChunkSent, FeedBroken
from torchrelay.transports.wire import messages as m
from torchrelay.transports.wire.handshake import new_id, new_key

FAILED_SECONDS = 2.0  # for receivers to come and learn that the state cannot be sent
LAST_SECONDS = 0.5  # past the deadline, for messages that are on their way


class Sending:
    """One `send` call. `run` returns when each receiver is done or known to have failed."""

    def __init__(
        self, member: Member, ranks: Sequence[int], options: SendOptions, call: TransferCall
    ) -> None:
        self._member, self._options, self._call, self._watch = member, options, call, call.watch
        self._inbox = Inbox()
        self._open = OpenSend(options.step, frozenset(ranks), options.window, self._inbox)
        self._tickets = {rank: DataTicket(new_id(), new_key()) for rank in ranks}
        self._peers = {rank: Peer(rank) for rank in ranks}
        self._begun = time.monotonic()

    def run(self, state: object) -> Report:
        # Receivers come while the state is described.
        with self._member.node.open(self._open):
            snapshot, outgoing, serving = self._described(state)
            try:
                self._serve(outgoing, serving, snapshot)
            except RelayError as fault:
                fault.report = self._report(snapshot)
                raise
            finally:
                serving.close()
                for peer in self._peers.values():
                    peer.close()
        sent = f"{self._total('wire_bytes')} of {snapshot.chunks.stream_bytes} bytes sent"
        step, phase = self._options.step, self._watch.phase
        failure = outcome(self._peers.values(), sent=sent, step=step, phase=phase)
        if failure is not None:
            failure.report = self._report(snapshot)
            raise failure
        return self._report(snapshot)

    def _described(self, state: object) -> tuple[Snapshot, Outgoing, Serving]:
        try:
            with self._watch("capture"):
                snapshot = capture(
                    state,
                    self._options.step,
                    receivers=len(self._peers),
                    chunk_bytes=self._options.chunk_bytes,
                    objects=True,
                )
                give_way()
                snapshot.encoded()
            outgoing = Outgoing(snapshot, self._member, self._options.verify)
            give_way()
            serving = Serving(
                self._member,
                outgoing,
                snapshot,
                self._options,
                self._call,
                send=self._open,
                tickets=self._tickets,
                patience=patience_of(self._options, self._call.deadline.seconds, len(self._peers)),
                report=self._inbox.put,
            )
        except BaseException as fault:
            self._tell_why_not(fault)
            raise
        return snapshot, outgoing, serving

    def _tell_why_not(self, fault: BaseException) -> None:
        """Tell receivers why the state does not come. One that is about to come is waited for,
        unless the caller was interrupted."""
        reason = m.text(f"the sender cannot send its state: {type(fault).__name__}: {fault}")
        waits = FAILED_SECONDS if isinstance(fault, Exception) else 0.0
        ends = time.monotonic() + min(waits, self._call.deadline.left())
        missing = set(self._peers)
        while missing and (event := self._inbox.get(ends - time.monotonic())) is not None:
            if isinstance(event, ReceiverJoined):
                event.connection.send(m.Abort(reason))
                event.connection.close()
                missing.discard(event.rank)

    def _serve(self, outgoing: Outgoing, serving: Serving, snapshot: Snapshot) -> None:
        seconds = self._call.deadline.seconds
        machine = SenderMachine(self._options, seconds, self._peers, serving, self._begun)
        progress = _Progress(snapshot, self._call.progress)
        deadline, node = self._call.deadline, self._member.node
        loop = SendLoop(self._inbox, machine, self._peers, node, deadline, progress.count)
        try:
            with self._watch("join"):
                # A receiver that waits gets its offer first, and looks at it meanwhile.
                loop.take(0.0)
                if self._options.route is None or BY_NAME[self._options.route].in_offer:
                    outgoing.get_ready()
                while machine.joining:
                    loop.step()
            with self._watch("data"):
                while not machine.over:
                    loop.step()
        except BaseException as fault:
            machine.abort(f"the sender gave up: {fault}")
            raise

    def _report(self, snapshot: Snapshot) -> Report:
        verify, options, peers = self._options.verify, self._options, self._peers.values()
        accepts = [peer.accept for peer in peers if peer.accept is not None]
        outcomes: dict[int | str, Outcome] = {peer.rank: _outcome(peer) for peer in peers}
        taken = {one.route for one in outcomes.values() if one.route} or {
            options.route or ALWAYS.name
        }
        return Report(
            step=options.step,
            bytes=snapshot.chunks.nbytes,
            seconds=self._watch.seconds,
            peers=outcomes,
            verified=all(BY_NAME[name].compares(verify) for name in taken),
            instead={name: why for one in accepts for name, why in one.instead.items()},
            traffic=Traffic(*map(self._total, ("wire_bytes", "messages", "connections"))),
        )

    def _total(self, counter: str) -> int:
        """The sum of "wire_bytes", "messages" or "connections" of all receivers."""
        services = [peer.service for peer in self._peers.values()]
        return sum(getattr(service, counter) for service in services if service is not None)


def _outcome(peer: Peer) -> Outcome:
    done, unknown = peer.stage is Stage.DONE, peer.stage is Stage.UNKNOWN
    return Outcome(
        "done" if done else "unknown" if unknown else "failed",
        "" if done else peer.reason,
        peer.accept.route if done and peer.accept is not None else "",
        rerouted=peer.rerouted,
        settled=peer.settled,
    )


class _Progress:
    """Reports the bytes of chunks that have left at least once."""

    def __init__(self, snapshot: Snapshot, progress: Callable[[int, int], None]) -> None:
        self._chunks, self._progress = snapshot.chunks, progress
        self._sent: set[int] = set()
        self._bytes = 0

    def count(self, index: int) -> None:
        if index not in self._sent and index < len(self._chunks):
            self._sent.add(index)
            self._bytes += self._chunks.sizes[index]
            self._progress(self._bytes, self._chunks.stream_bytes)


class SendLoop:
    """Takes events from the inbox, one at a time, and the time; tells the machine of both."""

    def __init__(
        self,
        inbox: Inbox,
        machine: SenderMachine,
        peers: Mapping[int, Peer],
        node: Node,
        deadline: Deadline,
        chunk_sent: Callable[[int], None],
    ) -> None:
        self._inbox, self._machine, self._peers = inbox, machine, peers
        self._node, self._deadline, self._chunk_sent = node, deadline, chunk_sent

    def step(self) -> None:
        """Handle the next event, if one comes in time, and look at the clock."""
        machine = self._machine
        left = machine.join_ends() - time.monotonic() if machine.joining else self._deadline.left()
        self.take(min(left, machine.tick_seconds))
        self._tick()
        if machine.joining:
            if time.monotonic() >= machine.join_ends():
                machine.end_join(time.monotonic())
        elif self._deadline.passed:
            # Messages that came while this process was stopped count, and a receiver may be about
            # to report that it is done.
            last = Deadline(LAST_SECONDS)
            while not last.passed and self.take(last.left() * bool(machine.among(Stage.CONFIRMED))):
                pass
            machine.time_is_up()

    def take(self, seconds: float) -> bool:
        """Handle the next event; False if none comes in time."""
        event = self._inbox.get(seconds)
        if event is not None:
            self._handle(event)
        return event is not None

    def _tick(self) -> None:
        now, silent, stuck = time.monotonic(), {}, {}
        for rank, peer in self._peers.items():
            if peer.connection is not None:
                silent[rank] = now - peer.connection.received_at
            # Read once: the last chunk may leave between two looks.
            if peer.service is not None and (since := peer.service.stuck_since) is not None:
                stuck[rank] = now - since
        self._machine.tick(now, silent, stuck)

    def _handle(self, event: object) -> None:
        now = time.monotonic()
        if isinstance(event, ReceiverJoined):
            self._joined(event, now)
        elif isinstance(event, (MessageReceived, ConnectionLost)):
            peer = self._peers[event.connection.rank]
            if peer.connection is not event.connection:
                return  # it was put back
            if isinstance(event, MessageReceived):
                self._machine.received(peer.rank, event.message, now)
            else:
                self._machine.lost(peer.rank, event.reason)
        elif isinstance(event, ChunkSent):
            self._chunk_sent(event.index)
        elif isinstance(event, FeedBroken) and not event.may_mend:
            raise event.fault
        elif isinstance(event, r.ServiceFailed):
            if self._peers[event.rank].stage is Stage.ACTIVE:
                self._machine.fail(self._peers[event.rank], event.reason)
        elif isinstance(event, Exception):
            raise event

    def _joined(self, event: ReceiverJoined, now: float) -> None:
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


def give_way() -> None:
    """Let the I/O thread answer receivers that call: a thread that computes without a pause keeps
    the interpreter from it for 5 ms."""
    time.sleep(0)
