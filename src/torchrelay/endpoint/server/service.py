"""What a server has and what goes on in it: everything that requests are answered from."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress

from torchrelay.endpoint.server.limits import LimitedServer
from torchrelay.endpoint.server.snapshots import ServedSteps
from torchrelay.endpoint.server.transfers import Ledger

SEED_SECONDS = 10.0  # after which a seed that says nothing is taken to be gone
MAX_SEEDS = 1024


class Service:
    """Steps, transfers and counts of one server. All of it belongs to one event loop."""

    def __init__(self, *, stall: float, version: str) -> None:
        self.stall, self.version = stall, version
        self.snapshots = ServedSteps()
        self.ledger = Ledger()
        self.started = time.time()
        self.url = ""
        self.socket = ""  # the name of the Unix socket for processes of this host
        self.seeds: dict[str, tuple[str, float]] = {}  # by URL: the snapshot, and when it was heard
        self.pending = False  # whether a step is being published
        self.changed = asyncio.Condition()
        self.server: LimitedServer | None = None

    @property
    def connections(self) -> int:
        return 0 if self.server is None else self.server.count

    def seeds_of(self, snapshot: str) -> list[str]:
        """Who else has some of a step, as far as they were heard of lately."""
        now = time.monotonic()
        self.seeds = {u: (s, t) for u, (s, t) in self.seeds.items() if now - t < SEED_SECONDS}
        return [url for url, (found, _) in self.seeds.items() if found == snapshot]

    async def until(self, holds: Callable[[], bool], seconds: float) -> None:
        """Wait for a change of what is shown that makes something hold, for so long at most."""
        with suppress(asyncio.TimeoutError):
            async with self.changed:
                await asyncio.wait_for(self.changed.wait_for(holds), seconds)
