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

    `access`: the token that readers send, and how other ranks' servers are read.
    """

    def __init__(self, *, access: Access, stall: float) -> None:
        self.access, self.stall = access, stall
        self.lock = threading.RLock()
        self._changed = threading.Condition(self.lock)
        self.snapshots = Snapshots()
        self.devices = DeviceSteps()
        self.transfers = Transfers()
        self.started = time.time()
        self.url = ""
        self.socket = ""  # the name of the Unix socket for processes of this host
        self.pending = False  # whether a step is being published: readers of the newest wait for it
        self.http: HttpServer | None = None
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

    def until(self, holds: Callable[[], bool], seconds: float) -> None:
        """Wait for a change that makes something true, for that long at most."""
        with self._changed:
            self._changed.wait_for(holds, seconds)

    def notify(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def show(self, shown: Show, arrivals: Arrivals | None = None) -> None:
        with self._changed:
            if shown.export is not None:
                self.devices.show(shown)
            else:
                self.snapshots.show(shown, arrivals)
                self.pending = self.pending and shown.whole is None
            self._changed.notify_all()

    def on_device(self, request: DeviceLeaseRequest) -> Show | None:
        """The step that a process asks for, if memory of a GPU has it. A request for the newest
        waits for one that is being published."""
        devices = self.devices
        if request.snapshot or request.step is not None:
            return devices.find(request.snapshot, request.step)
        if (above := request.newer_than) is None:
            self.until(lambda: not devices.pending, MAX_DEVICE_WAIT)
            return devices.newest
        seconds = min(max(0, request.wait_ms) / 1000, MAX_DEVICE_WAIT)

        def is_there() -> bool:
            there = (devices.newest, self.snapshots.newest)
            return any(one is not None and one.step > above for one in there)

        self.until(is_there, seconds)
        found = devices.newest
        return found if found is not None and found.step > above else None

    def finish(self, ended: FinishPublish) -> None:
        """A publish is over."""
        with self._changed:
            self.pending = False
            self.devices.finish(ended)
            if ended.skipped is None and not ended.failed:
                self.snapshots.lead(ended.step)
            if not ended.failed:
                self.transfers.note_publish(ended)
            self._changed.notify_all()

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
            self.until(lambda: not any(one.connections for one in cut), _CUT_SECONDS)


def status(service: Service) -> dict[str, object]:
    """`/status.json`; to be called with the lock held."""
    transfers = service.transfers
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
        "ranks": (newest.ranks if newest is not None else []) or [service.url],
        "changes": NO_CHANGES if changes is None else changes.facts(),
        "connections": 0 if service.http is None else service.http.count,
        "sent_bytes": transfers.sent_bytes,
        "failures": transfers.outcomes["failed"],
    }


def metrics(service: Service) -> str:
    """The text format of Prometheus."""
    transfers = service.transfers
    newest = service.snapshots.newest
    last = transfers.publishes[-1] if transfers.publishes else {}
    rows: list[tuple[str, str, str, object]] = [
        ("step", "gauge", "", -1 if newest is None else newest.step),
        ("steps_held", "gauge", "", len(service.snapshots.shown)),
        ("state_bytes", "gauge", "", 0 if newest is None else newest.nbytes),
        ("sent_bytes_total", "counter", "", transfers.sent_bytes),
        ("mapped_total", "counter", "", transfers.mapped),
        ("readers", "gauge", "", len(transfers.active)),
        ("seeds", "gauge", "", len(service.seeds)),
        ("connections", "gauge", "", 0 if service.http is None else service.http.count),
        ("publishes_total", "counter", "", transfers.published),
        ("publishes_skipped_total", "counter", "", transfers.skipped),
        ("publish_seconds", "gauge", "", last.get("stage_seconds", 0.0)),
    ]
    for outcome, count in transfers.outcomes.items():
        rows.append(("transfers_total", "counter", f'{{outcome="{outcome}"}}', count))
    refused = dict(transfers.refused)
    if service.http is not None:
        refused["limit"] += service.http.turned_away
        refused["slow"] += service.http.slow
    for reason, count in refused.items():
        rows.append(("refused_total", "counter", f'{{reason="{reason}"}}', count))
    lines = []
    for name, kind, labels, value in rows:
        head = f"# TYPE torchrelay_{name} {kind}"
        if head not in lines:
            lines.append(head)
        lines.append(f"torchrelay_{name}{labels} {value}")
    return "\n".join(lines) + "\n"
