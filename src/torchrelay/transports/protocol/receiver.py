"""The receiving side of a live transfer: join, look at the offer, take the data, say so."""

from __future__ import annotations

import queue
import secrets
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from typing import Any

import msgspec

from torchrelay.deadlines import Deadline, InterruptedTransfer
from torchrelay.errors import (
    ManifestError,
    MismatchError,
    PeerLostError,
    RelayError,
    RemoteProtocolError,
    RouteError,
    StateError,
    StepMismatchError,
    TornStateError,
    TransferTimeoutError,
)
from torchrelay.landing.commit.ending import TORN
from torchrelay.landing.places import Landed, named
from torchrelay.landing.seam import Landing
from torchrelay.memory.gpu.side import settle
from torchrelay.record import codec
from torchrelay.record.compact import KnownTree
from torchrelay.record.manifest import Manifest
from torchrelay.transports.group.lines import (
    GRACE,
    ControlLine,
    FirstMessage,
    GroupLines,
)
from torchrelay.transports.protocol import wire
from torchrelay.transports.protocol.exchange import HeldOffer
from torchrelay.transports.protocol.machines.actions import Say
from torchrelay.transports.protocol.machines.events import CLOSED, failure, refusal
from torchrelay.transports.protocol.machines.receiver_machine import ReceiverMachine
from torchrelay.transports.protocol.options import ReceiveOptions, TransferCall
from torchrelay.transports.resources import Kept, Resources
from torchrelay.transports.routes.choice import GROUP, Choice, choose
from torchrelay.transports.routes.nearby import place
from torchrelay.transports.routes.seam import Incoming, Mover, Route


def answer(group_lines: GroupLines, sender: int, deadline: Deadline) -> int:
    """The first message of a sender: a torch sender's metadata length (positive), or our prelude.

    On a timeout the posted receive stays for the next call.
    """
    first = group_lines.first_message(sender)
    if not first.wait(deadline):
        group_lines.keep_first_message(sender, first)
        raise TransferTimeoutError(
            f"timed out: nothing came from rank {sender} within {deadline.seconds:.3g} s",
            rank=sender,
            phase="join",
        )
    if first.value is not None:
        return first.value
    if first.adopted:
        return answer(group_lines, sender, deadline)
    raise PeerLostError(f"connection lost: {first.fault}; {CLOSED}", rank=sender, phase="join")


def transfer_of(group_lines: GroupLines, sender: int, first: int) -> int:
    """The transfer that a sender's first message begins. `RemoteProtocolError` for torch's own
    class; its message is left for whoever can read it."""
    transfer = wire.read_prelude(first)
    if transfer is None:
        group_lines.keep_first_message(sender, FirstMessage(first))
        raise RemoteProtocolError(
            "the sender is torch's PGTransport: receive with torchrelay.dropin.PGTransport",
            rank=sender,
        )
    return transfer


class LastTables(Kept):
    """What routes said at length in the last offer. Threads may share it: it is replaced as one.

    It is for the sender that said it: no other is to learn, by a digest, where its memory lies.
    """

    limit = 8 << 20  # bytes

    def __init__(self) -> None:
        self._last: tuple[int, Mapping[str, wire.RouteOffer]] = -1, {}

    def of(self, sender: int) -> Mapping[str, wire.RouteOffer]:
        rank, routes = self._last
        return routes if rank == sender else {}

    def keep(self, sender: int, routes: Mapping[str, wire.RouteOffer]) -> None:
        small = sum(len(route.fixed) for route in routes.values()) <= self.limit
        self._last = sender, routes if small else {}

    def forget(self) -> None:
        self._last = -1, {}


