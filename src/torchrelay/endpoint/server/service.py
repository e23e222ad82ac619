"""What a server has and what goes on in it: everything that requests are answered from."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress

from torchrelay.endpoint.server.limits import LimitedServer
from torchrelay.endpoint.server.snapshots import ServedSteps
from torchrelay.endpoint.server.transfers import Ledger


class Service:
    """Steps, transfers and counts of one server. All of it belongs to one event loop."""

    def __init__(self, *, stall: float, version: str) -> None:
        self.stall, self.version = stall, version
        self.snapshots = ServedSteps()
        self.ledger = Ledger()
        self.started = time.time()
        self.url = ""
        self.socket = ""  # the name of the Unix socket for processes of this host
        self.pending = False  # whether a step is being published
        self.changed = asyncio.Condition()
        self.server: LimitedServer | None = None

    @property
    def connections(self) -> int:
        return 0 if self.server is None else self.server.count

    async def until(self, holds: Callable[[], bool], seconds: float) -> None:
        """Wait for a change of what is shown that makes something hold, for so long at most."""
        with suppress(asyncio.TimeoutError):
            async with self.changed:
                await asyncio.wait_for(self.changed.wait_for(holds), seconds)
