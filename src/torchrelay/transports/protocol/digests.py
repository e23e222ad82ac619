"""The digests that receivers ask a sender for: made by workers, each once, and told as they become
known."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from torchrelay.transports.routes.route import Outgoing
from torchrelay.transports.streams.workers import Workers, hashers
from torchrelay.transports.wire.messages import Digests, Want, from_ranges


@dataclass(frozen=True)
class ChunksHashed:
    """A worker has made digests."""

    outgoing: Outgoing
    digests: dict[int, bytes]


@dataclass
class _Asked:
    """What one receiver wants to know."""

    outgoing: Outgoing
    ever: set[int] = field(default_factory=set)
    untold: set[int] = field(default_factory=set)
    known: dict[int, bytes] = field(default_factory=dict)  # yet to be told


class AskedDigests:
    """Of all receivers of one send. `report` takes `ChunksHashed`, or the fault of a worker."""

    def __init__(self, report: Callable[[object], None]) -> None:
        self._report = report
        self._workers = Workers(hashers())
        self._asked: dict[int, _Asked] = {}  # by rank

    def want(self, rank: int, outgoing: Outgoing, want: Want) -> bool:
        """A receiver asks for digests; whether it has asked for one of them before, because it did
        not match. `RemoteProtocolError` for chunks that do not exist."""
        chunks = from_ranges(want.chunks, len(outgoing.snapshot.chunks))
        asked = self._asked.get(rank)
        if asked is None or asked.outgoing is not outgoing:
            asked = self._asked[rank] = _Asked(outgoing)
        again = not asked.ever.isdisjoint(chunks)
        asked.ever.update(chunks)
        asked.untold.update(chunks)
        # A device hashes all that lies there at once.
        on_gpu = [index for index in chunks if index in outgoing.layout.on_gpu]
        jobs = [[index] for index in chunks if index not in outgoing.layout.on_gpu]
        for job in [*([on_gpu] if on_gpu else ()), *jobs]:
            self._workers.submit(partial(self._make, outgoing, job))
        return again

    def _make(self, outgoing: Outgoing, chunks: list[int]) -> None:
        try:
            made = {index: outgoing.chunks.digest(index) for index in chunks}
            self._report(ChunksHashed(outgoing, made))
        except Exception as fault:
            self._report(fault)

    def hashed(self, event: ChunksHashed) -> None:
        for asked in self._asked.values():
            if asked.outgoing is event.outgoing:
                told = asked.untold & event.digests.keys()
                asked.untold -= told
                asked.known |= {index: event.digests[index] for index in told}

    def tell(self, send: Callable[[int, Digests], None]) -> None:
        """Tell receivers what has become known."""
        for rank, asked in self._asked.items():
            if asked.known:
                known, asked.known = asked.known, {}
                send(rank, Digests(tuple(known), b"".join(known.values())))

    def close(self) -> None:
        self._workers.stop()
