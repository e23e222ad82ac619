"""The status of a server, as JSON for a page and as numbers for Prometheus."""

from __future__ import annotations

import time

from torchrelay.endpoint.server.service import Service
from torchrelay.version import __version__

NO_CHANGES = {"history": 0, "bytes": 0, "steps": []}  # of a server that does not look for them


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
