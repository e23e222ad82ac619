"""The receiving side of a live transfer, as a straight line:

    join -> offer -> fit -> accept -> go -> fetch -> fetched -> confirmed -> commit -> done

An error anywhere closes the connection, with the reason if there is one to tell. Nothing of the
caller's is written before the commit, unless `atomic=False` asks for that.
"""

from __future__ import annotations

import secrets
from contextlib import suppress
from functools import partial
from typing import Any

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
from torchrelay.landing.workspace import Workspace
from torchrelay.memory.gpu.side import settle
from torchrelay.memory.uninterrupted import uninterrupted
from torchrelay.record.encoding import decode
from torchrelay.record.schema import Record
from torchrelay.transports.meeting.conversation import Conversation
from torchrelay.transports.meeting.node import Node
from torchrelay.transports.protocol.options import ReceiveOptions, TransferCall
from torchrelay.transports.resources import Resources
from torchrelay.transports.routes.choice import Choice, choose
from torchrelay.transports.routes.host import place
from torchrelay.transports.routes.route import Incoming
from torchrelay.transports.wire.messages import (
    NONCE_BYTES,
    Abort,
    Accept,
    Confirmed,
    Done,
    Fetched,
    Go,
    Join,
    Message,
    Offer,
    Refuse,
    text,
)

_REFUSALS: dict[type[RelayError], str] = {
    ManifestError: "manifest",
    RouteError: "route",
    StepMismatchError: "step",
    UnsupportedLeafError: "unsupported",
}
PARTING_SECONDS = 0.1
REFUSED = (StateError, StepMismatchError, ManifestError, RouteError)


def refusal(fault: RelayError) -> Refuse:
    """The message to a sender whose state is refused."""
    path = None if fault.path is None else text(fault.path)
    return Refuse(_REFUSALS.get(type(fault), "mismatch"), text(fault.message), path)


def last_message(fault: BaseException, *, torn: bool) -> Message:
    """The message to the sender when a receive fails. An object that rejects its state refuses it,
    like a destination that does not fit."""
    if isinstance(fault, REFUSED) and not torn:
        return refusal(fault)
    reason = fault.message if isinstance(fault, RelayError) else repr(fault)
    return Abort(text(reason), late=isinstance(fault, TransferTimeoutError))


class Greeting:
    """A receiver's description of itself when it joins, and the proof of it."""

    def __init__(self, me: int, sender: int, route: str | None) -> None:
        # A route that crosses a wire reads no memory of another process.
        reads = route in (None, "memory", "cuda_ipc")
        self.nonce = secrets.token_bytes(NONCE_BYTES) if reads else b""
        self.place = place.here()
        self.fd = -1
        self._proof: place.Proof | None = None
        if self.place.devices and self.nonce:
            with suppress(OSError):  # then no device memory is opened
                claim = place.claim(self.nonce, me, sender, bytes(16))
                self._proof = place.Proof(claim)
                self.fd = self._proof.process.fd

    def join(self, step: int | None, *, parts: bool, committed: bytes) -> Join:
        return Join(step, parts, self.place, self.nonce, self.fd, committed)


class Receiving:
    """One receive from one rank. `run` returns what landed."""

    record: Record
    choice: Choice

    def __init__(
        self,
        node: Node,
        group: Any,
        sender: int,
        me: int,
        options: ReceiveOptions,
        call: TransferCall,
        resources: Resources,
        workspace: Workspace,
    ) -> None:
        self._node, self._group, self._sender, self._me = node, group, sender, me
        self._options, self._resources, self._workspace = options, resources, workspace
        self.deadline, self.watch, self._progress = call.deadline, call.watch, call.progress
        self._landing: Landing | None = None
        self.nbytes = 0  # of the state

    def run(self) -> Landed:
        greeting = Greeting(self._me, self._sender, self._options.route)
        with self.watch("call"):
            talk = Conversation(self._node, self._sender, self._me, self.deadline, self.watch)
        try:
            return self._run(talk, greeting)
        except BaseException as fault:
            torn = self._landing is not None and self._landing.torn
            talk.send(last_message(fault, torn=torn))
            if isinstance(fault, REFUSED) and fault.rank is None:
                fault.rank, fault.phase = self._sender, self.watch.phase
            if isinstance(fault, TornStateError):  # it names what is old and what is new
                fault.rank, fault.step, fault.phase = self._sender, talk.step, self.watch.phase
            elif torn and isinstance(fault, Exception):
                raise TornStateError(
                    TORN, rank=self._sender, step=talk.step, phase=self.watch.phase
                ) from fault
            raise
        finally:
            if hasattr(self, "choice"):
                self.choice.fetch.close()
            talk.close()

    def _run(self, talk: Conversation, greeting: Greeting) -> Landed:
        options = self._options
        with self.watch("call"):
            committed = self._node.committed(self._sender)
            talk.send(greeting.join(options.step, parts=False, committed=committed))
            # While the sender describes its state.
            into = _prepared(options.into)
            offer = talk.expect(Offer)
        with self.watch("join"):
            landing = self._fit(talk, offer, into)
            incoming = Incoming(
                talk,
                offer,
                greeting.nonce,
                self._group,
                self._resources,
                options.connections,
                self._progress,
                landing.on_device,
                partial(named, self.record, landing.chunks),
            )
            self.choice = self._choose(incoming)
            route, fetch = self.choice.route, self.choice.fetch
            talk.send(Accept(route.name, fetch.answer, self.choice.instead))
            go = Go(offer.go) if route.name == offer.likely else talk.expect(Go)
        with self.watch("data"):
            fetch.run(go.data, landing, go.patience)
            talk.send(Fetched())
            landing.arrived()
            talk.expect(Confirmed)
        with self.watch("commit"):
            landed = uninterrupted(partial(self._commit, landing, offer.transfer))
            talk.send(Done())
        with self.watch("pass on"):
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
        self._node.note_committed(self._sender, transfer)
        return landed

    def _fit(self, talk: Conversation, offer: Offer, into: object) -> Landing:
        """Compare the offer with the destination; everything that can be refused is refused."""
        self.record = decode(offer.record, in_time=partial(_in_time, talk))
        talk.step = step = self.record.step
        wanted = self._options.step
        if wanted is not None and step != wanted:
            raise StepMismatchError(
                f"step {step} is offered, step {wanted} was asked for", step=step
            )
        landing = land(self.record, into, self._options.landing, self._workspace)
        self._landing = landing
        self.nbytes = landing.chunks.nbytes
        return landing


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
