"""The receiving side of a live transfer: join, look at the offer, take the data, say so."""

from __future__ import annotations

import queue
import secrets
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

from torchrelay.deadlines import Deadline, InterruptedTransfer, Stopwatch
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
    UnsupportedLeafError,
)
from torchrelay.geometry.runs import Runs
from torchrelay.landing.places import Landed, named
from torchrelay.landing.seam import Landing
from torchrelay.memory.pool import cores
from torchrelay.memory.side import in_use, settle
from torchrelay.record import codec
from torchrelay.record.compact import KnownTree
from torchrelay.record.manifest import Manifest
from torchrelay.transports.group.lines import (
    CLOSED,
    GRACE,
    ControlLine,
    FirstMessage,
    GroupLines,
)
from torchrelay.transports.protocol import wire
from torchrelay.transports.protocol.events import Awaited, expect, failure
from torchrelay.transports.protocol.exchange import HeldOffer
from torchrelay.transports.protocol.known_offers import Offers
from torchrelay.transports.routes import cuda_ipc, place
from torchrelay.transports.routes.channels import ChannelUse
from torchrelay.transports.routes.choice import Choice, choose
from torchrelay.transports.routes.pull import Pull, Ways, find_ways
from torchrelay.transports.routes.read_tables import Readings
from torchrelay.transports.routes.ring import MappedRings
from torchrelay.transports.transfer.buffers import BufferPool
from torchrelay.transports.transfer.intake import Intake


def answer(post: GroupLines, sender: int, deadline: Deadline) -> int:
    """The first message of a sender: a torch sender's metadata length (positive), or our prelude.

    On a timeout the posted receive stays for the next call.
    """
    bell = post.bell(sender)
    if not bell.wait(deadline):
        post.leave_bell(sender, bell)
        raise TransferTimeoutError(
            f"timed out: nothing came from rank {sender} within {deadline.seconds:.3g} s",
            rank=sender,
            phase="join",
        )
    if bell.value is not None:
        return bell.value
    if bell.adopted:
        return answer(post, sender, deadline)
    raise PeerLostError(f"connection lost: {bell.fault}; {CLOSED}", rank=sender, phase="join")


def transfer_of(post: GroupLines, sender: int, first: int) -> int:
    """The transfer that a sender's first message begins. `RemoteProtocolError` for torch's own
    class; its message is left for whoever can read it."""
    transfer = wire.read_prelude(first)
    if transfer is None:
        post.leave_bell(sender, FirstMessage(first))
        raise RemoteProtocolError(
            "the sender is torch's PGTransport: receive with torchrelay.dropin.PGTransport",
            rank=sender,
        )
    return transfer


