"""The state of a server: its snapshots, their readers, its seeds. One lock guards all of it.

Its status comes as JSON for a page, and as numbers for Prometheus.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from torchrelay.endpoint.server.device_steps import DeviceSteps
from torchrelay.endpoint.server.http.connections import HttpServer
from torchrelay.endpoint.server.messages import FinishPublish, Show
from torchrelay.endpoint.server.snapshots import Arrivals, ServedSnapshot, Snapshots
from torchrelay.endpoint.server.transfers import IDLE_SECONDS, Transfer, Transfers
from torchrelay.sources.access import Access
from torchrelay.sources.lent_memory import DeviceLeaseRequest
from torchrelay.version import __version__

SEED_SECONDS = 10.0  # after which a seed that does not announce itself again is taken to be gone
MAX_SEEDS = 1024
MAX_DEVICE_WAIT = 60.0  # seconds that a request for memory of a GPU waits
_CUT_SECONDS = 2.0
NO_CHANGES = {"history": 0, "bytes": 0, "steps": []}  # of a server that does not look for them


class Service:
    """The state that answers requests; to be used with its `lock` held, unless a method takes it.
    The lock is also the condition that is notified of changes.

    `access`: the token that readers send, and how other ranks' servers are read.
    """

    def __init__(self, http: HttpServer, url: str, *, access: Access, stall: float) -> None:
        self.http, self.url, self.access, self.stall = http, url, access, stall
        self.lock = threading.Condition()
        self.snapshots = Snapshots()
        self.devices = DeviceSteps()
        self.transfers = Transfers()
        self.started = time.time()
        self.pending = False  # whether a step is being published: readers of the newest wait for it
        self.seed_announced: Callable[[str], None] = lambda url: None
        # By URL: the snapshot, and when it was heard.
        self._seeds: dict[str, tuple[str, float]] = {}

    # Seeds: pullers that pass on what they have.

    @property
    def seeds(self) -> dict[str, str]:
        """The snapshot of each seed that announced itself lately, by URL."""
        now = time.monotonic()
        self._seeds = {u: (s, t) for u, (s, t) in self._seeds.items() if now - t < SEED_SECONDS}
        return {url: snapshot for url, (snapshot, _) in self._seeds.items()}

    def announce(self, url: str, snapshot: str) -> list[str]:
        """A seed says that it is there; returns the others of the same step."""
        others = [one for one, found in self.seeds.items() if found == snapshot and one != url]
        if url in self._seeds or len(self._seeds) < MAX_SEEDS:
            self._seeds[url] = snapshot, time.monotonic()
            self.seed_announced(url)
        return others

    # Steps that come and go. These methods take the lock.

    def show(self, shown: Show, arrivals: Arrivals | None = None) -> None:
        with self.lock:
            if shown.export is not None:
                self.devices.show(shown)
            else:
                self.snapshots.show(shown, arrivals)
                self.pending = self.pending and shown.whole is None
            self.lock.notify_all()

    def wake(self) -> None:
        """Have those who wait for a change look again."""
        with self.lock:
            self.lock.notify_all()

    def on_device(self, request: DeviceLeaseRequest) -> Show | None:
        """The step that a process asks for, if memory of a GPU has it. A request for the newest
        waits for one that is being published."""
        devices, above = self.devices, request.newer_than
        if request.snapshot or request.step is not None:
            return devices.find(request.snapshot, request.step)
        if above is None:
            self.lock.wait_for(lambda: not devices.pending, MAX_DEVICE_WAIT)
            return devices.newest

        def is_there() -> bool:
            there = (devices.newest, self.snapshots.newest)
            return any(one is not None and one.step > above for one in there)

        self.lock.wait_for(is_there, min(max(0, request.wait_ms) / 1000, MAX_DEVICE_WAIT))
        found = devices.newest
        return found if found is not None and found.step > above else None

    def finish(self, ended: FinishPublish) -> None:
        """A publish is over."""
        with self.lock:
            self.pending = False
            self.devices.finish(ended)
            if ended.skipped is None and not ended.failed:
                self.snapshots.lead(ended.step)
            if not ended.failed:
                self.transfers.note_publish(ended)
            self.lock.notify_all()

    def readers(self, snapshot: ServedSnapshot) -> list[Transfer]:
        """The readers of a step over TCP that make progress. Mapped memory has no readers here."""
        now = time.monotonic()
        with self.lock:
            return [
                one
                for one in self.transfers.of(snapshot)
                if one.kind != "mapped"
                and now - one.seen < (self.stall if one.connections else IDLE_SECONDS)
            ]

    def hide(self, snapshot: ServedSnapshot, number: int) -> None:
        """Take a slot back; those who still read from it are cut off."""
        with self.lock:
            self.snapshots.hide(snapshot, number)
            self.cut_readers(snapshot)

    def cut_readers(self, snapshot: ServedSnapshot) -> None:
        """End transfers of a step over TCP. None of them reads its memory afterwards."""
        with self.lock:
            cut = [one for one in self.transfers.of(snapshot) if one.kind != "mapped"]
            for one in cut:
                one.cut = f"step {snapshot.step} was replaced before the reader had taken it"
                for connection in one.connections:
                    connection.cut()
                self.transfers.end(one, "failed", one.cut)
            self.lock.wait_for(lambda: not any(one.connections for one in cut), _CUT_SECONDS)


def status(service: Service) -> dict[str, object]:
    """`/status.json`; to be called with the lock held."""
    transfers = service.transfers
    transfers.sweep()
    newest, changes = service.snapshots.newest, service.snapshots.changes
    return {
        "version": __version__,
        "url": service.url,
        "now": time.time(),
        "started": service.started,
        "step": None if newest is None else newest.step,
        "steps": [
            {**one.facts(), "readers": len(list(transfers.of(one)))}
            for one in service.snapshots.shown
        ],
        "publishes": list(transfers.publishes),
        "transfers": [{**one.facts(), "rate": one.rate} for one in transfers.active.values()],
        "finished": list(transfers.finished),
        "readers": len(transfers.active),
        "seeds": [{"url": url, "snapshot": snapshot} for url, snapshot in service.seeds.items()],
        "ranks": (newest.whole.ranks if newest is not None else []) or [service.url],
        "changes": NO_CHANGES if changes is None else changes.facts(),
        "connections": service.http.count,
        "sent_bytes": transfers.sent_bytes,
        "failures": transfers.outcomes["failed"],
    }


def metrics(service: Service) -> str:
    """The text format of Prometheus; to be called with the lock held."""
    transfers, newest = service.transfers, service.snapshots.newest
    transfers.sweep()
    last = transfers.publishes[-1] if transfers.publishes else {}
    values: dict[str, object] = {
        "step": -1 if newest is None else newest.step,
        "steps_held": len(service.snapshots.shown),
        "state_bytes": 0 if newest is None else newest.nbytes,
        "sent_bytes_total": transfers.sent_bytes,
        "mapped_total": transfers.mapped,
        "readers": len(transfers.active),
        "seeds": len(service.seeds),
        "connections": service.http.count,
        "publishes_total": transfers.published,
        "publishes_skipped_total": transfers.skipped,
        "publish_seconds": last.get("stage_seconds", 0.0),
    }
    for outcome, count in transfers.outcomes.items():
        values[f'transfers_total{{outcome="{outcome}"}}'] = count
    for reason, count in service.http.refused.items():
        values[f'refused_total{{reason="{reason}"}}'] = count
    lines: dict[str, None] = {}  # each once
    for key, value in values.items():
        name = key.partition("{")[0]
        kind = "counter" if name.endswith("_total") else "gauge"
        lines |= {f"# TYPE torchrelay_{name} {kind}": None, f"torchrelay_{key} {value}": None}
    return "\n".join(lines) + "\n"