class Receiving:
    """One `recv` call, from the join on. `run` returns what landed."""

    def __init__(
        self,
        group_lines: GroupLines,
        sender: int,
        transfer: int,
        wanted: ReceiveOptions,
        call: TransferCall,
        resources: Resources,
    ) -> None:
        self._sender = sender
        self._line = ControlLine(group_lines.group, sender, transfer)
        self._events: queue.SimpleQueue[object] = queue.SimpleQueue()
        self._group_lines, self._wanted, self._resources = group_lines, wanted, resources
        self._step, self._route = wanted.step, wanted.route
        # The manifest that came last, which the sender may name, and the tables that came with it.
        self._last, self._tables = resources.recall.last, resources.of(LastTables)
        self._known = self._tables.of(sender)
        self._deadline, self.watch, self._progress = call.deadline, call.watch, call.progress
        # With route "group" nobody's memory is read.
        self._nonce = b"" if self._route == "group" else secrets.token_bytes(wire.NONCE_BYTES)
        self._proof: place.Proof | None = None
        self._machine = ReceiverMachine(sender)
        self._landing: Landing | None = None
        self._whole = False
        self.manifest: Manifest | None = None
        self.choice: Choice | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the state."""
        return self._landing.chunks.nbytes if self._landing is not None else 0

    def run(self) -> Landed:
        self._line.listen(self._events.put, self._events.qsize)
        try:
            with self._deadline.wakes(self._events):
                return self._run()
        except BaseException as fault:
            self._goodbye(self._last_word(fault))
            if isinstance(fault, TornStateError):  # it names what is old and what is new
                fault.rank, fault.phase = self._sender, self.watch.phase
                fault.step = self.manifest.step if self.manifest else None
            elif self._landing is not None and self._landing.torn and isinstance(fault, Exception):
                raise TornStateError(
                    TORN,
                    rank=self._sender,
                    step=self.manifest.step if self.manifest else None,
                    phase=self.watch.phase,
                ) from fault
            raise
        finally:
            if self.choice is not None:
                self.choice.mover.close(keep=self._whole)
            self._line.leave()

    def _last_word(self, fault: BaseException) -> wire.Refuse | wire.Leave:
        """What the sender is told: an object that does not take its state refuses it, as one that
        does not fit is refused before."""
        torn = self._landing is not None and self._landing.torn
        if isinstance(fault, StateError) and not torn:
            return refusal(fault)
        late = isinstance(fault, TransferTimeoutError | InterruptedTransfer)
        return wire.Leave(wire.text(fault), late)

    def _run(self) -> Landed:
        with self.watch("join"):
            self._line.send(self._join())
            if self._last is not None and self._wanted.destination is not None:
                # Mostly the next state is described as the last was, and the sender takes a while.
                self._wanted.destination.expect(self._last[1])
            self._hear("offer")
            assert self._machine.offer is not None
            offer = self._exchange(self._complete(self._machine.offer))
            landing, choice = self._consider(offer)
            mover, name = choice.mover, choice.route.name
            self._machine.accept(wire.Accept(name, mover.answer, choice.instead, mover.hashed))
            self._act()
            if offer.threads and choice.route.pulls and not mover.answer:
                # Nobody else to wait for.
                self._machine.begin(wire.Go(self._sender, threads=offer.threads, route=name))
            else:
                self._hear("go")
            go = self._machine.go
            assert go is not None
        with self.watch("data"):
            if why := off_schedule(go, offer, choice.route, me=self._me, sender=self._sender):
                raise RemoteProtocolError(why, rank=self._sender, phase="join")
            if go.route != name:
                self._fall_back(offer, landing)
            self.mover.run(go)
        with self.watch("commit"):
            landed = landing.commit()
            settle()
        self._whole = True
        self._goodbye(wire.Done())
        with self.watch("pass on"):
            self.mover.finish()
        if not choice.route.pulls:
            # Receivers that pass on or are passed on to part with the sender's word. One that has
            # taken the bytes itself has nothing more to hear.
            self._line.ended.wait(GRACE)
        return landed

    def _complete(self, offer: wire.Offer) -> wire.Offer:
        """The offer with its manifest in full, where that is the one that was said to be known."""
        try:
            known, tables = self._last and self._last[0], wire.tables(self._known)
            manifest = codec.completed(offer.manifest, known, tables)
        except ManifestError as fault:
            raise RemoteProtocolError(fault.message, rank=self._sender, phase="join") from None
        if manifest is offer.manifest:
            self._tables.keep(self._sender, offer.routes)
            return offer
        routes = {
            name: wire.RouteOffer(route.fresh, self._known[name].fixed)
            for name, route in offer.routes.items()
            if name in self._known
        }
        return msgspec.structs.replace(offer, manifest=manifest, routes=routes)

    def _known_tree(self) -> KnownTree | None:
        into = self._wanted.destination
        return None if into is None else into.plan.known_tree

    @property
    def mover(self) -> Mover:
        assert self.choice is not None
        return self.choice.mover

    def _fall_back(self, offer: wire.Offer, landing: Landing) -> None:
        """The sender has the bytes come over the group, not as agreed."""
        assert self.choice is not None
        self.mover.close(keep=False)
        mover = GROUP.accept(None, self._incoming(offer, landing))
        assert isinstance(mover, Mover)
        self.choice = Choice(GROUP, mover, self.choice.instead)

    def _incoming(self, offer: wire.Offer, landing: Landing) -> Incoming:
        assert self.manifest is not None
        return Incoming(
            self._line,
            self._events,
            offer,
            landing,
            partial(named, self.manifest, landing.chunks),
            self._nonce,
            self._route != "group",
            self.manifest.step,
            self._deadline,
            self._resources,
            self._wanted.connections,
            self._progress,
        )

    def _join(self) -> wire.Join:
        here, fd = place.here(), -1
        if here.devices and self._nonce:
            with suppress(OSError):  # then no device memory is told of
                self._proof = place.Proof(self._claim(self._me, self._sender))
                fd = self._proof.process.fd
        knows = b""
        if self._last is not None:
            knows = codec.digest_of(self._last[0], wire.tables(self._known))
        return wire.Join(self._step, here, self._nonce, fd, knows)

    @property
    def _me(self) -> int:
        return self._line.group.rank()

    def _claim(self, owner: int, reader: int) -> bytes:
        return place.claim(self._nonce, owner, reader, self._line.transfer)

    def _why_gone(self) -> RelayError | None:
        """Why the sender has given up, if it has: it takes away then what a route needs."""
        while not self._events.empty():
            event = self._events.get()
            if isinstance(event, (wire.Abort, RelayError)):
                return failure(event, self._sender, "join")
        return None

    def _exchange(self, offer: wire.Offer) -> wire.Offer:
        """The offer of the step that is wanted, where another call of this process got it."""
        if self._step is None:
            return offer
        offered = codec.step_of(offer.manifest)
        if offered == self._step:
            return offer
        self._line.listen(None)
        said: list[Any] = []
        while not self._events.empty():
            said.append(self._events.get())
        self._line.put_back([word for word in said if not isinstance(word, InterruptedTransfer)])
        held = HeldOffer(self._step, offered, (self._line, offer, self._nonce))
        self._group_lines.exchange.settle(self._sender, held, self._deadline)
        self._line, offer, self._nonce = held.catch
        self._line.listen(self._events.put, self._events.qsize)
        return offer

    def _consider(self, offer: wire.Offer) -> tuple[Landing, Choice]:
        """Look at the offer; refuse it with a reason, or prepare to land it."""
        try:
            recall = self._resources.recall
            self.manifest = recall.decode(offer.manifest, self._known_tree, self._in_time)
            step = self.manifest.step
            if self._step is not None and step != self._step:
                raise StepMismatchError(
                    f"step {step} is offered, step {self._step} was asked for", step=step
                )
            if offer.device not in ("cpu", *self._group_lines.direct):
                raise MismatchError(
                    f"the data is in the memory of a {offer.device}, and this process has none"
                )
            self._landing = self._wanted.land(self.manifest)
            self.choice = choose(self._incoming(offer, self._landing), self._route)
        except (StateError, StepMismatchError, ManifestError, RouteError) as fault:
            fault.rank, fault.phase = self._sender, "join"
            self._goodbye(refusal(fault))
            self._line.ended.wait(min(GRACE, self._deadline.left()))
            if isinstance(fault, RouteError):
                if (gone := self._why_gone()) is not None:
                    raise gone from fault
                self._in_time()  # no time is left to hear whether the sender is gone
            raise
        return self._landing, self.choice

    def _in_time(self) -> None:
        if self._deadline.passed:
            raise TransferTimeoutError(
                f"timed out after {self._deadline.seconds:.3g} s: the offer of rank "
                f"{self._sender} was not answered in that time",
                rank=self._sender,
                step=self._step,
                phase="join",
            )

    def _hear(self, what: str) -> None:
        """Have the machine hear the next message, which should be this one."""
        try:
            message = self._events.get(timeout=max(self._deadline.left(), 0.001))
        except queue.Empty:
            raise TransferTimeoutError(
                f"timed out after {self._deadline.seconds:.3g} s: rank {self._sender} did not "
                f"send its {what}",
                rank=self._sender,
                step=self._step,
                phase="join",
            ) from None
        self._machine.heard(message)

    def _goodbye(self, message: wire.Refuse | wire.Leave | wire.Done) -> None:
        self._machine.part(message)
        self._act()

    def _act(self) -> None:
        actions, self._machine.actions = self._machine.actions, []
        for action in actions:
            assert isinstance(action, Say)
            self._line.send(action.message)


def off_schedule(go: wire.Go, offer: wire.Offer, agreed: Route, *, me: int, sender: int) -> str:
    """What is wrong with the place in the chain that a sender gives to this rank, if anything."""
    if go.route not in (agreed.name, GROUP.name) or (agreed.pulls and go.route != agreed.name):
        return f"route {go.route!r}, where {agreed.name!r} was agreed on"
    if go.upstream == me or go.downstream in (me, sender, go.upstream):
        return f"a chain from rank {go.upstream} to {go.downstream} by way of this rank"
    chained = go.upstream != sender or go.downstream is not None
    if chained and offer.threads:
        return "a chain, where this rank was said to be the only receiver"
    if chained and go.route != GROUP.name:
        return f"a chain by way of {go.route}, which is for this rank alone"
    if (go.reads or go.notes) and not (chained and offer.verify and offer.device == "cpu"):
        return "receivers that read each other, without digests or not in a chain"
    return ""
