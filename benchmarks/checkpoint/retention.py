"""Whether retained steps slow a save: `python -m benchmarks.checkpoint.retention`.

Two checkpointers save the same small state in turn, one with 5 retained steps and one with 500.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch

import torchrelay as tr
from benchmarks.harness import machine, save

RESULT = Path(__file__).parents[1] / "results" / "checkpoint-retention.json"
TARGET = 1.2  # times the seconds with few steps, at most


def measure(few: int, many: int, laps: int) -> dict[str, Any]:
    state = {"model": {"w": torch.randn(256, 256)}, "step": 1}
    spent: dict[int, list[float]] = {few: [], many: []}
    with tempfile.TemporaryDirectory() as root:
        kept = {
            count: tr.Checkpointer(f"{root}/{count}", no_dist=True, keep=count) for count in spent
        }
        for count, checkpointer in kept.items():
            for step in range(count + 1):
                checkpointer.save(step, state)
        for lap in range(laps):
            for count, checkpointer in kept.items():
                begun = time.perf_counter()
                checkpointer.save(count + 1 + lap, state)
                spent[count].append(time.perf_counter() - begun)
        for checkpointer in kept.values():
            checkpointer.close()
    rows = [
        {"retained": count, "median_s": median(each), "min_s": min(each), "max_s": max(each)}
        for count, each in spent.items()
    ]
    return {"laps": laps, "rows": rows, "ratio": rows[1]["median_s"] / rows[0]["median_s"]}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.checkpoint.retention")
    parser.add_argument("--small", action="store_true", help="few steps: a test, not a figure")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    found = measure(2, 6, 3) if options.small else measure(5, 500, 40)
    for row in found["rows"]:
        print(
            f"{row['retained']:>4} retained: {1e3 * row['median_s']:.2f} ms "
            f"({1e3 * row['min_s']:.2f} to {1e3 * row['max_s']:.2f})"
        )
    print(f"{found['ratio']:.2f}x, target at most {TARGET}x")
    result = {"benchmark": "checkpoint retention", "machine": machine(), **found}
    save(result, options.out or (None if options.small else RESULT))
    return 0


if __name__ == "__main__":
    sys.exit(main())
