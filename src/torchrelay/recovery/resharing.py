"""Ranks that recover the same step at once take it from each other, not all from its source."""

from __future__ import annotations

from torchrelay.deadlines import Deadline
from torchrelay.endpoint.pull import SeedingShelf
from torchrelay.memory import threads
from torchrelay.sources.endpoint import EndpointSource
from torchrelay.sources.keeper import KeeperSource
from torchrelay.sources.peer import PeerSource
from torchrelay.sources.seam import Opened, Source


class Resharing:
    """Opens steps of endpoints and peers as seeds, and serves them until it is closed."""

    def __init__(self) -> None:
        self._shelves: list[SeedingShelf] = []

    def open(self, source: Source, step: int, deadline: Deadline) -> Opened:
        """A step of a source, put together with the others that are at it."""
        endpoint = source.endpoint() if isinstance(source, PeerSource) else source
        if not isinstance(endpoint, EndpointSource) or isinstance(endpoint, KeeperSource):
            return source.open(step, deadline)
        if any(host.url.startswith("https") for host in endpoint.hosts):
            return source.open(step, deadline)  # a seed would need a certificate of its own
        shelf = SeedingShelf(endpoint, deadline, None, endpoint.token, None, None)
        self._shelves.append(shelf)
        return shelf.open(step)

    def close(self) -> None:
        """Serve no more. The memory is given back on the side: that takes as long as it is large,
        and the state is there."""
        for shelf in self._shelves:
            try:
                threads.run(shelf.close, "seed")
            except RuntimeError:  # the interpreter ends, and no thread is started any more
                shelf.close()
