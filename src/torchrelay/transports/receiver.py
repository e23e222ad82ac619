"""The receiving side of a live transfer: join, look at the offer, take the data, say so."""

from __future__ import annotations

import queue
from collections.abc import Callable
from typing import TypeVar

from torchrelay.errors import (
    ManifestError,
    MismatchError,
    PeerLostError,
    StateError,
    StepMismatchError,
    TornStateError,
    TransferTimeoutError,
    UnsupportedLeafError,
)
from torchrelay.state import codec
from torchrelay.state.landing import Landed, Landing
from torchrelay.state.manifest import Manifest
from torchrelay.transports import wire
from torchrelay.transports.buffers import BufferPool
from torchrelay.transports.clock import Deadline, Stopwatch
from torchrelay.transports.group import CLOSED, GRACE, Line, Post
from torchrelay.transports.intake import Event, Intake, failure
from torchrelay.transports.trading import Held

Awaited = TypeVar("Awaited", wire.Offer, wire.Go)


def answer(post: Post, sender: int, deadline: Deadline) -> int:
    """The first message of a sender: a torch sender's metadata length (positive), or our prelude.

    On a timeout the posted receive stays for the next call.
    """
    bell = post.bell(sender)
    if not bell.rung.wait(deadline.left()):
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


class Receiving:
    """One `recv` call, from the join on. `run` returns what landed."""

    def __init__(
        self,
        post: Post,
        sender: int,
        transfer: int,
        *,
        step: int | None,
        land: Callable[[Manifest], Landing],
        deadline: Deadline,
        buffers: BufferPool,
        watch: Stopwatch,
        progress: Callable[[int, int], None],
    ) -> None:
        self._sender = sender
        self._line = Line(post.group, sender, transfer)
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._post = post
        self._step = step
        self._land = land
        self._deadline = deadline
        self._buffers = buffers
        self._watch = watch
        self._progress = progress
        self._landing: Landing | None = None
        self._said_goodbye = False
        self.manifest: Manifest | None = None
        self.intake: Intake | None = None

    def run(self) -> Landed:
        self._line.listen(self._events.put)
        try:
            return self._run()
        except BaseException as fault:
            late = isinstance(fault, TransferTimeoutError)
            self._goodbye(wire.Leave(str(fault)[:500], late))
            if self._landing is not None and self._landing.torn and isinstance(fault, Exception):
                raise TornStateError(
                    "the destination is part old, part new: receive into it again, or load it",
                    rank=self._sender,
                    step=self.manifest.step if self.manifest else None,
                    phase=self._watch.phase,
                ) from fault
            raise
        finally:
            if self.intake is not None:
                self.intake.close()

    def _run(self) -> Landed:
        with self._watch("join"):
            self._line.send(wire.Join(wire.MINOR, self._step))
            offer = self._exchange(self._expect(wire.Offer))
            landing = self._consider(offer)
            self._line.send(wire.Accept())
            go = self._expect(wire.Go)
        with self._watch("data"):
            self.intake = Intake(
                self._line,
                self._events,
                landing,
                go,
                verify=offer.verify,
                device=offer.device,
                step=self.manifest.step if self.manifest else None,
                deadline=self._deadline,
                buffers=self._buffers,
                progress=self._progress,
            )
            self.intake.run()
        with self._watch("commit"):
            landed = landing.commit()
        self._goodbye(wire.Done())
        with self._watch("pass on"):
            self.intake.finish()
        self._line.ended.wait(GRACE)
        return landed

    def _exchange(self, offer: wire.Offer) -> wire.Offer:
        """The offer of the step that is wanted, where another call of this process got it."""
        offered = codec.step_of(offer.manifest)
        if self._step is None or offered == self._step:
            return offer
        self._line.listen(None)
        said: list[wire.Message | Exception] = []
        while not self._events.empty():
            said.append(self._events.get())  # type: ignore[arg-type]
        self._line.put_back(said)
        held = Held(self._step, offered, (self._line, offer))
        self._post.trading.settle(self._sender, held, self._deadline)
        self._line, offer = held.catch
        self._line.listen(self._events.put)
        return offer

    def _consider(self, offer: wire.Offer) -> Landing:
        """Look at the offer; refuse it with a reason, or prepare to land it."""
        try:
            self.manifest = codec.decode(offer.manifest)
            step = self.manifest.step
            if self._step is not None and step != self._step:
                raise StepMismatchError(
                    f"step {step} is offered, step {self._step} was asked for", step=step
                )
            if offer.device not in ("cpu", *self._post.direct):
                raise MismatchError(
                    f"data in the memory of a {offer.device}, of which none is here"
                )
            self._landing = self._land(self.manifest)
        except (StateError, StepMismatchError, ManifestError) as fault:
            fault.rank, fault.phase = self._sender, "join"
            kinds = {StepMismatchError: "step", ManifestError: "manifest"}
            kinds[UnsupportedLeafError] = "unsupported"
            kind = kinds.get(type(fault), "mismatch")
            self._goodbye(wire.Refuse(kind, fault.message[:2000], fault.path))
            self._line.ended.wait(min(GRACE, self._deadline.left()))
            raise
        return self._landing

    def _expect(self, kind: type[Awaited]) -> Awaited:
        try:
            message = self._events.get(timeout=max(self._deadline.left(), 0.001))
        except queue.Empty:
            raise TransferTimeoutError(
                f"timed out after {self._deadline.seconds:.3g} s: rank {self._sender} did not "
                f"send its {kind.__name__.lower()}",
                rank=self._sender,
                step=self._step,
                phase="join",
            ) from None
        if isinstance(message, kind):
            return message
        raise failure(message, self._sender, "join")

    def _goodbye(self, message: wire.Message) -> None:
        if not self._said_goodbye:
            self._said_goodbye = True
            self._line.send(message)
