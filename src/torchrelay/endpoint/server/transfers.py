"""Who reads what: transfers in progress, those that are over, and what was sent to whom."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from torchrelay.endpoint.server.snapshots import ServedStep

IDLE_SECONDS = 10.0  # after which a reader that says nothing is taken to be gone
RATE_SECONDS = 3.0
FINISHED = 100
PUBLISHES = 200
HISTORY = 10_000  # downloads that are remembered, to be continued
STEPS_REMEMBERED = 256  # of which an address got bytes: with more, it has to say the step
IN_FLIGHT_BYTES = 64 << 20  # that the kernels of both ends may have taken and never delivered
MAX_READERS = 1024


@dataclass
class Transfer:
    """What one reader takes of one step: one request, or all requests under one name."""

    reader: str
    address: str
    agent: str
    snapshot: ServedStep
    kind: str
    total: int
    begun: float = field(default_factory=time.time)
    bytes: int = 0
    seen: float = field(default_factory=time.monotonic)  # when it last asked, or bytes went out
    tasks: set[asyncio.Task[None]] = field(default_factory=set)  # answers on their way
    cut: str = ""  # why its answers were ended
    fault: str = ""  # what went wrong with the last of them
    samples: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=64))

    def moved(self, nbytes: int) -> None:
        self.bytes += nbytes
        self.seen = now = time.monotonic()
        if not self.samples or now - self.samples[-1][0] > RATE_SECONDS / 32:
            self.samples.append((now, self.bytes))

    @property
    def rate(self) -> float:
        """Bytes a second, of late."""
        now = time.monotonic()
        samples = list(self.samples)  # in one go: threads that send add to them
        recent = [(at, done) for at, done in samples if now - at <= RATE_SECONDS]
        if not recent:
            return 0.0
        at, done = recent[0]
        return (self.bytes - done) / max(now - at, 0.05)

    def facts(self) -> dict[str, object]:
        return {
            "reader": self.reader,
            "address": self.address,
            "agent": self.agent,
            "step": self.snapshot.step,
            "kind": self.kind,
            "begun": self.begun,
            "bytes": self.bytes,
            "total": self.total,
        }


class Ledger:
    """All transfers of a server, and counts of what was."""

    def __init__(self) -> None:
        self.active: dict[tuple[str, str], Transfer] = {}
        self.finished: deque[dict[str, object]] = deque(maxlen=FINISHED)
        self.publishes: deque[dict[str, object]] = deque(maxlen=PUBLISHES)
        self.outcomes = {"done": 0, "failed": 0}
        self.refused = {"token": 0, "limit": 0, "slow": 0, "range": 0}
        self.sent_bytes = self.published = self.skipped = self.mapped = 0
        # Bytes of downloads that were begun, by address and patterns: a later request for the
        # rest does not say which step it has begun with.
        self._sent: OrderedDict[tuple[str, str], dict[str, tuple[int, bool]]] = OrderedDict()
        self._moving = threading.Lock()

    def of(
        self, reader: str, address: str, agent: str, snapshot: ServedStep, kind: str, total: int
    ) -> Transfer | None:
        """The transfer that a request belongs to; None if there are too many."""
        key = reader, snapshot.id
        found = self.active.get(key)
        if found is None:
            if len(self.active) >= MAX_READERS:
                return None
            found = Transfer(reader, address, agent[:80], snapshot, kind, total)
            self.active[key] = found
        found.seen = time.monotonic()
        return found

    def moved(self, transfer: Transfer, nbytes: int) -> None:
        """Bytes went out; for threads that send as well as for the event loop."""
        with self._moving:
            transfer.moved(nbytes)
            self.sent_bytes += nbytes

    def end(self, transfer: Transfer, outcome: str, reason: str = "") -> None:
        if self.active.pop((transfer.reader, transfer.snapshot.id), None) is None:
            return
        self.outcomes[outcome] += 1
        over = {"ended": time.time(), "outcome": outcome, "reason": reason[:300]}
        self.finished.append({**transfer.facts(), **over})

    def on(self, snapshot: ServedStep) -> Iterator[Transfer]:
        return (one for one in list(self.active.values()) if one.snapshot is snapshot)

    def sweep(self) -> None:
        """End transfers of readers that went away without a word."""
        now = time.monotonic()
        for one in list(self.active.values()):
            idle = not one.tasks and one.kind != "mapped"
            if idle and now - one.seen > IDLE_SECONDS:
                self.end(one, "failed", one.fault or "the reader went away without a word")

    # Downloads that may be continued.

    def note_sent(
        self, address: str, patterns: str, snapshot: ServedStep, end: int, *, whole: bool
    ) -> None:
        """Bytes of a file up to `end`, or all of them, were sent to an address."""
        sent = self._sent.setdefault((address, patterns), {})
        before, done = sent.get(snapshot.id, (0, True))
        sent[snapshot.id] = max(end, before), whole and done
        self._sent.move_to_end((address, patterns))
        while len(self._sent) > HISTORY:
            self._sent.popitem(last=False)

    def begun_with(self, address: str, patterns: str, start: int) -> set[str]:
        """The snapshots that the first `start` bytes which an address has may be of.

        What was sent to its end is not among them, unless the rest may have been lost on the way.
        """
        sent = self._sent.get((address, patterns), {})
        if len(sent) > STEPS_REMEMBERED:
            return set(sent)
        return {
            snapshot
            for snapshot, (end, whole) in sent.items()
            if end >= start and not (whole and start + IN_FLIGHT_BYTES <= end)
        }

    def note_publish(
        self, step: int, nbytes: int, stage: float, hashing: float, skipped: str | None
    ) -> None:
        self.publishes.append(
            {
                "step": step,
                "time": time.time(),
                "bytes": nbytes,
                "stage_seconds": stage,
                "hash_seconds": hashing,
                "skipped": skipped,
            }
        )
        if skipped is None:
            self.published += 1
        else:
            self.skipped += 1
