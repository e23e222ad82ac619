"""What comparing replicas on a GPU costs: `python -m benchmarks.gpu.replicas [--small] [--out F]`.

Two ranks with 8 GB each, in 320 tensors and in 20,000, on one GPU.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from benchmarks import replicas
from benchmarks.harness import machine, save

RESULT = Path(__file__).parent / "results" / "replicas.json"
GB = 10**9


def main(words: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.replicas", description=__doc__)
    parser.add_argument("--small", action="store_true", help="tiny sizes: a test, not a figure")
    parser.add_argument("--out", type=Path, help="result file; by default a full run has one")
    given = parser.parse_args(words)
    nbytes, laps = (8 << 20, 1) if given.small else (8 * GB, 7)
    rows = replicas.run("cuda", 2, [(nbytes, 320), (nbytes, 20_000)], laps)
    save({"machine": machine(), "rows": rows}, given.out or (None if given.small else RESULT))


if __name__ == "__main__":
    main(sys.argv[1:])
