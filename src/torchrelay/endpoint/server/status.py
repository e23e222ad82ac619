"""What goes on, as JSON for a page and as numbers for Prometheus."""

from __future__ import annotations

import time

from torchrelay.endpoint.server.service import Service


def status(service: Service) -> dict[str, object]:
    ledger = service.ledger
    newest = service.snapshots.newest
    return {
        "version": service.version,
        "url": service.url,
        "now": time.time(),
        "started": service.started,
        "step": None if newest is None else newest.step,
        "steps": [
            {**one.facts(), "readers": len(list(ledger.on(one)))} for one in service.snapshots.shown
        ],
        "publishes": list(ledger.publishes),
        "transfers": [{**one.facts(), "rate": one.rate} for one in ledger.active.values()],
        "finished": list(ledger.finished),
        "readers": len(ledger.active),
        "seeds": [
            {"url": url, "snapshot": snapshot} for url, (snapshot, _) in service.seeds.items()
        ],
        "ranks": (newest.ranks if newest is not None else []) or [service.url],
        "connections": service.connections,
        "sent_bytes": ledger.sent_bytes,
        "failures": ledger.outcomes["failed"],
    }


def metrics(service: Service) -> str:
    """The text format of Prometheus."""
    ledger = service.ledger
    newest = service.snapshots.newest
    last = ledger.publishes[-1] if ledger.publishes else {}
    rows: list[tuple[str, str, str, object]] = [
        ("step", "gauge", "", -1 if newest is None else newest.step),
        ("steps_held", "gauge", "", len(service.snapshots.shown)),
        ("state_bytes", "gauge", "", 0 if newest is None else newest.nbytes),
        ("sent_bytes_total", "counter", "", ledger.sent_bytes),
        ("mapped_total", "counter", "", ledger.mapped),
        ("readers", "gauge", "", len(ledger.active)),
        ("seeds", "gauge", "", len(service.seeds)),
        ("connections", "gauge", "", service.connections),
        ("publishes_total", "counter", "", ledger.published),
        ("publishes_skipped_total", "counter", "", ledger.skipped),
        ("publish_seconds", "gauge", "", last.get("stage_seconds", 0.0)),
    ]
    for outcome, count in ledger.outcomes.items():
        rows.append(("transfers_total", "counter", f'{{outcome="{outcome}"}}', count))
    turned_away = 0 if service.server is None else service.server.turned_away
    dawdlers = 0 if service.server is None else service.server.dawdlers
    beside = {"limit": turned_away, "slow": dawdlers}
    for reason, count in ledger.refused.items():
        total = count + beside.get(reason, 0)
        rows.append(("refused_total", "counter", f'{{reason="{reason}"}}', total))
    lines = []
    for name, kind, labels, value in rows:
        head = f"# TYPE torchrelay_{name} {kind}"
        if head not in lines:
            lines.append(head)
        lines.append(f"torchrelay_{name}{labels} {value}")
    return "\n".join(lines) + "\n"
