"""Volumes of a step that other ranks' servers have, verified as they arrive. No torch."""

from __future__ import annotations

from torchrelay.deadlines import Deadline
from torchrelay.endpoint.server.snapshots import ServedSnapshot
from torchrelay.errors import RelayError
from torchrelay.sources.access import Access
from torchrelay.sources.connection import Host
from torchrelay.sources.remote_step import RemoteReader
from torchrelay.sources.suppliers import HttpGiver, Supplier, Suppliers

REMOTE_SECONDS = 30.0


class SourceFault(Exception):
    """Another rank's server does not give its part."""


class RankReader:
    """Reads volumes of a step that other ranks have; each by its server."""

    def __init__(self, snapshot: ServedSnapshot, access: Access) -> None:
        self._snapshot, self._access = snapshot, access
        self._givers: dict[str, HttpGiver] = {}

    def read_into(self, index: int, start: int, view: memoryview) -> None:
        """Fill a view from bytes of a volume; `SourceFault` says what is wrong with its rank."""
        volume, deadline = self._snapshot.order[index], Deadline(REMOTE_SECONDS)
        url = self._snapshot.ranks[self._snapshot.places[index]]
        try:
            if url not in self._givers:
                token, context = self._access.token, self._access.client_context()
                host = Host(url, token=token, context=context)
                self._givers[url] = HttpGiver(host, self._snapshot.id)
            what, supplier = f"step {self._snapshot.step}", Supplier(self._givers[url])
            suppliers = Suppliers({volume.name: [supplier]}, deadline, what)
            RemoteReader(volume, suppliers, deadline).read_into(start, [view])
        except (RelayError, OSError) as fault:
            raise SourceFault(getattr(fault, "message", "") or str(fault)) from fault

    def close(self) -> None:
        for giver in self._givers.values():
            giver.close()
