"""What the phases of a receive have in common."""

from __future__ import annotations

from torchrelay.errors import (
    ManifestError,
    PeerAbortedError,
    RelayError,
    RemoteProtocolError,
    RouteError,
    StepMismatchError,
    UnsupportedLeafError,
)
from torchrelay.transports.protocol import wire

CLOSED = (
    "the group's connection to this rank is closed for good: make a new process group with the "
    "ranks that live (torch.distributed.new_group) before the next transfer"
)
_REFUSALS: dict[type[RelayError], str] = {
    ManifestError: "manifest",
    RouteError: "route",
    StepMismatchError: "step",
    UnsupportedLeafError: "unsupported",
}
RETRIES = 2  # times a chunk whose digest does not hold is asked for again


def refusal(fault: RelayError) -> wire.Refuse:
    """What a sender is told whose state is not taken."""
    path = None if fault.path is None else wire.text(fault.path)
    kind = _REFUSALS.get(type(fault), "mismatch")
    return wire.Refuse(kind, wire.text(fault.message), path)


def failure(event: object, sender: int, phase: str) -> RelayError:
    """The error for something other than what was waited for."""
    if isinstance(event, wire.Abort):
        return PeerAbortedError(event.message, rank=sender, phase=phase)
    if isinstance(event, RelayError):
        event.phase = phase
        return event
    return RemoteProtocolError(f"{type(event).__name__} out of turn", rank=sender, phase=phase)
