"""Route "connections": chunks come over TCP connections beside those of the group.

Callers ask for it as "group": it is how the group's route goes where a state is large.
"""

from __future__ import annotations

import msgspec

from torchrelay.deadlines import Deadline
from torchrelay.transports.protocol import wire
from torchrelay.transports.routes.messages import PushedChunks
from torchrelay.transports.routes.nearby import place
from torchrelay.transports.routes.seam import (
    Incoming,
    Line,
    Mover,
    Outgoing,
    PushStream,
    Route,
    Server,
    Unavailable,
)
from torchrelay.transports.routes.sockets import channels
from torchrelay.transports.routes.sockets.channels import Channel, ChannelUse, channels_of
from torchrelay.transports.transfer.worker import on_the_way

WORTH_BYTES = 64 << 20  # of a state, from which on it gains more than connecting costs


class ChannelServer(Server):
    """The sender's end."""

    def __init__(self, outgoing: Outgoing) -> None:
        self._outgoing = outgoing
        self._uses: dict[int, ChannelUse] = {}  # by rank

    def offer(self, join: wire.Join, line: Line) -> wire.RouteOffer | Unavailable:
        out, rank = self._outgoing, line.peer
        self.end(rank, keep=False)  # of a join that came to nothing
        if out.device != "cpu" or out.snapshot.chunks.stream_bytes < WORTH_BYTES:
            return Unavailable("")
        several = out.receivers > 1
        if several and join.place.machine != place.here().machine:
            return Unavailable("")
        near = out.options.route != "group" and not place.apart(place.here(), join.place)
        use = channels_of(out.group).propose(
            rank, out.options.connections, near=near, local=several
        )
        self._uses[rank] = use
        if use.record is None:
            return Unavailable("")
        return wire.RouteOffer(msgspec.msgpack.encode(use.record))

    def answer(self, rank: int, taken: str, word: bytes, deadline: Deadline) -> None:
        if (use := self._uses.get(rank)) is not None:
            use.answered(taken, word, deadline)
            # Bytes for several receivers cross a link once, through a chain.
            shares_link = self._outgoing.receivers > 1 and use.channel and not use.channel.local
            if shares_link or taken != channels.NAME:
                use.decline()

    def stream(self, rank: int, transfer: int) -> PushStream | None:
        use = self._uses.get(rank)
        if use is None or use.channel is None:
            return None
        # Of several receivers, none waits for the digests of another's chunks.
        hashes = self._outgoing.options.verify is not False and self._outgoing.receivers == 1
        hashes = hashes and on_the_way() and not self._outgoing.cells
        channel = use.channel
        return PushStream(
            channel.way_on(transfer, hashes=hashes), channel.room, channel.buffers, hashes
        )

    def connections(self, rank: int) -> int:
        return self._uses[rank].connections if rank in self._uses else 0

    def instead(self, rank: int) -> dict[str, str]:
        return self._uses[rank].instead if rank in self._uses else {}

    def end(self, rank: int, *, keep: bool) -> None:
        if rank in self._uses:
            self._uses[rank].end(keep=keep)


class ChannelMover(PushedChunks):
    """The receiver's end: chunks come straight to where they belong."""

    def __init__(self, incoming: Incoming, use: ChannelUse) -> None:
        use.agreed(incoming.deadline)
        super().__init__(incoming, use.channel)
        self._use = use
        self.answer, self.connections = use.token, use.connections

    def close(self, *, keep: bool) -> None:
        super().close(keep=keep)
        self._use.end(keep=keep)


class ConnectionRoute(Route):
    name = channels.NAME
    asked_as = "group"

    def server(self, outgoing: Outgoing) -> Server:
        return ChannelServer(outgoing)

    def accept(self, offer: wire.RouteOffer | None, incoming: Incoming) -> Mover | Unavailable:
        if offer is None:
            return Unavailable("")
        sender = incoming.line.peer
        use = channels_of(incoming.line.group).answer(
            sender,
            wire.read_as(Channel, offer.fresh),
            incoming.connections,
            incoming.deadline.left(),
            local=not incoming.offer.threads,  # there are others beside this rank
        )
        if use.record is None:
            return Unavailable(use.instead.get("connections", ""))
        return ChannelMover(incoming, use)


ROUTE = ConnectionRoute()
