"""Volumes of a step that other servers have, verified as they arrive. No torch."""

from __future__ import annotations

import threading

from torchrelay.deadlines import Deadline
from torchrelay.endpoint.server.messages import Volume
from torchrelay.endpoint.server.snapshots import ServedSnapshot
from torchrelay.errors import RelayError
from torchrelay.sources.access import Access
from torchrelay.sources.connection import Host
from torchrelay.sources.remote_step import RemoteReader
from torchrelay.sources.suppliers import HttpSupplier, Suppliers

REMOTE_SECONDS = 30.0
END_SECONDS = 1.0  # to tell a server that the reads are over


class SourceFault(Exception):
    """Another rank's server does not give its part."""


class RankReader:
    """Reads volumes of a step from the servers that have them. With `reader`, a server knows all
    reads as those of one reader, and keeps the step for it. `stopped`: set to give a read up."""

    def __init__(self, snapshot: ServedSnapshot, access: Access, reader: str = "") -> None:
        self._snapshot, self._access, self._reader = snapshot, access, reader
        self._servers: dict[str, HttpSupplier] = {}
        self.stopped = threading.Event()

    def read_part(self, index: int, start: int, view: memoryview) -> None:
        """Fill a view from a volume, by its place in the record; `SourceFault` says what is wrong
        with the rank that has it."""
        url = self._snapshot.ranks[self._snapshot.places[index]]
        volume, deadline = self._snapshot.order[index], Deadline(REMOTE_SECONDS)
        try:
            self.read_into(volume, url, start, view, deadline)
        except (RelayError, OSError) as fault:
            raise SourceFault(getattr(fault, "message", "") or str(fault)) from fault

    def read_into(
        self, volume: Volume, url: str, start: int, view: memoryview, deadline: Deadline
    ) -> None:
        """Fill a view from whole chunks of a volume that the server at a URL has."""
        if url not in self._servers:
            token, context = self._access.token, self._access.client_context()
            host = Host(url, token=token, context=context, reader=self._reader)
            self._servers[url] = HttpSupplier(host, self._snapshot.id)
        what = f"step {self._snapshot.step}"
        suppliers = Suppliers({volume.name: [self._servers[url]]}, deadline, what)
        suppliers.stopped = self.stopped
        RemoteReader(volume, suppliers, deadline).read_into(start, [view])

    def close(self, reason: str = "") -> None:
        """Read no more; `reason` says why the reader failed, if it did."""
        for server in self._servers.values():
            if self._reader:
                server.host.report_end(reason, 0, seconds=END_SECONDS)
            server.close()
