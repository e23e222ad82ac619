"""The receiving side of a live transfer, as a straight line:

    join -> offer -> fit -> accept -> go -> fetch -> fetched -> confirmed -> commit -> done

An error anywhere closes the connection, with the reason if there is one to tell. Nothing of the
caller's is written before the commit, unless `atomic=False` asks for that.
"""

from __future__ import annotations

import secrets
from contextlib import suppress
from functools import partial

from torchrelay.errors import (
    ManifestError,
    RelayError,
    RouteError,
    StateError,
    StepMismatchError,
    TornStateError,
    TransferTimeoutError,
    UnsupportedLeafError,
)
from torchrelay.landing.commit.ending import TORN
from torchrelay.landing.destination import prepare
from torchrelay.landing.places import Landed, named
from torchrelay.landing.seam import Landing, land
from torchrelay.memory.gpu.side import settle
from torchrelay.memory.uninterrupted import uninterrupted
from torchrelay.record.encoding import decode
from torchrelay.record.schema import Record
from torchrelay.results import Loaded, Outcome, Report, Traffic
from torchrelay.transports.meeting.conversation import Conversation
from torchrelay.transports.protocol.options import ReceiveOptions, TransferCall
from torchrelay.transports.resources import Member
from torchrelay.transports.routes.choice import Choice, choose
from torchrelay.transports.routes.host import place
from torchrelay.transports.routes.route import Incoming
from torchrelay.transports.wire import messages as m

_REFUSALS: dict[type[RelayError], str] = {
    ManifestError: "manifest",
    RouteError: "route",
    StepMismatchError: "step",
    UnsupportedLeafError: "unsupported",
}
PARTING_SECONDS = 0.1
REFUSED = (StateError, StepMismatchError, ManifestError, RouteError)


def last_message(fault: BaseException, *, torn: bool) -> m.Message:
    """The message to the sender when a receive fails. An object that rejects its state refuses it,
    like a destination that does not fit."""
    if isinstance(fault, REFUSED) and not torn:
        path = None if fault.path is None else m.text(fault.path)
        return m.Refuse(_REFUSALS.get(type(fault), "mismatch"), m.text(fault.message), path)
    reason = fault.message if isinstance(fault, RelayError) else repr(fault)
    return m.Abort(m.text(reason), late=isinstance(fault, TransferTimeoutError))


class Greeting:
    """A receiver's description of itself when it joins, and the proof of it."""

    def __init__(self, me: int, sender: int, route: str | None) -> None:
        # A route that crosses a wire reads no memory of another process.
        reads = route in (None, "memory", "cuda_ipc")
        self.nonce = secrets.token_bytes(m.NONCE_BYTES) if reads else b""
        self.place = place.here()
        self.fd = -1
        self._proof: place.Proof | None = None
        if self.place.devices and self.nonce:
            with suppress(OSError):  # then no device memory is opened
                claim = place.claim(self.nonce, me, sender, bytes(16))
                self._proof = place.Proof(claim)
                self.fd = self._proof.process.fd

    def join(self, step: int | None, *, parts: bool, committed: bytes) -> m.Join:
        return m.Join(step, parts, self.place, self.nonce, self.fd, committed)


