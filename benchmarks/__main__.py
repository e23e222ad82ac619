"""Every workload beside torch's own transport, in one command: `python -m benchmarks`.

Checkpoints beside torch's own: `python -m benchmarks --only checkpoint`.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from contextlib import ExitStack
from pathlib import Path

from benchmarks.cold import Cold, cold_row
from benchmarks.contenders import torchft_missing
from benchmarks.harness import RankFailed, Ranks, free_memory, machine
from benchmarks.live import compare
from benchmarks.output import phases, record, table
from benchmarks.plot import plot
from benchmarks.rows import NAMES, By, Row
from benchmarks.workloads import suite

RESULTS = Path(__file__).parent / "results"
CHECKPOINT = "checkpoint"
PAUSE = 45.0


def main() -> int:
    names = [workload.name for workload in suite(small=True)]
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--small", action="store_true", help="tiny sizes: a test, not a figure")
    parser.add_argument("--only", choices=[*names, CHECKPOINT], help="one workload")
    parser.add_argument(
        "--out", type=Path, help="result file; by default a whole, full run goes to results/"
    )
    parser.add_argument(
        "--cold",
        type=float,
        metavar="SECONDS",
        help=f"idle time before new tensors are made in cold memory; {PAUSE:g} by default, "
        "negative: leave that out, as a small run does",
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
    skipped: dict[str, str] = {}
    skip: set[By] = set()
    if (missing := torchft_missing()) is not None:
        skip, skipped = {"torchft"}, {NAMES["torchft"]: missing}
    pause = options.cold if options.cold is not None else -1.0 if options.small else PAUSE
    rows: list[Row] = []
    try:
        with ExitStack() as shared:
            # Not for its figures: one crew for all saves the start of more processes.
            one = shared.enter_context(Ranks(4)) if options.small else None
            for workload in chosen:
                if workload.memory > free_memory():
                    skipped[workload.title] = f"needs {workload.memory / 1e9:.0f} GB to be free"
                    continue
                for found in compare(workload, options.small, skip, one, tell):
                    rows += found
        for workload in chosen:
            if workload.cold_samples and pause >= 0 and workload.title not in skipped:
                rows.append(cold_row(workload, options.small, Cold(pause, not options.small), tell))
    except RankFailed as fault:
        print(f"failed: {fault}", file=sys.stderr)
        return 1
    rows.sort(key=lambda row: [w.name for w in chosen].index(row.workload))
    print(table(rows), phases(rows), sep="\n\n")
    if pause < 0:
        skipped["cold memory"] = "not asked for"
    for what, why in skipped.items():
        print(f"\nleft out: {what}: {why}")
    facts = machine()
    out, picture = options.out, None
    if out is not None:
        picture = out.with_suffix(".png")
    elif not options.small and options.only is None:
        out = RESULTS / "live.json"
        picture = RESULTS / "live.png"
    if rows and out is not None and picture is not None:
        command = " ".join(["python -m benchmarks", *_arguments(options)])
        result = record(rows, facts, skipped, command)
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(result, indent=2) + "\n")
        if not plot(result, picture):
            tell("no plot: matplotlib is not installed")
    # A missed bar is a figure to look at; wrong bits are a failure.
    return 0 if all(row.exact for row in rows) else 1


def _arguments(options: argparse.Namespace) -> list[str]:
    """Those that change what is measured."""
    given = ["--small"] if options.small else []
    given += ["--only", options.only] if options.only else []
    return given + (["--cold", f"{options.cold:g}"] if options.cold is not None else [])


if __name__ == "__main__":
    sys.exit(main())
