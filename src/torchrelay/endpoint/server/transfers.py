"""Transfers to readers: those in progress, those that are over, and counts."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from torchrelay.endpoint.server.http.connections import HttpConnection
from torchrelay.endpoint.server.messages import FinishPublish
from torchrelay.endpoint.server.snapshots import ServedSnapshot

IDLE_SECONDS = 10.0  # after which a reader that asks for nothing is taken to be gone
RATE_SECONDS = 3.0
FINISHED = 100
PUBLISHES = 200
MAX_READERS = 1024
ONE_REQUEST = "request"  # the name of a reader without one begins so


@dataclass
class Transfer:
    """One reader's share of one step: one request, or all requests under one name."""

    reader: str
    address: str
    agent: str
    snapshot: ServedSnapshot
    kind: str
    total: int
    begun: float = field(default_factory=time.time)
    bytes: int = 0
    seen: float = field(default_factory=time.monotonic)  # when it last asked, or bytes went out
    connections: set[HttpConnection] = field(default_factory=set)  # that answers are sent by
    leases: int = 0  # of memory that it has mapped
    cut: str = ""  # why its answers were ended
    fault: str = ""  # why the last of them failed
    samples: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=2))

    @property
    def rate(self) -> float:
        """Bytes a second, of the last seconds."""
        now = time.monotonic()
        if not self.samples or now - self.seen > RATE_SECONDS:
            return 0.0
        at, done = self.samples[0]
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


class Transfers:
    """All transfers of a server."""

    def __init__(self) -> None:
        self.active: dict[tuple[str, str], Transfer] = {}
        self.finished: deque[dict[str, object]] = deque(maxlen=FINISHED)
        self.publishes: deque[dict[str, object]] = deque(maxlen=PUBLISHES)
        self.outcomes = {"done": 0, "failed": 0}
        self.sent_bytes = self.published = self.skipped = self.mapped = 0

    def enter(
        self, reader: str, address: str, agent: str, snapshot: ServedSnapshot, kind: str, total: int
    ) -> Transfer | None:
        """The transfer that a request belongs to; None where there are too many."""
        key = reader, snapshot.id
        found = self.active.get(key)
        if found is None:
            self.sweep()
            if len(self.active) >= MAX_READERS:
                return None
            found = Transfer(reader, address, agent[:80], snapshot, kind, total)
            self.active[key] = found
        found.seen = time.monotonic()
        return found

    def moved(self, transfer: Transfer, nbytes: int) -> None:
        self.sent_bytes += nbytes
        transfer.bytes += nbytes
        transfer.seen = now = time.monotonic()
        if not transfer.samples or now - transfer.samples[-1][0] > RATE_SECONDS:
            transfer.samples.append((now, transfer.bytes))

    def end(self, transfer: Transfer, outcome: str, reason: str = "") -> None:
        if self.active.pop((transfer.reader, transfer.snapshot.id), None) is None:
            return
        self.outcomes[outcome] += 1
        over = {"ended": time.time(), "outcome": outcome, "reason": reason[:300]}
        self.finished.append({**transfer.facts(), **over})

    def of(self, snapshot: ServedSnapshot) -> Iterator[Transfer]:
        return (one for one in list(self.active.values()) if one.snapshot is snapshot)

    def sweep(self) -> None:
        """End transfers of readers that went away without a message."""
        now = time.monotonic()
        for one in list(self.active.values()):
            if not one.connections and not one.leases and now - one.seen > IDLE_SECONDS:
                self.end(one, "failed", one.fault or "the reader went away without a message")

    def note_publish(self, ended: FinishPublish) -> None:
        self.publishes.append(
            {
                "step": ended.step,
                "time": time.time(),
                "bytes": ended.nbytes,
                "stage_seconds": ended.stage_seconds,
                "hash_seconds": ended.hash_seconds,
                "skipped": ended.skipped,
            }
        )
        self.published += ended.skipped is None
        self.skipped += ended.skipped is not None
