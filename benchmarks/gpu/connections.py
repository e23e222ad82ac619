"""Route "tcp" with more connections: `python -m benchmarks.gpu.connections [--out F]`.

How a large state between two processes of a machine with many cores gains by more connections, host
memory to host memory, and what is left of it between GPUs. 8 GB of bf16 in 320 tensors, digests on,
every result compared bit for bit.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.live import case, make
from benchmarks.harness import Ranks, machine, save


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.connections")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("skipped: no GPU")
        return 0
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    count, each, laps = (16, 5_000_000, 2) if options.small else (320, 25_000_000, 4)
    rows: list[dict[str, Any]] = []
    with Ranks(2) as ranks:
        total = ranks.run(make, count, each, ["cpu", "cpu"])[0]
        for connections in (1, 2, 4, 8):
            how: dict[str, Any] = {"route": "tcp", "connections": connections}
            rows.append(case(ranks, f"host memory, connections={connections}", total, laps, **how))
        ranks.run(make, count, each, ["cuda", "cuda"])
        for connections in (1, 8):
            how = {"route": "tcp", "connections": connections}
            rows.append(case(ranks, f"GPU to GPU, connections={connections}", total, laps, **how))
    result = {
        "benchmark": "connections",
        "machine": {**machine(), "gpu": torch.cuda.get_device_name()},
        "bytes": total,
        "rows": rows,
    }
    save(result, options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
