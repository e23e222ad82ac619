"""The reports of a send and of a receive."""

from __future__ import annotations

from torchrelay.landing.places import Landed
from torchrelay.results import Outcome, Peer, Report, Traffic
from torchrelay.transports.protocol.peers import Stage
from torchrelay.transports.protocol.receiver import Receiving
from torchrelay.transports.protocol.sender import Sending
from torchrelay.transports.routes.choice import BY_NAME


def sent_report(sending: Sending, route: str | None, verify: bool | None) -> Report:
    """The report of a send that is over."""
    accepts = [peer.accept for peer in sending.peers.values() if peer.accept is not None]
    peers: dict[Peer, Outcome] = {rank: _outcome(sending, rank) for rank in sending.peers}
    taken = {peer.route for peer in peers.values() if peer.route} or {route or "tcp"}
    return Report(
        step=sending.step,
        bytes=sending.snapshot.chunks.nbytes,
        seconds=sending.watch.seconds,
        peers=peers,
        verified=all(BY_NAME[name].compares(verify) for name in taken),
        instead={name: why for one in accepts for name, why in one.instead.items()},
        traffic=Traffic(*map(sending.total, ("wire_bytes", "messages", "connections"))),
    )


def _outcome(sending: Sending, rank: int) -> Outcome:
    peer = sending.peers[rank]
    done, unknown = peer.stage is Stage.DONE, peer.stage is Stage.UNKNOWN
    return Outcome(
        "done" if done else "unknown" if unknown else "failed",
        "" if done else peer.reason,
        peer.accept.route if done and peer.accept is not None else "",
        rerouted=rank in sending.machine.rerouted,
        settled=sending.settled.get(rank),
    )


def received_report(receiving: Receiving, landed: Landed, source: int) -> Report:
    """The report of a receive from one rank."""
    choice = receiving.choice
    fetch = choice.fetch
    return Report(
        step=receiving.record.step,
        bytes=receiving.nbytes,
        seconds=receiving.watch.seconds,
        peers={source: Outcome(route=choice.route.name, bytes=receiving.nbytes)},
        missing=tuple(landed.missing),
        extra=tuple(landed.extra),
        verified=fetch.verified,
        instead=choice.instead,
        traffic=Traffic(fetch.wire_bytes, fetch.messages, fetch.connections),
    )
