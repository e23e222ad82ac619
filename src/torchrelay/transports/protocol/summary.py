"""The report of a send or a receive, when it is over."""

from __future__ import annotations

from torchrelay.landing.places import Landed
from torchrelay.transports.protocol.machines.peers import Stage
from torchrelay.transports.protocol.receiver import Receiving
from torchrelay.transports.protocol.report import Report
from torchrelay.transports.protocol.sender import Sending
from torchrelay.transports.routes.choice import compares


def sent_report(
    sending: Sending,
    route: str | None,
    verify: bool | None,
    settled: dict[int, bool],
) -> Report:
    peers = sending.peers.values()
    routes = {peer.rank: peer.route.asked_as for peer in peers if peer.stage is Stage.DONE}
    taken = set(routes.values()) or {route or "group"}
    by = next(iter(taken)) if len(taken) == 1 else "mixed"
    servers = sending.servers.values()
    said = [peer.accept.instead for peer in peers]
    said += [server.instead(peer.rank) for peer in peers for server in servers]
    return Report(
        step=sending.snapshot.manifest.step,
        bytes=sending.snapshot.chunks.nbytes,
        wire_bytes=sending.wire_bytes,
        messages=sending.messages,
        seconds=sending.watch.seconds,
        route=by,
        routes=routes,
        instead={name: why for one in said for name, why in one.items()},
        verified=all(compares(name, verify) for name in taken),
        receivers=tuple(peer.rank for peer in peers if peer.stage is Stage.DONE),
        failed={
            peer.rank: peer.reason
            for peer in peers
            if peer.stage not in (Stage.DONE, Stage.UNKNOWN)
        },
        unknown={peer.rank: peer.reason for peer in peers if peer.stage is Stage.UNKNOWN},
        settled=settled,
        rerouted=tuple(sending.machine.rerouted),
        connections=sum(server.connections(peer.rank) for peer in peers for server in servers),
    )


def received_report(receiving: Receiving, landed: Landed, rank: int) -> Report:
    manifest, choice = receiving.manifest, receiving.choice
    assert manifest is not None and choice is not None
    mover, route = choice.mover, choice.route.asked_as
    return Report(
        step=manifest.step,
        bytes=receiving.nbytes,
        wire_bytes=mover.wire_bytes,
        messages=mover.messages,
        seconds=receiving.watch.seconds,
        route=route,
        routes={rank: route},
        instead=choice.instead,
        verified=mover.verified,
        handed_bytes=mover.handed_bytes,
        connections=mover.connections,
        receivers=(rank,),
        missing=tuple(landed.missing),
        extra=tuple(landed.extra),
    )
