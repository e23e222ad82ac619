"""Receivers as the sender sees them, and the error that their fates add up to."""

from __future__ import annotations

import queue
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from torchrelay.deadlines import Deadline
from torchrelay.errors import (
    PeerLostError,
    PeerRefusedError,
    RelayError,
    RouteError,
    StepMismatchError,
    TransferTimeoutError,
)
from torchrelay.transports.group.lines import ControlLine, GroupLines
from torchrelay.transports.protocol import wire
from torchrelay.transports.protocol.machines import fanout
from torchrelay.transports.routes.choice import BY_NAME, GROUP
from torchrelay.transports.routes.nearby import place
from torchrelay.transports.routes.seam import Route, Server

UNTAKEN = 64  # messages that a receiver which goes on asking has not taken


@dataclass(frozen=True)
class Said:
    """Something that was heard on the line of a receiver."""

    rank: int
    line: ControlLine
    message: wire.Message | Exception


class Stage(Enum):
    """How far a receiver has come, as its sender knows it."""

    CALLED = "called"
    JOINED = "joined"  # it looks at the offer
    ACCEPTED = "accepted"
    APART = "apart"  # it takes parts (`Branch`)
    DONE = "done"
    REFUSED = "refused"
    FAILED = "failed"
    UNKNOWN = "unknown"  # lost when it had been told all that it needs


@dataclass
class Owed:
    """Chunks that go from here to a receiver: yet to be posted, and on their way."""

    todo: int = 0
    in_flight: int = 0
    moved_at: float = 0.0


@dataclass
class Peer:
    """One receiver."""

    rank: int
    transfer: int
    stage: Stage = Stage.CALLED
    reason: str = ""
    late: bool = False  # failed for want of time
    absent: bool = False  # never came: its line is the next call's
    adopted: bool = False  # its line is one that an earlier call has left
    untaken: int = 0  # messages on their way to it
    refusal: wire.Refuse | None = None
    refused_in: str = "join"
    place: wire.Place = field(default_factory=wire.Place)
    accept: wire.Accept = field(default_factory=wire.Accept)
    reads: bool = False  # may read other receivers, and be read
    hashes: int = 0  # of the first so many chunks it knows the digests, to pass them on
    route: Route = GROUP
    pulled: bool = False  # has read everything, and waits for our word
    trailed: bool = False  # has it
    joined_at: float = 0.0
    knocked_at: float = 0.0
    lane: int = 1  # the last one that it has asked for chunks on

    @property
    def deaf(self) -> bool:
        """Whether it does not take what it is told."""
        return self.untaken > UNTAKEN

    def may_ask(self, need: wire.Need, chunks: int) -> bool:
        """Whether these are chunks that there are, each once, on a lane that was not used."""
        fine = need.lane > self.lane and len(set(need.chunks)) == len(need.chunks)
        self.lane = need.lane
        return fine and max(need.chunks, default=0) < chunks

    def take(self, accept: wire.Accept, only: str | None, offered: Collection[str]) -> str:
        """It takes the offer, by the `only` route if there is one; else: why that is of no use."""
        route = BY_NAME.get(accept.route)
        if route is None or (route.name not in offered and route is not GROUP):
            return f"took route {accept.route!r}, which is not known here"
        if only not in (None, route.asked_as):
            reason = f"it takes route {accept.route!r}, and {only!r} was asked for"
            self.refusal = wire.Refuse("route", reason)
            return reason
        self.stage, self.accept, self.route = Stage.ACCEPTED, accept, route
        return ""

    def give_up(self, reason: str, *, late: bool = False) -> None:
        """It has failed; but one that has been told all it needs may have the state."""
        may_have_it = self.stage in (Stage.ACCEPTED, Stage.APART) and self.trailed
        self.stage = Stage.UNKNOWN if may_have_it else Stage.FAILED
        self.reason, self.late = reason, late

    def refuse(self, word: wire.Refuse) -> None:
        """It turned the offer down; or the state, when objects of its were told theirs."""
        if self.stage is Stage.ACCEPTED:
            self.refused_in = "commit"
        self.stage, self.reason, self.refusal = Stage.REFUSED, word.message, word

    def settle(self, word: wire.Message | Exception) -> None:
        """Find out about one that may have the state, by what it says after all."""
        if isinstance(word, wire.Done):
            self.stage = Stage.DONE
        elif isinstance(word, wire.Leave | wire.Refuse):
            self.stage = Stage.FAILED


