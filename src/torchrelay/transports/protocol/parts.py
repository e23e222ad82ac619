"""Parts of a state: a receiver asks what a sender has, and selects boxes of it.

Each selection is a transfer of its own, with a line of its own, whose state is a list of tensors:
everything that holds for a transfer holds for it. This is the talk around them, at both ends.
"""

from __future__ import annotations

import queue
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import torch

from torchrelay.deadlines import Deadline
from torchrelay.errors import RelayError, TransferTimeoutError
from torchrelay.memory import threads
from torchrelay.transports.group.lines import GRACE, ControlLine, GroupLines
from torchrelay.transports.protocol import wire
from torchrelay.transports.protocol.machines.events import failure
from torchrelay.transports.protocol.machines.peers import Peer, Stage

Awaited = TypeVar("Awaited", wire.Inventory, wire.Selected)


class Selectable(Protocol):
    """A state of which others take parts."""

    record: bytes

    def select(self, cuts: Sequence[wire.Cut]) -> list[torch.Tensor]:
        """Views of the boxes that were asked for; `RemoteProtocolError` if there are none such."""


def once(make: Callable[[], Selectable]) -> Callable[[], Selectable]:
    """A function that makes a state's description when first called, and gives it ever after."""
    made: list[Selectable] = []
    lock = threading.Lock()

    def get() -> Selectable:
        with lock:
            if not made:
                made.append(make())
            return made[0]

    return get


class Branch:
    """The sender's end for one receiver that takes parts. It runs on a thread of its own.

    `over` is called when it has ended; the peer's stage says how.
    """

    def __init__(
        self,
        group_lines: GroupLines,
        peer: Peer,
        line: ControlLine,
        describe: Callable[[], Selectable],
        serve: Callable[[list[torch.Tensor], ControlLine], int],
        deadline: Deadline,
        over: Callable[[], None],
    ) -> None:
        self._group_lines, self._peer, self._line, self._describe = (
            group_lines,
            peer,
            line,
            describe,
        )
        self._serve, self._deadline, self._over = serve, deadline, over
        self._events: queue.SimpleQueue[object] = queue.SimpleQueue()
        self.wire_bytes = 0
        line.listen(self._events.put, self._events.qsize)
        self._running = threads.run(self._run, "parts")

    def hear(self, message: wire.Message | Exception) -> None:
        """Something that the receiver said before this listened to it."""
        self._events.put(message)

    def stop(self, why: str, seconds: float) -> None:
        """Give up on the receiver; waits so long for the end of what is under way."""
        self._events.put(RelayError(why))
        self._running.wait(seconds)

    def _run(self) -> None:
        peer = self._peer
        try:
            with self._deadline.wakes(self._events):
                self._talk()
        except Exception as fault:
            text = fault.message if isinstance(fault, RelayError) else f"{fault!r}"
            peer.give_up(text, late=isinstance(fault, TransferTimeoutError))
            self._line.send(wire.Abort(wire.text(f"the sender gave up on this rank: {text}")))
        finally:
            over = self._over
            del self._describe, self._serve, self._over  # they lead to the state, and back here
            over()

    def _talk(self) -> None:
        peer = self._peer
        held = self._describe()
        self._line.send(wire.Inventory(held.record))
        while True:
            message = self._next()
            if isinstance(message, wire.Select):
                views = held.select(message.cuts)
                line = ControlLine(
                    self._group_lines.group, peer.rank, secrets.randbelow(1 << wire.ID_BITS)
                )
                self._line.send(wire.Selected(line.transfer))
                self.wire_bytes += self._serve(views, line)
                peer.trailed = True  # it may have all that it needs
            elif isinstance(message, wire.Done):
                peer.stage = Stage.DONE
                self._line.send(wire.Fin())
                return
            elif isinstance(message, wire.Refuse):
                peer.refuse(message)
                self._line.send(wire.Fin())
                return
            elif isinstance(message, wire.Leave):
                peer.give_up(f"gave up: {message.message}", late=message.late)
                peer.settle(message)
                self._line.send(wire.Fin())
                return
            else:
                raise failure(message, peer.rank, "data")

    def _next(self) -> object:
        try:
            return self._events.get(timeout=max(self._deadline.left(), 0.001))
        except queue.Empty:
            raise TransferTimeoutError(
                f"not done after {self._deadline.seconds:.3g} s", rank=self._peer.rank
            ) from None


MakeBranch = Callable[[Peer, ControlLine, Callable[[], None]], Branch]


class Branches:
    """The receivers of one send that take parts."""

    def __init__(self, make: MakeBranch | None, over: Callable[[], None]) -> None:
        self._make, self._over = make, over
        self._branches: dict[int, Branch] = {}

    @property
    def served(self) -> bool:
        """Whether this send has parts to give."""
        return self._make is not None

    @property
    def wire_bytes(self) -> int:
        return sum(branch.wire_bytes for branch in self._branches.values())

    def begin(self, peer: Peer, line: ControlLine) -> None:
        assert self._make is not None
        self._branches[peer.rank] = self._make(peer, line, self._over)

    def hear(self, peer: Peer, message: wire.Message | Exception) -> None:
        self._branches[peer.rank].hear(message)

    def stop(self, why: str, seconds: float) -> None:
        for branch in self._branches.values():
            branch.stop(why, seconds)


class Conversation:
    """The receiver's end with one sender."""

    def __init__(
        self, group_lines: GroupLines, rank: int, transfer: int, deadline: Deadline
    ) -> None:
        self.rank = rank
        self._deadline = deadline
        self._events: queue.SimpleQueue[object] = queue.SimpleQueue()
        self._line = ControlLine(group_lines.group, rank, transfer)
        self._line.listen(self._events.put, self._events.qsize)
        self._over = False

    def survey(self) -> bytes:
        """The record of what the sender has."""
        self._line.send(wire.Survey())
        return self._expect(wire.Inventory).record

    def select(self, cuts: Sequence[wire.Cut]) -> int:
        """Ask for boxes; returns the transfer that they come by."""
        self._line.send(wire.Select(tuple(cuts)))
        return self._expect(wire.Selected).transfer

    def end(self, word: wire.Done | wire.Refuse | wire.Leave) -> None:
        """Say the last word. `wait` waits until the sender knows."""
        if not self._over:
            self._over = True
            self._line.send(word)

    def wait(self, ends: float) -> None:
        self._line.ended.wait(max(0.0, ends - time.monotonic()))
        self._line.leave()

    def _expect(self, kind: type[Awaited]) -> Awaited:
        """The next message of the sender, which is to be of this kind."""
        try:
            with self._deadline.wakes(self._events):
                message = self._events.get(timeout=max(self._deadline.left(), 0.001))
        except queue.Empty:
            raise TransferTimeoutError(
                f"timed out after {self._deadline.seconds:.3g} s: rank {self.rank} did not send "
                f"its {kind.__name__.lower()}",
                rank=self.rank,
                phase="join",
            ) from None
        if isinstance(message, kind):
            return message
        raise failure(message, self.rank, "join")


def part_from(
    conversations: Sequence[Conversation], word: wire.Done | wire.Refuse | wire.Leave
) -> None:
    """End all conversations with the same word."""
    for one in conversations:
        one.end(word)
    ends = time.monotonic() + GRACE
    for one in conversations:
        one.wait(ends)
