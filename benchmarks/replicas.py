"""What comparing replicas costs: `python -m benchmarks.replicas [--small] [--device cuda]`.

Ranks hold the same tensors. In each lap they hash them once, on the threads that a comparison has,
and compare them by `compare_ranks`. Then they save them as replicated DTensors, whose bytes each
rank hashes before one of them is written.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate

import torchrelay as tr
from benchmarks.harness import Ranks, machine, save
from torchrelay.shares.values import value_digests

RESULT = Path(__file__).parent / "results" / "replicas.json"
MIB = 1 << 20

_made: dict[str, Any] = {}  # what a rank keeps between calls


def prepare(group: Any, device: str, nbytes: int, count: int) -> int:
    """Tensors of one size, the same on all ranks, in a mapping; returns their bytes."""
    elements = max(1, nbytes // count // 4)
    torch.manual_seed(0)
    made = [torch.randn(elements, device=device) for _ in range(count)]
    _made.update(device=device, state={"model": {f"w.{n}": one for n, one in enumerate(made)}})
    return elements * 4 * count


def _timed(group: Any, act: Callable[[], object]) -> float:
    """Seconds from the time at which all ranks begin."""
    if _made["device"] != "cpu":
        torch.cuda.synchronize()
    dist.barrier(group)
    begun = time.perf_counter()
    act()
    return time.perf_counter() - begun


def hash_once(group: Any) -> float:
    tensors = list(_made["state"]["model"].values())
    return _timed(group, lambda: value_digests(tensors))


def compare(group: Any) -> float:
    def act() -> None:
        found = tr.compare_ranks(_made["state"], group, replicated="model").raise_if_different()
        assert found.tensors == len(_made["state"]["model"])

    return _timed(group, act)


def save_replicas(group: Any, folder: str, step: int) -> float:
    mesh = init_device_mesh(_made["device"], (group.size(),))
    state = {
        name: DTensor.from_local(one, mesh, [Replicate()], run_check=False)
        for name, one in _made["state"]["model"].items()
    }
    options = tr.options.CheckpointerOptions(reuse=False)
    with tr.Checkpointer(folder, group=group, options=options) as checkpointer:
        return _timed(group, lambda: checkpointer.save(step, state))


def run(device: str, ranks: int, sizes: list[tuple[int, int]], laps: int) -> list[dict[str, Any]]:
    rows = []
    with Ranks(ranks) as crew:
        for nbytes, count in sizes:
            total = crew.run(prepare, device, nbytes, count)[0]
            seconds: dict[str, list[float]] = {"hash": [], "compare": [], "save": []}
            folder = tempfile.mkdtemp(dir="/dev/shm" if Path("/dev/shm").is_dir() else None)
            try:
                for lap in range(laps + 1):  # the first one warms up
                    found = {
                        "hash": max(crew.run(hash_once)),
                        "compare": max(crew.run(compare)),
                        "save": max(crew.run(save_replicas, folder, lap)),
                    }
                    shutil.rmtree(f"{folder}/step-{lap}", ignore_errors=True)
                    if lap:
                        for name, spent in found.items():
                            seconds[name].append(spent)
            finally:
                shutil.rmtree(folder, ignore_errors=True)
            took = {name: median(found) for name, found in seconds.items()}
            rows.append(
                {
                    "device": device,
                    "ranks": ranks,
                    "bytes": total,
                    "tensors": count,
                    **{f"{name}_s": spent for name, spent in took.items()},
                    "ratio": took["compare"] / took["hash"],
                }
            )
            print(
                f"{total / 1e6:8.0f} MB in {count:6} tensors on {device}, {ranks} ranks: "
                f"hash {took['hash'] * 1e3:.1f} ms, compare {took['compare'] * 1e3:.1f} ms, "
                f"{rows[-1]['ratio']:.2f}x; save {took['save'] * 1e3:.0f} ms",
                flush=True,
            )
    return rows


def main(words: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.replicas", description=__doc__)
    parser.add_argument("--small", action="store_true", help="tiny sizes: a test, not a figure")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--ranks", type=int, default=2, help="processes, on one device")
    parser.add_argument("--mib", type=int, default=1024, help="of each rank")
    parser.add_argument("--laps", type=int, default=5, help="that count")
    parser.add_argument("--out", type=Path, help="result file; by default a full run has one")
    given = parser.parse_args(words)
    nbytes = (4 if given.small else given.mib) * MIB
    sizes = [(nbytes, 32), (nbytes, 200)] if given.small else [(nbytes, 320), (nbytes, 20_000)]
    rows = run(given.device, given.ranks, sizes, 1 if given.small else given.laps)
    full = RESULT if given.device == "cpu" and not given.small else None
    save({"machine": machine(), "rows": rows}, given.out or full)


if __name__ == "__main__":
    main(sys.argv[1:])
