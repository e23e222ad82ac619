"""Every workload beside torch's own transport, in one command: `python -m benchmarks`.

Checkpoints beside torch's own: `python -m benchmarks --only checkpoint`.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

from benchmarks.group import Row, compare
from benchmarks.harness import RankFailed, machine
from benchmarks.output import first_laps, phases, record, table
from benchmarks.plot import plot
from benchmarks.workloads import suite

RESULTS = Path(__file__).parent / "results"
CHECKPOINT = "checkpoint"


def main() -> int:
    names = [workload.name for workload in suite(small=True)]
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--small", action="store_true", help="tiny sizes: a test, not a figure")
    parser.add_argument("--only", choices=[*names, CHECKPOINT], help="one workload")
    parser.add_argument(
        "--out", type=Path, help="result file; by default a whole, full run goes to results/"
    )
    for_checkpoint = parser.add_argument_group(f"with --only {CHECKPOINT}")
    for_checkpoint.add_argument("--repeats", type=int, help="laps of each kind that count")
    for_checkpoint.add_argument("--dir", type=Path, help="a folder on the disk to save to")
    options = parser.parse_args()

    begun = time.monotonic()

    def tell(text: str) -> None:
        print(f"[{time.monotonic() - begun:5.1f} s] {text}", file=sys.stderr, flush=True)

    if options.only == CHECKPOINT:
        from benchmarks.checkpoint.command import command  # needs safetensors

        try:
            exact = command(
                small=options.small, repeats=options.repeats, folder=options.dir,
                out=options.out, results=RESULTS, tell=tell,
            )  # fmt: skip
        except RankFailed as fault:
            print(f"failed: {fault}", file=sys.stderr)
            return 1
        return 0 if exact else 1
    chosen = [w for w in suite(options.small) if options.only in (None, w.name)]
    rows: list[Row] = []
    try:
        for found in compare(chosen, options.small, tell):
            rows += found
    except RankFailed as fault:
        print(f"failed: {fault}", file=sys.stderr)
        return 1
    print(table(rows), first_laps(rows), phases(rows), sep="\n\n")
    facts = machine()
    out, picture = options.out, None
    if out is not None:
        picture = out.with_suffix(".png")
    elif not options.small and options.only is None:
        out = RESULTS / f"group-{facts['cores']}core.json"
        picture = RESULTS / "group.png"
    if out is not None and picture is not None:
        result = record(rows, facts, small=options.small)
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(result, indent=2) + "\n")
        if not plot(result, picture):
            tell("no plot: matplotlib is not installed")
    # A missed bar is a figure to look at; wrong bits are a failure.
    return 0 if all(row.stock.exact and row.ours.exact for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