class Receiving:
    """One `recv` call, from the join on. `run` returns what landed."""

    def __init__(
        self,
        post: GroupLines,
        sender: int,
        transfer: int,
        *,
        step: int | None,
        land: Callable[[Manifest], Landing],
        deadline: Deadline,
        buffers: BufferPool,
        rings: MappedRings,
        openings: cuda_ipc.Openings,
        offers: Offers,
        readings: Readings,
        recall: codec.Recall,
        known: KnownTree | None,
        route: str | None,
        connections: int,
        watch: Stopwatch,
        progress: Callable[[int, int], None],
    ) -> None:
        self._sender = sender
        self._line = ControlLine(post.group, sender, transfer)
        self._events: queue.SimpleQueue[object] = queue.SimpleQueue()
        self._post = post
        self._step = step
        self._land = land
        self._deadline = deadline
        self._buffers = buffers
        self._rings = rings
        self._openings, self._offers, self._readings = openings, offers, readings
        self._ways: Ways | None = None
        self._recall, self._known = recall, known
        self._route, self._connections = route, connections
        # With route "group" nobody's memory is read.
        self._nonce = b"" if route == "group" else secrets.token_bytes(wire.NONCE_BYTES)
        self._proof: place.Proof | None = None
        self.berth = ChannelUse()
        self.watch = watch
        self._progress = progress
        self._landing: Landing | None = None
        self._said_goodbye = self._whole = False
        self.manifest: Manifest | None = None
        self.intake: Intake | Pull | None = None
        self.choice = Choice("group")
        self.verified = False  # whether digests were compared

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
            late = isinstance(fault, TransferTimeoutError | InterruptedTransfer)
            self._goodbye(wire.Leave(wire.text(fault), late))
            if isinstance(fault, TornStateError):  # it names what is old and what is new
                fault.rank, fault.phase = self._sender, self.watch.phase
                fault.step = self.manifest.step if self.manifest else None
            elif self._landing is not None and self._landing.torn and isinstance(fault, Exception):
                raise TornStateError(
                    "the destination is part old, part new: receive into it again, or load it",
                    rank=self._sender,
                    step=self.manifest.step if self.manifest else None,
                    phase=self.watch.phase,
                ) from fault
            raise
        finally:
            if self.intake is not None:
                self.intake.close()
            self.berth.end(keep=self._whole)
            self._line.leave()

    def _run(self) -> Landed:
        with self.watch("join"):
            known = self._offers.of(self._sender)
            self._line.send(self._join(known.digest))
            offer = self._offers.full(self._sender, self._expect(wire.Offer), known)
            offer = self._exchange(offer)
            landing = self._consider(offer)
            ring = self._ways is not None and bool(self._ways.shares.ringed)
            hashed: tuple[int, ...] = ()
            if self._ways is not None and offer.memory is not None and offer.memory.verify:
                hashed = self._ways.hashed
            if self._ways is None:
                self.berth = self._post.channels.answer(
                    self._sender,
                    offer.channel,
                    self._connections,
                    self._deadline.left(),
                    local=not offer.threads,  # there are others beside this rank
                )
            agreed = self.berth.record is not None
            self._line.send(
                wire.Accept(
                    self.choice.route,
                    ring,
                    self.choice.instead,
                    hashed,
                    agreed,
                    self.berth.token,
                )
            )
            if agreed:
                self.berth.agreed(self._deadline)
            if offer.threads and self._ways is not None and not ring:
                go = wire.Go(self._sender, threads=offer.threads)  # nobody else to wait for
            else:
                go = self._expect(wire.Go)
        with self.watch("data"):
            self.verified = _verified(offer, self.choice.route)
            if self._ways is None or offer.memory is None:
                self._take_in(offer, landing, go)
            else:
                self._pull(offer.memory, landing, self._ways, go)
        with self.watch("commit"):
            landed = landing.commit()
            settle()
        self._whole = True
        self._goodbye(wire.Done())
        with self.watch("pass on"):
            assert self.intake is not None
            self.intake.finish()
        if self._ways is None:
            # Receivers that pass on or are passed on to part with the sender's word. One that has
            # taken the bytes itself has nothing more to hear.
            self._line.ended.wait(GRACE)
        return landed

    @property
    def handed_bytes(self) -> int:
        """Read out of the memory of the receiver before this one."""
        return self.intake.handed_bytes if isinstance(self.intake, Intake) else 0

    def _join(self, knows: bytes) -> wire.Join:
        here, fd = place.here(), -1
        if here.devices and self._nonce:
            with suppress(OSError):  # then no device memory is told of
                self._proof = place.Proof(self._claim(self._me, self._sender))
                fd = self._proof.process.fd
        return wire.Join(self._step, here, self._nonce, fd, knows)

    @property
    def _me(self) -> int:
        return self._line.group.rank()

    def _claim(self, owner: int, reader: int) -> bytes:
        return place.claim(self._nonce, owner, reader, self._line.transfer)

    def _take_in(self, offer: wire.Offer, landing: Landing, go: wire.Go) -> None:
        if not go.channel:
            self.berth.decline()
        if why := off_schedule(go, offer, me=self._me, sender=self._sender):
            raise RemoteProtocolError(why, rank=self._sender, phase="join")
        self.intake = Intake(
            self._line,
            self._events,
            landing,
            go,
            self.berth.channel,
            verify=offer.verify,
            # Another call of this process, which this one has traded offers with, may have agreed.
            may_read=self._route != "group",
            device=offer.device,
            step=self.manifest.step if self.manifest else None,
            deadline=self._deadline,
            buffers=self._buffers,
            progress=self._progress,
        )
        self.intake.run()

    def _why_gone(self) -> RelayError | None:
        """Why the sender has given up, if it has: it takes away then what a route needs."""
        while not self._events.empty():
            event = self._events.get()
            if isinstance(event, (wire.Abort, RelayError)):
                return failure(event, self._sender, "join")
        return None

    def _choose(self, offer: wire.Offer, landing: Landing) -> None:
        """Find the route; open the sender's device memory if that is it."""
        opened: dict[int, Runs] = {}

        def open_device_memory() -> str:
            memory = offer.memory
            if memory is None or not memory.device:
                return memory.no_exports if memory is not None else "nothing is exported"
            if not landing.on_device:
                return "the destination is in host memory"
            try:
                found = self._openings.sources(self._sender, memory, landing.chunks.stream_bytes)
                opened.update(found)
            except cuda_ipc.IpcError as fault:
                return str(fault)
            return ""

        claim = self._claim(self._sender, self._me)
        self.choice = choose(offer, place.here(), claim, self._route, open_device_memory)
        if self.choice.route != "group" and offer.memory is not None:
            reads = self.choice.reads
            self._ways = find_ways(
                landing,
                offer.memory,
                opened,
                self._openings.tables,
                self._readings,
                reads=reads,
                rank=self._sender,
            )

    def _pull(self, memory: wire.Memory, landing: Landing, ways: Ways, go: wire.Go) -> None:
        assert self.manifest is not None
        ring = None
        if go.ring is not None:
            try:
                process = place.Process(memory.place.pid, memory.fd, memory.beacon)
                ring = self._rings.take(self._sender, process, go.ring, pinned=in_use())
            except OSError as fault:
                raise PeerLostError(
                    f"the sender's buffers cannot be mapped: {fault}", rank=self._sender
                ) from fault
        self.intake = Pull(
            self._line,
            self._events,
            landing,
            memory,
            ways,
            max(1, min(go.threads, cores())),
            ring=ring,
            named=partial(named, self.manifest, landing.chunks),
            step=self.manifest.step,
            deadline=self._deadline,
            buffers=self._buffers,
            progress=self._progress,
        )
        try:
            self.intake.run()
        except BaseException:
            self.intake.close()
            if ring is not None:
                ring.close()
            raise
        if ring is not None:
            self._rings.give(self._sender, ring)

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
        self._post.trading.settle(self._sender, held, self._deadline)
        self._line, offer, self._nonce = held.catch
        self._line.listen(self._events.put, self._events.qsize)
        return offer

    def _consider(self, offer: wire.Offer) -> Landing:
        """Look at the offer; refuse it with a reason, or prepare to land it."""
        try:
            self.manifest = self._recall.decode(offer.manifest, self._known, self._in_time)
            step = self.manifest.step
            if self._step is not None and step != self._step:
                raise StepMismatchError(
                    f"step {step} is offered, step {self._step} was asked for", step=step
                )
            if offer.device not in ("cpu", *self._post.direct):
                raise MismatchError(
                    f"the data is in the memory of a {offer.device}, and this process has none"
                )
            self._landing = self._land(self.manifest)
            self._choose(offer, self._landing)
        except (StateError, StepMismatchError, ManifestError, RouteError) as fault:
            fault.rank, fault.phase = self._sender, "join"
            kinds = {StepMismatchError: "step", ManifestError: "manifest", RouteError: "route"}
            kinds[UnsupportedLeafError] = "unsupported"
            kind = kinds.get(type(fault), "mismatch")
            path = None if fault.path is None else wire.text(fault.path)
            self._goodbye(wire.Refuse(kind, wire.text(fault.message), path))
            self._line.ended.wait(min(GRACE, self._deadline.left()))
            if isinstance(fault, RouteError):
                if (gone := self._why_gone()) is not None:
                    raise gone from fault
                self._in_time()  # no time is left to hear whether the sender is gone
            raise
        return self._landing

    def _in_time(self) -> None:
        if self._deadline.passed:
            raise TransferTimeoutError(
                f"timed out after {self._deadline.seconds:.3g} s: the offer of rank "
                f"{self._sender} was not answered in that time",
                rank=self._sender,
                step=self._step,
                phase="join",
            )

    def _expect(self, kind: type[Awaited]) -> Awaited:
        return expect(kind, self._events, self._deadline, self._sender, self._step)

    def _goodbye(self, message: wire.Message) -> None:
        if not self._said_goodbye:
            self._said_goodbye = True
            self._line.send(message)


def off_schedule(go: wire.Go, offer: wire.Offer, *, me: int, sender: int) -> str:
    """What is wrong with the place in the chain that a sender gives to this rank, if anything."""
    if go.upstream == me or go.downstream in (me, sender, go.upstream):
        return f"a chain from rank {go.upstream} to {go.downstream} by way of this rank"
    chained = go.upstream != sender or go.downstream is not None
    if chained and offer.threads:
        return "a chain, where this rank was said to be the only receiver"
    if chained and go.channel:
        return "a chain by way of connections that are for this rank alone"
    if (go.reads or go.notes) and not (chained and offer.verify and offer.device == "cpu"):
        return "receivers that read each other, without digests or not in a chain"
    return ""


def _verified(offer: wire.Offer, route: str) -> bool:
    """Whether what comes by this route is compared with what was sent."""
    if route == "group" or offer.memory is None:
        return offer.verify
    return offer.memory.verify or (route == "cuda_ipc" and offer.memory.device_digests)
