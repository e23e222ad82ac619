"""The digests that receivers ask a sender for: workers make each once, and send it at once."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torchrelay.memory.pool import cores
from torchrelay.transports.routes.outgoing import Outgoing
from torchrelay.transports.streams.workers import Workers
from torchrelay.transports.wire.messages import Digests, Want, from_ranges

MOST_ANSWERS = 1024  # messages, to a receiver that asks once


class AskedDigests:
    """Of all receivers of one send. `report` takes the fault of a worker."""

    def __init__(self, report: Callable[[object], None]) -> None:
        self._report = report
        # Where cores are few, receivers that read need them.
        self._workers = Workers(max(1, min(4, cores() // 4)))
        self._asked: dict[int, tuple[Outgoing, set[int]]] = {}  # by rank, all that it asked for

    def begin(self, outgoing: Outgoing) -> None:
        """Have devices hash what lies there: a receiver is likely to ask for it."""
        if outgoing.verify is not False:
            self._submit(outgoing.hash_on_devices)

    def want(
        self, rank: int, outgoing: Outgoing, want: Want, send: Callable[[Digests], None]
    ) -> bool:
        """A receiver asks for digests; whether it has asked for one of them before, because it did
        not match. `RemoteProtocolError` for chunks that do not exist."""
        chunks = from_ranges(want.chunks, len(outgoing.snapshot.chunks))
        before = self._asked.get(rank)
        asked = before[1] if before is not None and before[0] is outgoing else set()
        self._asked[rank] = outgoing, asked
        again = not asked.isdisjoint(chunks)
        asked.update(chunks)
        # A device hashes all that lies there at once.
        on_gpu = [index for index in chunks if index in outgoing.on_gpu]
        others = [index for index in chunks if index not in outgoing.on_gpu]
        size = len(others) // MOST_ANSWERS + 1
        jobs = [others[at : at + size] for at in range(0, len(others), size)]

        def answer(some: list[int]) -> None:
            send(Digests(tuple(some), b"".join(map(outgoing.digest, some))))

        for job in [on_gpu, *jobs] if on_gpu else jobs:
            self._submit(partial(answer, job))
        return again

    def _submit(self, job: Callable[[], None]) -> None:
        def run() -> None:
            try:
                job()
            except Exception as fault:
                self._report(fault)

        self._workers.submit(run)

    def close(self) -> None:
        self._workers.stop()