class Receiving:
    """One receive from one rank."""

    record: Record
    choice: Choice

    def __init__(
        self, member: Member, sender: int, options: ReceiveOptions, call: TransferCall
    ) -> None:
        self._member, self._sender, self._options = member, sender, options
        self._deadline, self._watch, self._progress = call.deadline, call.watch, call.progress
        self._landing: Landing | None = None

    def run(self) -> Loaded:
        node, me = self._member.node, self._member.rank
        greeting = Greeting(me, self._sender, self._options.route)
        with self._watch("call"):
            talk = Conversation(node, self._sender, me, self._deadline, self._watch)
        try:
            landed = self._run(talk, greeting)
        except BaseException as fault:
            torn = self._landing is not None and self._landing.torn
            talk.send(last_message(fault, torn=torn))
            if isinstance(fault, REFUSED) and fault.rank is None:
                fault.rank, fault.phase = self._sender, self._watch.phase
            if isinstance(fault, TornStateError):  # it names what is old and what is new
                fault.rank, fault.step, fault.phase = self._sender, talk.step, self._watch.phase
            elif torn and isinstance(fault, Exception):
                raise TornStateError(
                    TORN, rank=self._sender, step=talk.step, phase=self._watch.phase
                ) from fault
            raise
        finally:
            if hasattr(self, "choice"):
                self.choice.fetch.close()
            talk.close()
        return Loaded(landed.state, self.record.step, self._report(landed))

    def _run(self, talk: Conversation, greeting: Greeting) -> Landed:
        options = self._options
        with self._watch("call"):
            committed = self._member.node.committed(self._sender)
            talk.send(greeting.join(options.step, parts=False, committed=committed))
            # While the sender describes its state.
            into = _prepared(options.into)
            offer = talk.expect(m.Offer)
        with self._watch("join"):
            landing = self._fit(talk, offer, into)
            incoming = Incoming(
                talk,
                offer,
                greeting.nonce,
                self._member,
                options.connections,
                self._progress,
                landing.on_device,
                partial(named, self.record, landing.chunks),
            )
            self.choice = self._choose(incoming)
            route, fetch = self.choice.route, self.choice.fetch
            talk.send(m.Accept(route.name, fetch.answer, self.choice.instead))
            go = m.Go(offer.go) if route.name == offer.likely else talk.expect(m.Go)
        with self._watch("data"):
            fetch.run(go.data, landing, go.patience)
            talk.send(m.Fetched())
            landing.arrived()
            talk.expect(m.Confirmed)
        with self._watch("commit"):
            landed = uninterrupted(partial(self._commit, landing, offer.transfer))
            talk.send(m.Done())
        with self._watch("pass on"):
            fetch.finish()
        return landed

    def _choose(self, incoming: Incoming) -> Choice:
        try:
            return choose(incoming, self._options.route)
        except RouteError as fault:
            # A sender that has given up has taken away what a route needs: it says so.
            try:
                incoming.conversation.next("answer", PARTING_SECONDS)
            except RelayError as other:
                raise other from fault
            raise

    def _commit(self, landing: Landing, transfer: bytes) -> Landed:
        landed = landing.commit()
        settle()
        self._member.node.note_committed(self._sender, transfer)
        return landed

    def _fit(self, talk: Conversation, offer: m.Offer, into: object) -> Landing:
        """Compare the offer with the destination; everything that can be refused is refused."""
        self.record = decode(offer.record, in_time=partial(_in_time, talk))
        talk.step = step = self.record.step
        wanted = self._options.step
        if wanted is not None and step != wanted:
            raise StepMismatchError(
                f"step {step} is offered, step {wanted} was asked for", step=step
            )
        landing = land(self.record, into, self._options.landing, self._member.workspace)
        self._landing = landing
        return landing

    def _report(self, landed: Landed) -> Report:
        assert self._landing is not None
        route, fetch, instead = self.choice
        nbytes = self._landing.chunks.nbytes
        return Report(
            step=self.record.step,
            bytes=nbytes,
            seconds=self._watch.seconds,
            peers={self._sender: Outcome(route=route.name, bytes=nbytes)},
            missing=tuple(landed.missing),
            extra=tuple(landed.extra),
            verified=fetch.verified,
            instead=instead,
            traffic=Traffic(fetch.wire_bytes, fetch.messages, fetch.connections),
        )


def _prepared(into: object) -> object:
    """What can be found out about a destination before a state is offered."""
    if into is None:
        return None
    try:
        return prepare(into)
    except StateError:
        return into  # refused when it is offered a state, so that the sender hears of it


def _in_time(talk: Conversation) -> None:
    if talk.deadline.passed:
        raise talk.late("offer in time")
