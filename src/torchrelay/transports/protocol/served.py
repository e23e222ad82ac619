"""The sender's side of one receiver: its connection, and the sender's ends of its routes."""

from __future__ import annotations

from dataclasses import dataclass, field

from torchrelay.memory.pool import cores
from torchrelay.transports.meeting.connection import Connection
from torchrelay.transports.routes.choice import services
from torchrelay.transports.routes.route import Hop, Outgoing, Receiver, RouteService, Unavailable
from torchrelay.transports.wire.messages import Accept, Offer


@dataclass
class Served:
    connection: Connection
    transfer: bytes
    services: dict[str, RouteService] = field(default_factory=dict)
    service: RouteService | None = None  # of the route that it took
    outgoing: Outgoing | None = None
    likely: str = ""  # a route that has begun already
    _go: bytes = b""

    def make_offer(
        self,
        receiver: Receiver,
        outgoing: Outgoing,
        record: bytes,
        route: str | None,
        *,
        several: bool,
    ) -> Offer:
        """The offer to the receiver: a record, and the routes by which the bytes can travel."""
        self.services = services(receiver, route)
        said = {name: end.offer(outgoing) for name, end in self.services.items()}
        if receiver.receivers == 1 and not receiver.join.parts:
            self._begin_likely(outgoing)
        return Offer(
            record,
            self.transfer,
            outgoing.verify is not False,
            outgoing.cells,
            route,
            {name: facts for name, facts in said.items() if isinstance(facts, bytes)},
            {name: why.because for name, why in said.items() if isinstance(why, Unavailable)},
            self.likely,
            self._go,
            several,
            max(1, cores() // receiver.receivers),
        )

    def _begin_likely(self, outgoing: Outgoing) -> None:
        """A receiver that is alone and will read need not wait for a `Go`."""
        for name, service in self.services.items():
            if service.is_likely:
                self.likely = name
                self._go = service.begin(outgoing, Accept(name), Hop())
                return

    def close(self) -> None:
        for service in self.services.values():
            service.close()
