"""The receiver's end of one transfer: it says, and it waits for what the sender says.

A dead sender is a closed connection, a slow one the deadline, and one that gives up says why: each
is a typed error out of the wait.
"""

from __future__ import annotations

import time
from typing import TypeVar

from torchrelay.deadlines import Deadline, Stopwatch
from torchrelay.errors import (
    DigestError,
    PeerAbortedError,
    PeerLostError,
    RelayError,
    RemoteProtocolError,
    StepMismatchError,
    TransferTimeoutError,
)
from torchrelay.transports.meeting.connection import ConnectionLost, MessageReceived
from torchrelay.transports.meeting.inbox import Inbox
from torchrelay.transports.meeting.node import Meeting
from torchrelay.transports.wire.messages import Abort, Message, NodeAddress, Ping

M = TypeVar("M", bound=Message)
TICK = 0.5  # seconds: a signal that comes just before a wait begins does not end that wait
LAST_SECONDS = 0.5  # past the deadline, for what has come by then


class _Silence:
    """For how long a peer was silent while this process ran: one that stood still itself could hear
    no peer meanwhile."""

    def __init__(self) -> None:
        self._seconds, self._received_at, self._looked_at = 0.0, 0.0, 0.0

    def total(self, received_at: float) -> float:
        """The seconds as of now. `received_at`: when anything came last."""
        now = time.monotonic()
        if received_at != self._received_at or not self._looked_at:
            self._seconds, self._received_at = 0.0, received_at
        else:
            self._seconds += min(now - self._looked_at, 2 * TICK)
        self._looked_at = now
        return self._seconds

    def end(self) -> None:
        """Something has come."""
        self._looked_at = 0.0


class Conversation:
    """With one sender. Its inbox also takes what the workers of the transfer report."""

    def __init__(
        self, meeting: Meeting, sender: int, me: int, deadline: Deadline, watch: Stopwatch
    ) -> None:
        self.node, self.sender, self.me = meeting.node, sender, me
        self.deadline, self.watch = deadline, watch
        self.step: int | None = None
        self.done = ""  # how far the transfer is, for an error
        self.inbox = Inbox()
        self.patience = 0.0  # seconds without a sign of the sender, after which it is lost
        self._silence = _Silence()
        self._overtime: Deadline | None = None
        self._connection = self.node.connect(meeting.directory, sender, me, self.inbox, deadline)

    @property
    def address(self) -> NodeAddress:
        """Where the process listens that the sender is. A rank may be another one by now."""
        assert self._connection.identity is not None
        return self._connection.identity.address

    @property
    def process(self) -> bytes:
        """The process that the sender is, by an id that no other one ever has: the handshake has
        shown it."""
        return self.address.node

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
            tick = min(TICK, self.patience / 4) if self.patience else TICK
            event = self.inbox.get(min(left, tick))
            if self.deadline.passed:
                # A process that stood still finds events here when its time is up. They count, but
                # a sender that says more and more does not keep it.
                self._overtime = self._overtime or Deadline(LAST_SECONDS)
                if event is None or self._overtime.passed:
                    raise self.overdue(awaited)
            if isinstance(event, ConnectionLost):
                raise self.lost(event.reason, damaged=event.damaged)
            if isinstance(event, MessageReceived):
                self._silence.end()
                if isinstance(event.message, Abort):
                    kind = StepMismatchError if event.message.kind == "step" else PeerAbortedError
                    raise self._fault(kind, event.message.message)
                return event.message
            if event is not None:
                self._silence.end()
                return event
            self._look_after_sender(awaited)
            seconds -= tick
            if seconds <= 0:
                return None

    def _look_after_sender(self, awaited: str) -> None:
        """Nothing has come. A process that lives answers a ping, however busy it is."""
        if not self.patience:
            return
        if self._silence.total(self._connection.received_at) > self.patience:
            why = f"did not answer for {self.patience:.3g} s, and its {awaited} is due"
            raise self._fault(TransferTimeoutError, f"timed out: rank {self.sender} {why}")
        self._connection.send(Ping())

    def lost(self, reason: str, *, damaged: bool = False) -> RelayError:
        identity = self._connection.identity
        at = "" if identity is None else f" at {identity.host} port {identity.port}"
        if damaged:
            text = f"{reason}, from rank {self.sender}{at}: check the network between them"
            return self._fault(DigestError, text)
        text = f"connection lost to rank {self.sender}{at}: {reason}"
        # After the deadline connections are closed, whichever side looks first.
        return self._timed_out(text) if self.deadline.passed else self._fault(PeerLostError, text)

    def overdue(self, awaited: str) -> RelayError:
        return self._timed_out(f"rank {self.sender} did not send its {awaited}")

    def _timed_out(self, why: str) -> RelayError:
        text = f"timed out after {self.deadline.seconds:.3g} s: {why}"
        return self._fault(TransferTimeoutError, text)

    def out_of_turn(self, message: object) -> RelayError:
        return self._fault(RemoteProtocolError, f"{type(message).__name__} out of turn")

    def _fault(self, kind: type[RelayError], text: str) -> RelayError:
        """An error with what is known of the transfer."""
        text = f"{text}; {self.done}" if self.done else text
        return kind(text, rank=self.sender, step=self.step, phase=self.watch.phase)
