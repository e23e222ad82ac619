"""Receivers as their sender sees them, and the error that their fates add up to."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum

from torchrelay.errors import (
    PeerLostError,
    PeerRefusedError,
    RelayError,
    RouteError,
    StepMismatchError,
    TransferTimeoutError,
)
from torchrelay.transports.meeting.connection import Connection
from torchrelay.transports.routes.route import RouteService
from torchrelay.transports.wire.messages import Accept, Join, Refuse


class Stage(Enum):
    """How far a receiver has come, as its sender knows it."""

    EXPECTED = "expected"
    OFFERED = "offered"  # it looks at the offer
    ACCEPTED = "accepted"  # it waits for the others of a chain
    ACTIVE = "active"
    CONFIRMED = "confirmed"  # it has all it needs to commit
    DONE = "done"
    REFUSED = "refused"
    FAILED = "failed"
    UNKNOWN = "unknown"  # lost while it may have committed


UNDER_WAY = (Stage.OFFERED, Stage.ACCEPTED, Stage.ACTIVE, Stage.CONFIRMED)
OVER = (Stage.DONE, Stage.REFUSED, Stage.FAILED, Stage.UNKNOWN)


@dataclass
class Peer:
    """One receiver, and the sender's ends of its connection and its routes."""

    rank: int
    stage: Stage = Stage.EXPECTED
    reason: str = ""
    timed_out: bool = False  # failed for want of time
    refusal: Refuse | None = None
    refused_in: str = "join"
    join: Join | None = None
    accept: Accept | None = None
    joined_at: float = 0.0
    pinged_at: float = 0.0
    chained: bool = False  # another receiver feeds it
    rerouted: bool = False  # it was chained, and has asked the sender for chunks
    settled: bool | None = None  # whether it committed the transfer before, if that was unknown
    connection: Connection | None = None
    services: dict[str, RouteService] = field(default_factory=dict)
    service: RouteService | None = None  # of the route that it took
    requested: set[int] = field(default_factory=set)  # chunks whose digests it has requested

    def give_up(self, reason: str, *, timed_out: bool = False) -> None:
        """It has failed; but one that was confirmed may have committed."""
        self.stage = Stage.UNKNOWN if self.stage is Stage.CONFIRMED else Stage.FAILED
        self.reason, self.timed_out = reason, timed_out

    def refuse(self, refusal: Refuse) -> None:
        """It turned the offer down; or the state, when its objects were given theirs."""
        if self.stage in (Stage.ACTIVE, Stage.CONFIRMED):
            self.refused_in = "commit"
        self.stage, self.reason, self.refusal = Stage.REFUSED, refusal.message, refusal

    def close(self) -> None:
        """Serve it no longer."""
        for service in self.services.values():
            service.close()
        if self.connection is not None:
            self.connection.close()


def outcome(peers: Iterable[Peer], *, sent: str, step: int | None, phase: str) -> RelayError | None:
    """The error that a send ends with: a refusal, or that no receiver got the state."""
    everyone = list(peers)
    for peer in everyone:
        if peer.refusal is not None:
            kinds = {"step": StepMismatchError, "route": RouteError}
            refused: type[RelayError] = kinds.get(peer.refusal.kind, PeerRefusedError)
            return refused(
                f"rank {peer.rank} refused the state: {peer.refusal.message}",
                rank=peer.rank,
                step=step,
                phase=peer.refused_in,
                path=peer.refusal.path,
            )
    if not everyone or any(peer.stage is Stage.DONE for peer in everyone):
        return None
    first = everyone[0]
    reasons = "; ".join(_fate(peer) for peer in everyone)
    got = "is known to have" if any(peer.stage is Stage.UNKNOWN for peer in everyone) else "got"
    kind: type[RelayError] = TransferTimeoutError if first.timed_out else PeerLostError
    word = "timed out" if first.timed_out else "failed"
    return kind(
        f"send {word}, no receiver {got} the state: {reasons}; {sent}",
        rank=first.rank,
        step=step,
        phase=phase,
    )


def _fate(peer: Peer) -> str:
    may = ", and may have the state: the report of the next send to it tells"
    return f"rank {peer.rank} {peer.reason}{may if peer.stage is Stage.UNKNOWN else ''}"
