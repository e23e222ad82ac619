"""The report of a send or a receive, when it is over."""

from __future__ import annotations

from collections.abc import Callable

from torchrelay.landing.places import Landed
from torchrelay.transports.protocol.receiver import Receiving
from torchrelay.transports.protocol.report import Report
from torchrelay.transports.protocol.sender import Sending
from torchrelay.transports.routes.choice import compares

# From a route and seconds by phase to the seconds that were to be expected.
Expect = Callable[[str, dict[str, float]], dict[str, float]]


def sent_report(
    sending: Sending,
    route: str | None,
    verify: bool | None,
    settled: dict[int, bool],
    expect: Expect,
) -> Report:
    peers = sending.peers.values()
    routes = {peer.rank: peer.route for peer in peers if peer.stage == "done"}
    taken = set(routes.values()) or {route or "group"}
    by = next(iter(taken)) if len(taken) == 1 else "mixed"
    why_not = {name: why for peer in peers for name, why in peer.instead.items()}
    unconnected = {name: why for peer in peers for name, why in peer.berth.instead.items()}
    return Report(
        step=sending.snapshot.manifest.step,
        bytes=sending.snapshot.chunks.nbytes,
        wire_bytes=sending.wire_bytes,
        messages=sending.messages,
        seconds=sending.watch.seconds,
        predicted=expect(by, sending.watch.seconds),
        route=by,
        routes=routes,
        instead={**why_not, **unconnected},
        verified=all(compares(name, verify) for name in taken),
        receivers=tuple(peer.rank for peer in peers if peer.stage == "done"),
        failed={peer.rank: peer.reason for peer in peers if peer.stage not in ("done", "unknown")},
        unknown={peer.rank: peer.reason for peer in peers if peer.stage == "unknown"},
        settled=settled,
        rerouted=tuple(sending.rerouted),
        connections=sum(peer.berth.connections for peer in peers),
    )


def received_report(receiving: Receiving, landed: Landed, rank: int, expect: Expect) -> Report:
    manifest, intake = receiving.manifest, receiving.intake
    assert manifest is not None and intake is not None
    route, seconds = receiving.choice.route, receiving.watch.seconds
    return Report(
        step=manifest.step,
        bytes=receiving.nbytes,
        wire_bytes=intake.wire_bytes,
        messages=intake.messages,
        seconds=seconds,
        predicted=expect(route, seconds),
        route=route,
        routes={rank: route},
        instead={**receiving.choice.instead, **receiving.berth.instead},
        verified=receiving.verified,
        handed_bytes=receiving.handed_bytes,
        connections=receiving.berth.connections,
        receivers=(rank,),
        missing=tuple(landed.missing),
        extra=tuple(landed.extra),
    )
