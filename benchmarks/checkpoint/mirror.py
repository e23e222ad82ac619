"""Whether saves wait for a mirror: `python -m benchmarks.checkpoint.mirror`.

The same job saves asynchronously and computes between the saves: without a mirror, with one in a
directory, and with one in a bucket whose service never answers. The jobs take turns, in blocks of a
few saves, so that no copy of one runs while another is measured.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import torch

import torchrelay as tr
from benchmarks.harness import machine, save

RESULT = Path(__file__).parents[1] / "results" / "checkpoint-mirror.json"
NAMES = ("none", "directory", "bucket that does not answer")
FIGURES = ("stall", "commit", "compute")
FIRST = 3  # saves of a block that do not count: processes start


@contextmanager
def silent_service() -> Iterator[None]:
    """Within: the endpoint of S3 takes connections, and sends nothing."""
    with socket.create_server(("127.0.0.1", 0), backlog=512) as listener:
        os.environ |= {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{listener.getsockname()[1]}",
            "AWS_ACCESS_KEY_ID": "loopback",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_REGION": "us-east-1",
        }
        yield


def compute(seconds: float) -> None:
    """Work of one core, as long as that takes alone."""
    a = torch.randn(256, 256)
    for _ in range(int(seconds * 1000)):
        a = torch.tanh(a @ a)


def block(root: str, mirror: str | None, state: Any, saves: int) -> list[dict[str, float]]:
    """Seconds of each save but the first ones, in a new directory."""
    rows = []
    with tempfile.TemporaryDirectory(dir=root) as folder:
        named = None if mirror is None else f"{folder}/mirror" if mirror == "here" else mirror
        checkpointer = tr.Checkpointer(
            f"{folder}/root", keep=2, mirror=named, no_dist=True, timeout=60
        )
        checkpointer.prepare(state)
        for step in range(saves + FIRST):
            begun = time.perf_counter()
            pending = checkpointer.save_async(step, state)
            stall = time.perf_counter() - begun
            busy = time.perf_counter()
            compute(0.2)
            computed = time.perf_counter() - busy
            pending.result()
            commit = pending.result().total_seconds
            rows.append({"stall": stall, "commit": commit, "compute": computed})
        # The job is over: what it would wait for at its end is no part of this.
        checkpointer._stored.close(0.01)
        checkpointer.close()
    return rows[FIRST:]


def measure(mebibytes: int, saves: int, rounds: int, tell: Callable[[str], None]) -> dict[str, Any]:
    state = {"model": {str(i): torch.randn(1 << 18) for i in range(mebibytes)}, "step": 1}
    found: dict[str, list[dict[str, float]]] = {name: [] for name in NAMES}
    mirrors = dict(zip(NAMES, (None, "here", "s3://bucket/mirror"), strict=True))
    with tempfile.TemporaryDirectory() as root, silent_service():
        for number in range(rounds):
            for name in NAMES if number % 2 else reversed(NAMES):
                found[name] += block(root, mirrors[name], state, saves)
                tell(f"round {number + 1} of {rounds}: {name}")
    rows = [
        {
            "mirror": name,
            **{f"{one}_s": median(row[one] for row in each) for one in FIGURES},
            **{f"{one}_max_s": max(row[one] for row in each) for one in FIGURES},
        }
        for name, each in found.items()
    ]
    return {"mebibytes": mebibytes, "saves": saves * rounds, "rows": rows}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.checkpoint.mirror")
    parser.add_argument("--small", action="store_true", help="few saves: a test, not a figure")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()

    def tell(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    found = measure(4, 2, 1, tell) if options.small else measure(32, 10, 6, tell)
    base = found["rows"][0]
    for row in found["rows"]:
        shown = ", ".join(
            f"{one} {1e3 * row[f'{one}_s']:.1f} ms ({row[f'{one}_s'] / base[f'{one}_s']:.2f}x)"
            for one in FIGURES
        )
        print(f"mirror {row['mirror']}: {shown}")
    result = {"benchmark": "checkpoint mirror", "machine": machine(), **found}
    save(result, options.out or (None if options.small else RESULT))
    return 0


if __name__ == "__main__":
    sys.exit(main())
