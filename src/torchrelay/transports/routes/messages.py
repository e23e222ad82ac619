"""Route "group": chunks are messages over the process group. It is always there.

With several receivers the chunks go down a chain (`protocol.fanout`).
"""

from __future__ import annotations

from torchrelay.transports.protocol import wire
from torchrelay.transports.routes.seam import (
    Incoming,
    Mover,
    Route,
    Unavailable,
)
from torchrelay.transports.transfer.intake import Feed, Intake


class PushedChunks(Mover):
    """Takes in the chunks that the sender pushes, over the group or by a feed beside it."""

    def __init__(self, incoming: Incoming, feed: Feed | None = None) -> None:
        self._incoming, self._feed = incoming, feed
        self.verified = incoming.offer.verify
        self._intake: Intake | None = None

    def run(self, go: wire.Go) -> None:
        self._intake = Intake(self._incoming, go, self._feed)
        try:
            self._intake.run()
        finally:
            self._count()

    def _count(self) -> None:
        assert self._intake is not None
        self.wire_bytes, self.messages = self._intake.wire_bytes, self._intake.messages
        self.handed_bytes = self._intake.handed_bytes

    def finish(self) -> None:
        assert self._intake is not None
        self._intake.finish()

    def close(self, *, keep: bool) -> None:
        if self._intake is not None:
            self._intake.close()


class MessageRoute(Route):
    name = "group"

    def accept(self, offer: wire.RouteOffer | None, incoming: Incoming) -> Mover | Unavailable:
        return PushedChunks(incoming)


ROUTE = MessageRoute()
