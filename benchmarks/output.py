"""The table on the screen and the record on disk."""

from __future__ import annotations

import os
from typing import Any

from benchmarks.group import Measured, Row

HEAD = (
    "workload",
    "mode",
    "torch s",
    "ours s",
    "speed",
    "torch MB",
    "our MB",
    "bytes",
    "torch msgs",
    "our msgs",
    "bar",
    "",
)
LEFT = {0, 1, 10, 11}


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
    if not (row.stock.exact and row.ours.exact):
        verdict = "WRONG BITS"
    return (
        row.title,
        row.mode,
        f"{row.stock.seconds:.3f}",
        f"{row.ours.seconds:.3f}",
        f"{row.speed:.2f}x",
        f"{row.stock.bytes / 1e6:.1f}",
        f"{row.ours.bytes / 1e6:.1f}",
        f"{row.fewer_bytes:.2f}x",
        str(row.stock.messages),
        str(row.ours.messages),
        str(row.bar or ""),
        verdict,
    )


def first_laps(rows: list[Row]) -> str:
    """The first lap of each workload: in new processes, into memory that was never used."""
    lines = ["first lap in new processes (one each, not a median)"]
    seen: set[str] = set()
    for row in rows:
        if row.workload not in seen:
            seen.add(row.workload)
            both = f"torch {row.stock.first:.3f} s, ours {row.ours.first:.3f} s"
            lines.append(f"{row.title}, {row.mode}: {both}")
    return "\n".join(lines)


def phases(rows: list[Row]) -> str:
    """Where the time goes, on the sender and on the last receiver."""
    lines = ["seconds by phase (medians)"]
    for row in rows:
        for side in ("sender", "receiver"):
            spent: dict[str, float] = getattr(row.ours, f"{side}_phases")
            parts = ", ".join(f"{name} {value:.3f}" for name, value in spent.items())
            lines.append(f"{row.title}, {row.mode}, {side}: {parts}")
    return "\n".join(lines)


def record(rows: list[Row], facts: dict[str, Any], *, small: bool) -> dict[str, Any]:
    return {
        "benchmark": "group",
        "command": "python -m benchmarks" + (" --small" if small else ""),
        "machine": facts,
        "conditions": {
            "backend": "gloo over loopback",
            "torch_threads": 1,
            "digests": "on for torchrelay; torch has none",
            "lap": "from a barrier until the slowest rank is done; the first is not counted",
            # 0: freed memory goes back to the system at once; -1: the process keeps it.
            "MIMALLOC_PURGE_DELAY": os.environ.get("MIMALLOC_PURGE_DELAY", "allocator's default"),
            "processes": "torch and torchrelay in processes of their own, laps in turn",
        },
        "rows": [
            {
                "workload": row.workload,
                "title": row.title,
                "mode": row.mode,
                "receivers": row.receivers,
                "tensors": row.tensors,
                "state_bytes": row.state_bytes,
                "torch": _measured(row.stock),
                "torchrelay": _measured(row.ours),
                "speed": round(row.speed, 3),
                "fewer_bytes": round(row.fewer_bytes, 3),
                "sent_per_state": round(row.ours.bytes / row.state_bytes, 4),
                "bar": str(row.bar or ""),
                "passed": row.passed,
            }
            for row in rows
        ],
    }


def _measured(side: Measured) -> dict[str, Any]:
    found: dict[str, Any] = {
        "median_seconds": round(side.seconds, 6),
        "seconds": [round(lap, 6) for lap in side.laps],
        "first_seconds": round(side.first, 6),
        "sender_bytes": side.bytes,
        "sender_messages": side.messages,
        "bit_exact": side.exact,
    }
    if side.sender_phases:
        for name in ("sender_phases", "receiver_phases"):
            found[name] = {k: round(v, 6) for k, v in getattr(side, name).items()}
    return found
