"""From four ranks with shards to two with other shards: `python -m benchmarks.resharding`.

Live, by `Relay.recv` from several ranks, beside a step that torch's DCP saves on the four and loads
on the two, in memory: what one does where nothing cuts live shards anew. Laps in turn.
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
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import DeviceMesh, DTensor, Shard

import torchrelay as tr
from benchmarks.harness import Ranks, machine, save

RESULT = Path(__file__).parent / "results" / "resharding.json"
CASES = ["live, memory", "live, tcp", "dcp in memory"]

_made: dict[str, Any] = {}


def prepare(group: Any, senders: int, tensors: int, rows: int, columns: int) -> int:
    """Each rank's shards, ones at the senders; returns the bytes of the whole state."""
    ranks = list(range(dist.get_world_size()))
    sources, others = _made["sources"], _made["others"] = ranks[:senders], ranks[senders:]
    meshes = [DeviceMesh("cpu", some) for some in (sources, others)]
    sends = dist.get_rank() in sources
    mesh, dim, fill = (meshes[0], 0, 1.0) if sends else (meshes[1], 1, 0.0)
    shape = [rows, columns]
    shape[dim] //= mesh.size()
    _made["state"] = {
        f"w{n}": DTensor.from_local(torch.full(shape, fill), mesh, [Shard(dim)])
        for n in range(tensors)
    }
    _made["relay"] = {route: tr.Relay(group, route=route) for route in ("memory", "tcp")}
    _made["group"] = mesh.get_group()
    return tensors * rows * columns * 4


def lap(group: Any, case: str, folder: str) -> tuple[float, bool]:
    """Seconds until all have it, and whether this rank has the right values."""
    state = _made["state"]
    sends = dist.get_rank() in _made["sources"]
    if not sends:
        for tensor in state.values():
            tensor.to_local().zero_()
    dist.barrier(group)
    begun = time.monotonic()
    if case == "dcp in memory":
        _by_dcp(group, state, folder, sends)
    else:
        relay = _made["relay"][case.rsplit(maxsplit=1)[-1]]
        if sends:
            relay.send(state, _made["others"])
        else:
            relay.recv(_made["sources"], into=state)
    dist.barrier(group)
    spent = time.monotonic() - begun
    return spent, all(bool((tensor.to_local() == 1).all()) for tensor in state.values())


def _by_dcp(group: Any, state: Any, folder: str, sends: bool) -> None:
    mine = _made["group"]
    if sends:
        dcp.save(state, checkpoint_id=folder, process_group=mine)
    dist.barrier(group)
    if not sends:
        dcp.load(state, checkpoint_id=folder, process_group=mine)


def run(small: bool, laps: int, tell: Callable[[str], None]) -> dict[str, Any]:
    senders, receivers = (2, 1) if small else (4, 2)
    size = (4, 64, 64) if small else (32, 4096, 1024)
    seconds: dict[str, list[float]] = {case: [] for case in CASES}
    exact = dict.fromkeys(CASES, True)
    with Ranks(senders + receivers) as ranks, tempfile.TemporaryDirectory(dir=_memory()) as root:
        nbytes = ranks.run(prepare, senders, *size)[0]
        for number in range(laps + 1):
            for case in CASES:
                folder = f"{root}/step"
                found = ranks.run(lap, case, folder)
                shutil.rmtree(folder, ignore_errors=True)
                exact[case] = exact[case] and all(right for _, right in found)
                if number:
                    seconds[case].append(found[0][0])
            tell(f"lap {number} of {laps}")
    rows = [
        {
            "case": case,
            "seconds": median(seconds[case]),
            "against_dcp": median(seconds[CASES[-1]]) / median(seconds[case]),
            "exact": exact[case],
            "laps": seconds[case],
        }
        for case in CASES
    ]
    return {"machine": machine(), "bytes": nbytes, "from": senders, "to": receivers, "rows": rows}


def _memory() -> str | None:
    return "/dev/shm" if Path("/dev/shm").is_dir() else None


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.resharding", description=__doc__)
    parser.add_argument("--small", action="store_true", help="tiny sizes: a test, not a figure")
    parser.add_argument("--laps", type=int, default=5, help="that count, of each")
    parser.add_argument("--out", type=Path, help="result file; by default a full run has one")
    options = parser.parse_args()
    result = run(options.small, options.laps, lambda text: print(text, file=sys.stderr))
    ranks = f"{result['from']} ranks to {result['to']}"
    print(f"{result['bytes'] / 1e6:.0f} MB from {ranks}, rows to columns")
    for row in result["rows"]:
        print(f"{row['case']:15s} {row['seconds']:8.3f} s {row['against_dcp']:6.2f}x of dcp")
    save(result, options.out or (None if options.small else RESULT))
    return 0 if all(row["exact"] for row in result["rows"]) else 1


if __name__ == "__main__":
    sys.exit(main())
