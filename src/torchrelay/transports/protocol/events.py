"""What the phases of a receive have in common."""

from __future__ import annotations

import queue
from typing import TypeVar

from torchrelay.deadlines import Deadline
from torchrelay.errors import (
    PeerAbortedError,
    RelayError,
    RemoteProtocolError,
    TransferTimeoutError,
)
from torchrelay.transports.protocol import wire

Awaited = TypeVar("Awaited", wire.Offer, wire.Go, wire.Inventory, wire.Selected)
RETRIES = 2  # times a chunk whose digest does not hold is asked for again


def failure(event: object, sender: int, phase: str) -> RelayError:
    """The error for something other than what was waited for."""
    if isinstance(event, wire.Abort):
        return PeerAbortedError(event.message, rank=sender, phase=phase)
    if isinstance(event, RelayError):
        event.phase = phase
        return event
    return RemoteProtocolError(f"{type(event).__name__} out of turn", rank=sender, phase=phase)


def expect(
    kind: type[Awaited],
    events: queue.SimpleQueue[object],
    deadline: Deadline,
    sender: int,
    step: int | None = None,
) -> Awaited:
    """The next message of a sender, which is to be of this kind."""
    try:
        message = events.get(timeout=max(deadline.left(), 0.001))
    except queue.Empty:
        raise TransferTimeoutError(
            f"timed out after {deadline.seconds:.3g} s: rank {sender} did not send its "
            f"{kind.__name__.lower()}",
            rank=sender,
            step=step,
            phase="join",
        ) from None
    if isinstance(message, kind):
        return message
    raise failure(message, sender, "join")
