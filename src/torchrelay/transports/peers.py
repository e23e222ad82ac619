"""Receivers as the sender sees them, and the error that their fates add up to."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from torchrelay.errors import (
    PeerLostError,
    PeerRefusedError,
    RelayError,
    RouteError,
    StepMismatchError,
    TransferTimeoutError,
)
from torchrelay.transports import wire
from torchrelay.transports.group import Line


@dataclass
class Peer:
    """One receiver."""

    rank: int
    line: Line
    stage: str = "called"  # called, joined, accepted, done, refused or failed
    reason: str = ""
    late: bool = False  # failed for want of time
    refusal: wire.Refuse | None = None
    machine: str = ""
    route: str = "group"
    instead: dict[str, str] = field(default_factory=dict)  # faster routes: why not
    needs_ring: bool = False
    hashed: tuple[int, ...] = ()  # chunks whose digests it compares, not by the group
    pulled: bool = False  # has read everything, and waits for our word
    trailed: bool = False  # has it
    joined_at: float = 0.0
    knocked_at: float = 0.0


def outcome(peers: Iterable[Peer], *, sent: str, step: int | None, phase: str) -> RelayError | None:
    """The error that a send ends with: a refusal, or that nobody got the state."""
    everyone = list(peers)
    for peer in everyone:
        if peer.refusal is not None:
            kinds = {"step": StepMismatchError, "route": RouteError}
            refused: type[RelayError] = kinds.get(peer.refusal.kind, PeerRefusedError)
            return refused(
                f"rank {peer.rank} refused the state: {peer.refusal.message}",
                rank=peer.rank,
                step=step,
                phase="join",
                path=peer.refusal.path,
            )
    if not everyone or any(peer.stage == "done" for peer in everyone):
        return None
    first = everyone[0]
    reasons = "; ".join(f"rank {peer.rank} {peer.reason}" for peer in everyone)
    kind: type[RelayError] = TransferTimeoutError if first.late else PeerLostError
    word = "timed out" if first.late else "failed"
    return kind(
        f"send {word}, no receiver got the state: {reasons}; {sent}",
        rank=first.rank,
        step=step,
        phase=phase,
    )
