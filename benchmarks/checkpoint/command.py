"""`python -m benchmarks --only checkpoint`."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

from benchmarks.checkpoint.crew import Options
from benchmarks.checkpoint.output import phases, result, table
from benchmarks.checkpoint.places import places
from benchmarks.checkpoint.rows import Row
from benchmarks.checkpoint.run import run
from benchmarks.harness import machine
from benchmarks.plot import plot_checkpoint

REPEATS = 3


def command(
    *, small: bool, repeats: int | None, folder: Path | None, out: Path | None, results: Path,
    tell: Callable[[str], None],
) -> bool:  # fmt: skip
    """Measure, show and record; whether all bits were right."""
    rows: list[Row] = []
    facts = machine()
    busy = [round(os.getloadavg()[0], 1)]
    picture = out.with_suffix(".png") if out is not None else results / "checkpoint.png"
    if out is None and not small:
        out = results / "checkpoint.json"
    with places(folder) as found:
        options = Options(small, repeats or (1 if small else REPEATS), found, tell)
        for row in run(options):
            rows.append(row)
            busy.append(round(os.getloadavg()[0], 1))
            tell(table([row]))
    print(table(rows), phases(rows), sep="\n\n")
    if out is not None:
        record = result(rows, facts, options, busy)
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(record, indent=2) + "\n")
        if not plot_checkpoint(record, picture):
            tell("no plot: matplotlib is not installed")
    # A missed bar is a figure to look at; wrong bits are a failure.
    return all(row.exact for row in rows)
