"""The table on the screen and the record on disk."""

from __future__ import annotations

from typing import Any

from benchmarks.checkpoint.crew import Options
from benchmarks.checkpoint.rows import Entry, Row, record


def table(rows: list[Row]) -> str:
    """Ratios are to the first line of each block: above 1 is faster, or less."""
    lines: list[str] = []
    for row in rows:
        note = f" ({row.note})" if row.note else ""
        lines.append(f"{row.title}, {_size(row.state_bytes)}{note}")
        verdicts = row.verdicts()
        for entry in row.entries:
            said = [
                f"{v.text}: {_value(v.value, v.text)} {'pass' if v.passed else 'FAIL'}"
                for v in verdicts
                if v.ours == entry.name
            ]
            if entry.exact is False:
                said.append("WRONG BITS")
            text = f"  {entry.name:36} {_cells(row, entry)} {row.ratio(entry):6.2f}x  "
            lines.append((text + "; ".join(said)).rstrip())
        lines.append("")
    return "\n".join(lines).rstrip()


def _cells(row: Row, entry: Entry) -> str:
    if row.unit == "bytes":
        return f"{entry.value / 1e6:9,.0f} MB         "
    if row.unit == "seconds":
        return f"{entry.value * 1000:9.1f} ms         "
    return f"{entry.value:9.3f} s {row.state_bytes / entry.value / 1e9:6.2f} GB/s"


def _value(value: float, bar: str) -> str:
    return f"{value / 1e6:,.0f} MB" if bar.endswith(" MB") else f"{value:.2f}x"


def _size(nbytes: int) -> str:
    return f"{nbytes / 1e9:.2f} GB" if nbytes >= 1e8 else f"{nbytes / 1e6:.1f} MB"


def phases(rows: list[Row]) -> str:
    """Where ours spends its time."""
    lines = ["seconds by phase (medians)"]
    for row in rows:
        if row.key in ("stall", "step"):
            continue  # the same calls as those of another row
        for entry in row.entries:
            if entry.phases:
                parts = ", ".join(f"{name} {spent:.3f}" for name, spent in entry.phases.items())
                lines.append(f"{row.title}, {entry.name}: {parts}")
    return "\n".join(lines)


def result(
    rows: list[Row], facts: dict[str, Any], options: Options, busy: list[float]
) -> dict[str, Any]:
    """`busy`: the system's load before the first row and after each."""
    small = " --small" if options.small else ""
    return {
        "benchmark": "checkpoint",
        "command": f"python -m benchmarks --only checkpoint{small} --repeats {options.repeats}",
        "machine": facts,
        "conditions": {
            "digests": "on for torchrelay; the others have none",
            "fsync": "by all: dcp's sync_files, after safetensors and torch.save by the benchmark",
            "lap": "until the slowest rank is done; the first is not counted",
            "between laps": "files removed, sync",
            "processes": "stock and torchrelay in processes of their own, laps in turn",
            "load_average": busy,  # well above the cores: others were at work, look at the laps
            "torch_threads": "as many as cores for one process, one for a training step",
        },
        "rows": [record(row) for row in rows],
    }
