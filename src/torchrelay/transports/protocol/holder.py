"""A rank that has a state, or a part of it, as its receiver sees it: the conversation with it, and
the routes that its bytes take."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from functools import partial

from torchrelay.deadlines import Deadline, Stopwatch
from torchrelay.errors import (
    ManifestError,
    RelayError,
    RouteError,
    StateError,
    StepMismatchError,
    TransferTimeoutError,
    UnsupportedLeafError,
)
from torchrelay.landing.commit.landing import Landed
from torchrelay.landing.read_target import named
from torchrelay.record.encoding import decode
from torchrelay.record.rank_reads import encode_reads
from torchrelay.record.schema import Record
from torchrelay.results import Outcome, Peer, Report, Traffic
from torchrelay.transports.meeting.conversation import Conversation
from torchrelay.transports.protocol.options import ReceiveOptions
from torchrelay.transports.protocol.receive_plan import HolderReads
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
    """The message to a holder when a receive fails. An object that rejects its state refuses it,
    like a destination that does not fit."""
    if isinstance(fault, REFUSED) and not torn:
        path = None if fault.path is None else m.text(fault.path)
        return m.Refuse(_REFUSALS.get(type(fault), "mismatch"), m.text(fault.message), path)
    reason = fault.message if isinstance(fault, RelayError) else repr(fault)
    return m.Abort(m.text(reason), timed_out=isinstance(fault, TransferTimeoutError))


class LiveHolder:
    """A rank that has been sent a `Join`. `deadline` is that of its offer."""

    offer: m.Offer
    record: Record

    def __init__(
        self,
        member: Member,
        rank: int,
        options: ReceiveOptions,
        deadline: Deadline,
        watch: Stopwatch,
    ) -> None:
        self.rank, self._member, self._options = rank, member, options
        self.choices: list[Choice] = []
        self.nbytes = 0  # that come from it
        # A route that crosses a wire reads no memory of another process.
        reads = options.route is None or BY_NAME[options.route].reads
        self._nonce = secrets.token_bytes(m.NONCE_BYTES) if reads else b""
        here, fd = location.here(), -1
        if here.devices and reads:
            with suppress(OSError):  # then no device memory is opened
                claim = claims.claim(self._nonce, member.rank, rank, bytes(16))
                self._proof = claims.Proof(claim)
                fd = self._proof.claimant.fd
        self.talk = Conversation(member.meeting, rank, member.rank, deadline, watch)
        committed = member.node.committed.find(self.talk.process) or b""
        address, parts = member.node.identity.address, options.reshard
        self.talk.send(m.Join(options.step, parts, here, self._nonce, fd, committed, address))

    def wait_for_offer(self) -> None:
        """Returns when its offer is here."""
        self.offer = self.talk.expect(m.Offer)

    def read_offer(self) -> None:
        """Decode the record that is offered, and check that it is of the step that was asked
        for."""
        self.record = found = decode(self.offer.record, in_time=self._check_time)
        self.talk.step, wanted = found.step, self._options.step
        if wanted not in (None, found.step):
            raise StepMismatchError(
                f"step {found.step} is offered, step {wanted} was asked for", step=found.step
            )

    def _check_time(self) -> None:
        if self.talk.deadline.passed:
            raise self.talk.overdue("offer in time")

    def accept(self, reads: HolderReads, progress: Callable[[int, int], None]) -> None:
        """Take the offer, or these reads of it, by the fastest route."""
        target, request = reads.target, reads.request
        incoming = Incoming(
            self.talk,
            self.offer,
            self._nonce,
            self._member,
            self._options.connections,
            progress,
            target,
            partial(named, self.record, target.chunks) if request is None else None,
        )
        route, fetch, instead = choice = self._choose(incoming)
        self.choices.append(choice)
        self.nbytes += target.chunks.nbytes
        encoded = None if request is None else encode_reads(request)
        self.talk.send(m.Accept(route.name, fetch.answer, instead, encoded))
        fetch.get_ready()

    def fetch(self) -> None:
        """Returns when everything is here that was accepted last, and verified."""
        route, fetch, _ = self.choices[-1]
        begins = route.in_offer and not self._options.reshard
        fetch.run(b"" if begins else self.talk.expect(m.Go).data)

    def confirm(self) -> None:
        """Returns when the holder has confirmed that its state is unchanged."""
        self.talk.send(m.Fetched())
        self.talk.expect(m.Confirmed)

    def finish(self) -> None:
        """Serve other receivers that take bytes from here."""
        self.choices[-1].fetch.finish()

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
    holders: Collection[LiveHolder],
    lost: Mapping[int, RelayError],
    step: int | None,
    nbytes: int,
    landed: Landed,
    watch: Stopwatch,
) -> Report:
    """The report of a receive."""
    choices = [one for holder in holders for one in holder.choices]
    fetches = [one.fetch for one in choices]
    peers: dict[Peer, Outcome] = {holder.rank: _outcome(holder) for holder in holders}
    peers |= {rank: Outcome("failed", str(why)) for rank, why in lost.items()}
    return Report(
        step=step,
        bytes=nbytes,
        seconds=watch.seconds,
        peers=peers,
        missing_keys=tuple(landed.extra),
        unexpected_keys=tuple(landed.missing),
        verified=all(fetch.verified for fetch in fetches),
        instead={name: why for one in choices for name, why in one.instead.items()},
        traffic=Traffic(
            sum(fetch.wire_bytes for fetch in fetches),
            sum(fetch.messages for fetch in fetches),
            sum(fetch.connections for fetch in fetches),
        ),
    )


def _outcome(holder: LiveHolder) -> Outcome:
    routes = {one.route.name for one in holder.choices}
    route = routes.pop() if len(routes) == 1 else "mixed" if routes else ""
    return Outcome(route=route, bytes=holder.nbytes)
