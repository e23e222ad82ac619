"""Bytes of a step that a server shows: its own memory, and volumes that other servers have, which
are verified as they arrive. No torch."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING

from torchrelay.deadlines import Deadline
from torchrelay.endpoint.server.messages import Volume
from torchrelay.endpoint.server.snapshots import ServedSnapshot
from torchrelay.errors import EndpointError, RelayError
from torchrelay.sources.access import Access
from torchrelay.sources.connection import Host
from torchrelay.sources.remote_step import RemoteReader, Supplier, Suppliers
from torchrelay.system import read_full

if TYPE_CHECKING:
    from torchrelay.inspection.opened_state import Contents

REMOTE_SECONDS = 30.0
END_SECONDS = 1.0  # to tell a server that the reads are over


class RankReader:
    """Reads volumes of a step from the servers that have them. With `reader`, a server knows all
    reads as those of one reader, and keeps the step for it. `stopped`: set to give a read up."""

    def __init__(self, snapshot: ServedSnapshot, access: Access, reader: str = "") -> None:
        self._snapshot, self._access, self._reader = snapshot, access, reader
        self._servers: dict[str, Supplier] = {}
        self.stopped = threading.Event()

    def read_into(
        self, volume: Volume, url: str, start: int, view: memoryview, deadline: Deadline
    ) -> None:
        """Fill a view from a volume that the server at a URL has."""
        if url not in self._servers:
            token, context = self._access.token, self._access.client_context()
            host = Host(url, token=token, context=context, reader=self._reader)
            self._servers[url] = Supplier(host, self._snapshot.id)
        what = f"step {self._snapshot.step}"
        suppliers = Suppliers({volume.name: [self._servers[url]]}, deadline, what)
        suppliers.stopped = self.stopped
        RemoteReader(volume, suppliers).read_into(start, view)

    def close(self, reason: str = "") -> None:
        """Read no more; `reason` says why the reader failed, if it did."""
        for server in self._servers.values():
            if self._reader:
                server.host.report_end(reason, 0, seconds=END_SECONDS)
            server.close()


class StepReader:
    """Implements `StateReader` (inspection/opened_state.py) on a step that is shown; other ranks
    are asked for their parts. To be made with the service's lock held."""

    def __init__(self, step: ServedSnapshot, contents: Contents, access: Access) -> None:
        self.contents = contents
        self._step, self._ranks = step, RankReader(step, access)
        self._fds: list[int] = []
        self._files: dict[str, tuple[int, int]] = {}  # by volume; its first byte there
        for part in step.parts.values():
            # A descriptor of its own: the slot may be given back while this reads.
            self._fds.append(os.dup(part.slot.file.fileno()))
            for name, volume in part.volumes.items():
                self._files[name] = self._fds[-1], volume.start

    def is_here(self, volume: int) -> bool:
        """Whether a volume is in this server's memory."""
        return self._step.whole.volumes[volume].name in self._files

    def read_into(self, volume: int, start: int, view: memoryview) -> None:
        whole = self._step.whole
        found, rank = whole.volumes[volume], whole.places[volume]
        if found.name in self._files:
            fd, first = self._files[found.name]
            if not read_full(fd, view, first + start):
                raise EndpointError(f"{found.name} ends before byte {start + view.nbytes}")
            return
        deadline = Deadline(REMOTE_SECONDS)
        try:
            self._ranks.read_into(found, whole.ranks[rank], start, view, deadline)
        except (RelayError, OSError) as fault:
            why = getattr(fault, "message", "") or str(fault)
            raise EndpointError(f"rank {rank} did not send its part: {why}") from fault

    def close(self) -> None:
        self._files.clear()
        while self._fds:
            os.close(self._fds.pop())
        self._ranks.close()
