"""The table on the screen and the record on disk."""

from __future__ import annotations

import os
from dataclasses import asdict
from typing import Any

from benchmarks.contenders import TORCHFT_NOTE
from benchmarks.rows import NAMES, Measured, Row

HEAD = (
    "workload",
    "mode",
    "route",
    "against",
    "their s",
    "our s",
    "speed",
    "their MB",
    "our MB",
    "bar",
    "",
)
LEFT = {0, 1, 2, 3, 9, 10}


def table(rows: list[Row]) -> str:
    lines = [HEAD, *(_cells(row) for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(HEAD))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column in LEFT else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def _cells(row: Row) -> tuple[str, ...]:
    verdict = {None: "", True: "pass", False: "FAIL"}[row.passed]
    if not row.exact:
        verdict = "WRONG BITS"
    return (
        row.title,
        row.mode,
        route(row),
        NAMES[row.case.theirs.by],
        f"{row.theirs.seconds:.3f}",
        f"{row.ours.seconds:.3f}",
        f"{row.speed:.2f}x",
        f"{row.theirs.bytes / 1e6:.1f}" if row.theirs.bytes else "",
        f"{row.ours.bytes / 1e6:.1f}",
        str(row.case.bar or ""),
        verdict,
    )


def route(row: Row) -> str:
    """The one taken, and whether it was asked for."""
    return row.ours.route + (", asked for" if row.case.ours.setup.route else "")


def phases(rows: list[Row]) -> str:
    """Where the time goes, on the sender and on the last receiver."""
    lines = ["seconds by phase (medians)"]
    told: list[Measured] = []
    for row in rows:
        if any(row.ours is ours for ours in told):
            continue  # the same laps beside someone else's
        told.append(row.ours)
        for side in ("sender", "receiver"):
            spent: dict[str, float] = getattr(row.ours, f"{side}_phases")
            parts = ", ".join(f"{name} {value:.3f}" for name, value in spent.items())
            lines.append(f"{row.title}, {row.mode}, {row.ours.route}, {side}: {parts}")
    return "\n".join(lines)


def record(
    rows: list[Row], facts: dict[str, Any], skipped: dict[str, str], command: str
) -> dict[str, Any]:
    return {
        "benchmark": "live",
        "command": command,
        "machine": facts,
        "conditions": {
            "network": "loopback: gloo for torch, TCP connections for torchrelay's route tcp",
            "torch_threads": 1,
            "others_busy": "share of the cores that other processes had just before",
            "digests": "on for torchrelay where bytes cross a wire or with verify=True; the "
            "others have none",
            "cpu_seconds": "of the processes of all ranks in a lap, user and system",
            "lap": "from a barrier until the slowest rank is done; the first is not counted",
            "plan": "made anew in each lap",
            "processes": "each contender in processes of its own, laps in turn",
            "memory": {
                "in use": "written in place",
                "warm": "new tensors. Theirs are in memory that the system has just had back and "
                "hands out anew; ours in memory that the Relay has kept from the lap before, and "
                "with pool=0 in the same kind as theirs",
                "cold": "new tensors in the first lap of new processes after an idle pause; "
                "'evidence' has how fast memory was handed out, in GB/s",
            },
            # 0: freed memory goes back to the system at once; -1: the process keeps it.
            "MIMALLOC_PURGE_DELAY": os.environ.get("MIMALLOC_PURGE_DELAY", "allocator's default"),
            "torchft": TORCHFT_NOTE,
        },
        "skipped": skipped,
        "rows": [_row(row) for row in rows],
    }


def _row(row: Row) -> dict[str, Any]:
    setup, bar = row.case.ours.setup, row.case.bar
    fewer = row.fewer_bytes
    found = {
        "workload": row.workload,
        "title": row.title,
        "mode": row.mode,
        "memory": row.memory,
        "against": NAMES[row.case.theirs.by],
        "route": row.ours.route,
        "asked": asdict(setup),
        "others_busy": row.busy,
        "receivers": row.receivers,
        "tensors": row.tensors,
        "state_bytes": row.state_bytes,
        "theirs": _measured(row.theirs),
        "torchrelay": _measured(row.ours),
        "speed": round(row.speed, 3),
        "fewer_bytes": None if fewer is None else round(fewer, 3),
        "sent_per_state": round(row.ours.bytes / row.state_bytes, 4),
        "bar": str(bar or ""),
        "speed_bar": bar and bar.speed,
        "passed": row.passed,
    }
    return found | ({"evidence": row.evidence} if row.evidence else {})


def _measured(side: Measured) -> dict[str, Any]:
    found: dict[str, Any] = {
        "median_seconds": round(side.seconds, 6),
        "seconds": [round(lap, 6) for lap in side.laps],
        "first_seconds": round(side.first, 6),
        "cpu_seconds": round(side.cpu_seconds, 6),
        "sender_bytes": side.bytes,
        "sender_messages": side.messages,
        "bit_exact": side.exact,
    }
    if side.sender_phases:
        for name in ("sender_phases", "receiver_phases"):
            found[name] = {k: round(v, 6) for k, v in getattr(side, name).items()}
    return found
