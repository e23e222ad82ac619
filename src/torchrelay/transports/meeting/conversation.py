"""The receiver's end of one transfer: it says, and it waits for what the sender says.

A dead sender is a closed connection, a slow one the deadline, and one that gives up says why: each
is a typed error out of the wait.
"""

from __future__ import annotations

import time
from typing import TypeVar

from torchrelay.deadlines import Deadline, Stopwatch
from torchrelay.errors import (
    PeerAbortedError,
    PeerLostError,
    RelayError,
    RemoteProtocolError,
    StepMismatchError,
    TransferTimeoutError,
)
from torchrelay.transports.meeting.connection import ConnectionLost, Inbox, MessageHeard
from torchrelay.transports.meeting.node import Node
from torchrelay.transports.wire.messages import Abort, Message

M = TypeVar("M", bound=Message)
TICK = 0.5  # seconds: a signal that comes just before a wait begins does not end that wait
LAST_SECONDS = 0.5  # past the deadline, for what has come by then


class Conversation:
    """With one sender. Its inbox also takes what the workers of the transfer report."""

    def __init__(
        self, node: Node, sender: int, me: int, deadline: Deadline, watch: Stopwatch
    ) -> None:
        self.node, self.sender, self.me = node, sender, me
        self.deadline, self.watch = deadline, watch
        self.step: int | None = None
        self.done = ""  # how far the transfer is, for an error
        self.inbox = Inbox()
        self._late_since: float | None = None
        self._connection = node.connect(sender, me, self.inbox, deadline)

    def send(self, message: Message) -> None:
        self._connection.send(message)

    def close(self) -> None:
        """Close the connection, once what was sent has left. Workers are over by now: what they
        reported leads to the state."""
        self.inbox.drain()
        self._connection.close()

    def expect(self, kind: type[M]) -> M:
        """The next message, which must be of this kind."""
        while True:
            event = self.next(kind.__name__.lower())
            if isinstance(event, kind):
                return event
            if isinstance(event, Message):
                raise self.out_of_turn(event)

    def next(self, awaited: str, seconds: float = float("inf")) -> object:
        """The next message, or the next report of a worker. None after `seconds`."""
        while True:
            left = min(self.deadline.left(), seconds)
            event = self.inbox.get(min(left, TICK))
            if self.deadline.passed and (event is None or self._overtime_is_up()):
                raise self.late(awaited)
            if isinstance(event, ConnectionLost):
                raise self.lost(event.reason)
            if isinstance(event, MessageHeard):
                if isinstance(event.message, Abort):
                    raise self._aborted(event.message)
                return event.message
            if event is not None:
                return event
            seconds -= TICK
            if seconds <= 0:
                return None

    def _overtime_is_up(self) -> bool:
        """A process that stood still finds events here when its time is up. They count, but a
        sender that says more and more does not keep it."""
        now = time.monotonic()
        if self._late_since is None:
            self._late_since = now
        return now > self._late_since + LAST_SECONDS

    def _aborted(self, abort: Abort) -> RelayError:
        kind = StepMismatchError if abort.kind == "step" else PeerAbortedError
        return self._told(kind(abort.message))

    def lost(self, reason: str) -> RelayError:
        identity = self._connection.identity
        at = "" if identity is None else f" at {identity.host} port {identity.port}"
        text = f"connection lost to rank {self.sender}{at}: {reason}"
        if self.deadline.passed:  # connections are closed by then, whichever side looks first
            return self._timed_out(text)
        return self._told(PeerLostError(f"{text}; {self.done}" if self.done else text))

    def late(self, awaited: str) -> RelayError:
        return self._timed_out(f"rank {self.sender} did not send its {awaited}")

    def _timed_out(self, why: str) -> RelayError:
        text = f"timed out after {self.deadline.seconds:.3g} s: {why}"
        return self._told(TransferTimeoutError(f"{text}; {self.done}" if self.done else text))

    def out_of_turn(self, message: object) -> RelayError:
        return self._told(RemoteProtocolError(f"{type(message).__name__} out of turn"))

    def _told(self, fault: RelayError) -> RelayError:
        """An error with what is known of the transfer."""
        fault.rank, fault.step, fault.phase = self.sender, self.step, self.watch.phase
        return fault
