"""The receiving side of a live transfer, as a straight line:

    join -> offer -> fit -> accept -> go -> fetch -> fetched -> confirmed -> commit -> done

An error anywhere closes the connection, with the reason if there is one to tell. Nothing of the
caller's is written before the commit, unless `atomic=False` asks for that.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Collection
from contextlib import suppress
from functools import cached_property, partial

from torchrelay.deadlines import Stopwatch
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
from torchrelay.landing.commit.landing import TORN, Landed, Landing
from torchrelay.landing.land import land
from torchrelay.landing.read_target import ReadTarget, named
from torchrelay.memory.gpu.side import settle
from torchrelay.memory.uninterrupted import uninterrupted
from torchrelay.planning.destination import Destination
from torchrelay.record.encoding import decode
from torchrelay.record.schema import Record
from torchrelay.results import Loaded, Outcome, Report, Traffic
from torchrelay.transports.meeting.conversation import Conversation
from torchrelay.transports.protocol.options import ReceiveOptions, TransferCall
from torchrelay.transports.resources import Member
from torchrelay.transports.routes.choice import BY_NAME, Choice, choose
from torchrelay.transports.routes.host import claims, location
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


class SourceRank:
    """A rank that a state, or a part of it, is received from. It has been sent a `Join`."""

    offer: m.Offer

    def __init__(
        self,
        member: Member,
        rank: int,
        options: ReceiveOptions,
        call: TransferCall,
        *,
        parts: bool = False,
    ) -> None:
        self.rank, self._member, self._options = rank, member, options
        self.choices: list[Choice] = []
        self.nbytes = 0  # that come from it
        self.confirmed = False  # its state is unchanged
        # A route that crosses a wire reads no memory of another process.
        reads = options.route is None or BY_NAME[options.route].reads
        self._nonce = secrets.token_bytes(m.NONCE_BYTES) if reads else b""
        here, fd = location.here(), -1
        if here.devices and reads:
            with suppress(OSError):  # then no device memory is opened
                claim = claims.claim(self._nonce, member.rank, rank, bytes(16))
                self._proof = claims.Proof(claim)
                fd = self._proof.claimant.fd
        self.talk = Conversation(member.meeting, rank, member.rank, call.deadline, call.watch)
        committed = member.node.committed.find(self.talk.process) or b""
        address = member.node.identity.address
        self.talk.send(m.Join(options.step, parts, here, self._nonce, fd, committed, address))

    @cached_property
    def record(self) -> Record:
        """The record that is offered, of the step that was asked for."""
        found = decode(self.offer.record, in_time=self._check_time)
        self.talk.step, wanted = found.step, self._options.step
        if wanted not in (None, found.step):
            raise StepMismatchError(
                f"step {found.step} is offered, step {wanted} was asked for", step=found.step
            )
        return found

    def _check_time(self) -> None:
        if self.talk.deadline.passed:
            raise self.talk.late("offer in time")

    def accept(
        self, target: ReadTarget, progress: Callable[[int, int], None], reads: bytes | None = None
    ) -> Callable[[], None]:
        """Take the offer, or these reads of it, by the fastest route; returns the call that brings
        the bytes to the target."""
        incoming = Incoming(
            self.talk,
            self.offer,
            self._nonce,
            self._member,
            self._options.connections,
            progress,
            target,
            partial(named, self.record, target.chunks) if reads is None else None,
        )
        route, fetch, instead = choice = self._choose(incoming)
        self.choices.append(choice)
        self.nbytes += target.chunks.nbytes
        self.talk.send(m.Accept(route.name, fetch.answer, instead, reads))
        fetch.get_ready()
        begins = route.in_offer and reads is None
        return partial(fetch.run, b"" if begins else self.talk.expect(m.Go).data)

    def _choose(self, incoming: Incoming) -> Choice:
        try:
            return choose(incoming, self._options.route)
        except RouteError as fault:
            # A sender that has given up has taken away what a route needs: it says so.
            try:
                self.talk.next("answer", PARTING_SECONDS)
            except RelayError as other:
                raise other from fault
            raise

    def note_commit(self) -> None:
        """Its state has been taken: a sender that does not know so asks when it sends again."""
        self._member.node.committed.note(self.talk.process, self.offer.transfer)

    def stop(self) -> None:
        """Nothing is written to a target after this."""
        for choice in self.choices:
            choice.fetch.close()

    def close(self) -> None:
        self.stop()
        self.talk.close()


def report_of(
    sources: Collection[SourceRank], step: int | None, nbytes: int, landed: Landed, watch: Stopwatch
) -> Report:
    """The report of a receive."""
    choices = [one for source in sources for one in source.choices]
    fetches = [one.fetch for one in choices]
    return Report(
        step=step,
        bytes=nbytes,
        seconds=watch.seconds,
        peers={source.rank: _outcome(source) for source in sources},
        missing=tuple(landed.missing),
        extra=tuple(landed.extra),
        verified=all(fetch.verified for fetch in fetches),
        instead={name: why for one in choices for name, why in one.instead.items()},
        traffic=Traffic(
            sum(fetch.wire_bytes for fetch in fetches),
            sum(fetch.messages for fetch in fetches),
            sum(fetch.connections for fetch in fetches),
        ),
    )


def _outcome(source: SourceRank) -> Outcome:
    routes = {one.route.name for one in source.choices}
    route = routes.pop() if len(routes) == 1 else "mixed" if routes else ""
    return Outcome(route=route, bytes=source.nbytes)


class Receiving:
    """One receive from one rank."""

    def __init__(
        self, member: Member, sender: int, options: ReceiveOptions, call: TransferCall
    ) -> None:
        self._member, self._sender, self._options = member, sender, options
        self._call, self._watch = call, call.watch
        self._landing: Landing | None = None

    def run(self) -> Loaded:
        with self._watch("call"):
            # Meanwhile the sender describes its state, and is slow to answer a call.
            into = _prepared(self._options.into)
            source = SourceRank(self._member, self._sender, self._options, self._call)
        try:
            landed = self._run(source, into)
        except BaseException as fault:
            torn = self._landing is not None and self._landing.torn
            source.talk.send(last_message(fault, torn=torn))
            rank, step, phase = self._sender, source.talk.step, self._watch.phase
            if isinstance(fault, REFUSED) and fault.rank is None:
                fault.rank, fault.phase = rank, phase
            if isinstance(fault, TornStateError):  # it names what is old and what is new
                fault.rank, fault.step, fault.phase = rank, step, phase
            elif torn and isinstance(fault, Exception):
                raise TornStateError(TORN, rank=rank, step=step, phase=phase) from fault
            raise
        finally:
            source.close()
        step = source.record.step
        report = report_of([source], step, source.nbytes, landed, self._watch)
        return Loaded(landed.state, step, report)

    def _run(self, source: SourceRank, into: object) -> Landed:
        talk = source.talk
        with self._watch("call"):
            source.offer = talk.expect(m.Offer)
        with self._watch("join"):
            landing = self._landing = self._fit(source, into)
            bring = source.accept(landing.target(), self._call.progress)
        with self._watch("data"):
            bring()
            talk.send(m.Fetched())
        with self._watch("commit"):
            landing.make()  # while the sender looks whether its state is unchanged
        with self._watch("data"):
            talk.expect(m.Confirmed)
        with self._watch("commit"):
            landed = uninterrupted(partial(self._commit, landing, source))
            talk.send(m.Done())
        with self._watch("pass on"):
            source.choices[0].fetch.finish()
        return landed

    def _fit(self, source: SourceRank, into: object) -> Landing:
        """Compare the offer with the destination; everything that can be refused is refused."""
        return land(source.record, into, self._options.landing, self._member.workspace)

    def _commit(self, landing: Landing, source: SourceRank) -> Landed:
        landed = landing.end()
        settle()
        source.note_commit()
        return landed


def _prepared(into: object) -> object:
    """What can be found out about a destination before a state is offered."""
    if into is None:
        return None
    try:
        return Destination(into)
    except Exception:
        return into  # raised again when a state is offered for it, so that the sender hears of it