def join_ends(peers: Iterable[Peer], nobody_by: float, window: float, end: float) -> float:
    """Until when to wait for receivers; `nobody_by`, if none has come. The call ends at `end`.

    The first receiver waits a window for the others to come, and as long for the answer of each
    that came. Waiting for late receivers must not use up the time reserved for serving.
    """
    came = (Stage.JOINED, Stage.ACCEPTED, Stage.REFUSED, Stage.APART)
    here = [peer for peer in peers if peer.stage in came]
    silent = [peer.joined_at for peer in here if peer.stage is Stage.JOINED]
    if not here:
        return nobody_by
    if len(silent) == len(here):
        return float("inf")
    waits = [min(peer.joined_at for peer in here), *silent]
    return max(at + min(window, (end - at) / 2) for at in waits)


def connect(peers: Sequence[Peer], servers: Mapping[str, Server], seconds: float) -> None:
    """Have the routes hear what receivers answer, within so many seconds in all."""
    for peer in peers:
        taken, deadline = peer.route.name, Deadline(max(seconds / len(peers), 0.001))
        for name, server in servers.items():
            server.answer(peer.rank, taken, peer.accept.answer if name == taken else b"", deadline)


def go(
    hop: fanout.Hop,
    peers: Mapping[int, Peer],
    patience: float,
    *,
    may_read: bool,
    route: str = GROUP.name,
) -> wire.Go:
    """What a receiver is told of its place in the chain; `may_read`: memory of one another."""
    me, before = peers[hop.rank], peers.get(hop.upstream)  # none where it is the sender
    behind = None if hop.downstream is None else peers[hop.downstream]
    return wire.Go(
        hop.upstream,
        hop.downstream,
        behind.transfer if behind else 0,
        patience,
        reads=before is not None and may_read and _can_try(me, before),
        notes=behind is not None and may_read and _can_try(behind, me),
        route=route,
    )


def _can_try(reader: Peer, owner: Peer) -> bool:
    """Whether one can try to read the other: they are in one place, and neither is against it."""
    return reader.reads and owner.reads and not place.apart(reader.place, owner.place)


def hang_up(
    group_lines: GroupLines, events: queue.SimpleQueue[object], lines: Iterable[ControlLine]
) -> list[object]:
    """Leave the lines of absent receivers to the next call, with what was said on them since.

    Returns the events that concern others.
    """
    said: dict[ControlLine, list[wire.Message | Exception]] = {}
    others: list[object] = []
    for line in lines:
        said[line] = []
        line.listen(None)
    for _ in range(events.qsize()):  # not those of a peer that goes on and on
        event = events.get()
        if isinstance(event, Said) and event.line in said:
            said[event.line].append(event.message)
        else:
            others.append(event)
    for line, messages in said.items():
        line.put_back(messages)
        group_lines.hang_up(line)
    return others


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
                phase=peer.refused_in,
                path=peer.refusal.path,
            )
    if not everyone or any(peer.stage is Stage.DONE for peer in everyone):
        return None
    first = everyone[0]
    reasons = "; ".join(_fate(peer) for peer in everyone)
    got = "is known to have" if any(peer.stage is Stage.UNKNOWN for peer in everyone) else "got"
    kind: type[RelayError] = TransferTimeoutError if first.late else PeerLostError
    word = "timed out" if first.late else "failed"
    return kind(
        f"send {word}, no receiver {got} the state: {reasons}; {sent}",
        rank=first.rank,
        step=step,
        phase=phase,
    )


def _fate(peer: Peer) -> str:
    may = ", and may have the state: the report of the next send to it tells"
    return f"rank {peer.rank} {peer.reason}{may if peer.stage is Stage.UNKNOWN else ''}"
