"""What a transfer tells its caller when it is over."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torchrelay.landing.places import Landed
from torchrelay.transports.protocol.peers import Stage
from torchrelay.transports.protocol.receiver import Receiving
from torchrelay.transports.protocol.sender import Sending
from torchrelay.transports.routes.choice import BY_NAME


@dataclass(frozen=True)
class Report:
    """How a transfer went, as this rank saw it."""

    step: int | None
    bytes: int  # of the state itself
    wire_bytes: int  # that this rank sent (sender) or received (receiver) as data
    messages: int  # that carried data; on one machine, copies by the kernel
    seconds: dict[str, float] = field(default_factory=dict)  # by phase
    route: str = "tcp"  # one of `routes`; "mixed" where receivers differ
    routes: dict[int, str] = field(default_factory=dict)  # of each receiver that has the state
    instead: dict[str, str] = field(default_factory=dict)  # faster routes: why none was taken
    verified: bool = True  # whether digests were compared
    receivers: tuple[int, ...] = ()  # that have the state
    failed: dict[int, str] = field(default_factory=dict)  # rank: why it has not
    unknown: dict[int, str] = field(default_factory=dict)  # rank: why it may have it or not
    settled: dict[int, bool] = field(default_factory=dict)  # unknown before: whether it had it
    rerouted: tuple[int, ...] = ()  # fed by the sender after their upstream was lost
    missing: tuple[str, ...] = ()  # offered, not in the destination (strict=False)
    extra: tuple[str, ...] = ()  # in the destination, not offered (strict=False)
    connections: int = 0  # that carried the data
    sources: dict[int, int] = field(default_factory=dict)  # bytes that each of several sent

    @property
    def total_seconds(self) -> float:
        return sum(self.seconds.values())

    def explain(self) -> str:
        """Bytes, seconds of each phase, the route, and why no faster one was taken.

        "call" is the time until the sender came.
        """
        rate = f", {self.bytes / self.total_seconds / 1e9:.2f} GB/s" if self.total_seconds else ""
        lines = [f"{self.bytes} bytes by route {self.route}{rate}"]
        if self.connections:
            lines.append(f"  over {self.connections} data connections")
        lines += [f"  not by {name}: {why}" for name, why in self.instead.items()]
        lines += [f"  {phase:10s} {spent:10.4f} seconds" for phase, spent in self.seconds.items()]
        lines.append(f"  {'total':10s} {self.total_seconds:10.4f} seconds")
        return "\n".join(lines)


class Received(NamedTuple):
    """What `recv` returns: the state, its step, and the report."""

    state: Any
    step: int | None
    report: Report


def sent_report(sending: Sending, route: str | None, verify: bool | None) -> Report:
    """The report of a send that is over."""
    peers = sending.peers.values()
    done = [peer for peer in peers if peer.stage is Stage.DONE]
    accepts = {peer.rank: peer.accept for peer in peers if peer.accept is not None}
    routes = {peer.rank: accepts[peer.rank].route for peer in done}
    taken = set(routes.values()) or {route or "tcp"}
    verified = all(BY_NAME[name].compares(verify) for name in taken)
    return Report(
        step=sending.step,
        bytes=sending.snapshot.chunks.nbytes,
        wire_bytes=sending.total("wire_bytes"),
        messages=sending.total("messages"),
        seconds=sending.watch.seconds,
        route=taken.pop() if len(taken) == 1 else "mixed",
        routes=routes,
        instead={name: why for one in accepts.values() for name, why in one.instead.items()},
        verified=verified,
        receivers=tuple(peer.rank for peer in done),
        failed={
            peer.rank: peer.reason
            for peer in peers
            if peer.stage not in (Stage.DONE, Stage.UNKNOWN)
        },
        unknown={peer.rank: peer.reason for peer in peers if peer.stage is Stage.UNKNOWN},
        settled=sending.settled,
        rerouted=tuple(sending.machine.rerouted),
        connections=sending.total("connections"),
    )


def received_report(receiving: Receiving, landed: Landed, rank: int) -> Report:
    """The report of a receive from one rank."""
    choice = receiving.choice
    fetch, route = choice.fetch, choice.route.name
    return Report(
        step=receiving.record.step,
        bytes=receiving.nbytes,
        wire_bytes=fetch.wire_bytes,
        messages=fetch.messages,
        seconds=receiving.watch.seconds,
        route=route,
        routes={rank: route},
        instead=choice.instead,
        verified=fetch.verified,
        connections=fetch.connections,
        receivers=(rank,),
        missing=tuple(landed.missing),
        extra=tuple(landed.extra),
    )
