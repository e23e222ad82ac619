"""A live replica heals one, and three at once, over 1 Gbit/s: `python -m benchmarks.healing`.

Four hosts, as network namespaces behind a bridge, every port shaped. Rank 0 has the state and
shares it; one replacement recovers it, then three at once, which take it from each other too.
Beside it torch's PGTransport. A lap begins with a barrier and ends when the slowest rank has the
state; the first of each kind is not counted. What came is compared bit for bit. Needs root.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.checkpoint._pg_transport import PGTransport

import torchrelay as tr
from benchmarks.harness import machine
from benchmarks.versus import hush_torch
from benchmarks.workloads import clear, large
from tests.support.netns import GIGABIT, HostFailed, Hosts, Switch, Unavailable, sent_bytes
from torchrelay.demo.job import fingerprint

RESULT = Path(__file__).parent / "results" / "healing.json"
STATE_BYTES = 400_000_000
TENSORS = 10
REPLICAS = 3
SECONDS = 100.0

Way = Literal["PGTransport", "recover"]
WAYS: tuple[Way, ...] = ("PGTransport", "recover")

_state: dict[str, torch.Tensor] = {}
_held: dict[str, Any] = {}


def _prepare(rank: int, nbytes: int) -> None:
    hush_torch()
    _state.update(large(TENSORS, nbytes))
    _held["relay"] = relay = tr.Relay(timeout=SECONDS)
    for count in (1, REPLICAS):
        _held[f"group {count}"] = dist.new_group(list(range(1, 1 + count)))
    if rank == 0:
        _held["shared"] = relay.share(_state, step=1)
    dist.barrier()


def _heal(rank: int, way: Way, replicas: int) -> tuple[float, int, str | None]:
    """Seconds, bytes that left this host, and a digest of what is here."""
    if rank:
        clear(_state)
    before = sent_bytes()
    dist.barrier()
    begun = time.perf_counter()
    if rank <= replicas:
        (_by_torch if way == "PGTransport" else _by_recover)(rank, replicas)
    seconds = time.perf_counter() - begun
    dist.barrier()  # what stands in queues is on its way
    sent = sent_bytes() - before
    return seconds, sent, fingerprint(_state) if rank <= replicas else None


def _by_torch(rank: int, replicas: int) -> None:
    limit, cpu = timedelta(seconds=SECONDS), torch.device("cpu")
    stock = PGTransport(dist.group.WORLD, limit, cpu, lambda: _state)  # type: ignore[arg-type]
    if rank:
        stock.recv_checkpoint(0)
    else:
        stock.send_checkpoint(list(range(1, 1 + replicas)), _state)


def _by_recover(rank: int, replicas: int) -> None:
    if rank:
        tr.recover(
            into=_state,
            sources=[_held["relay"].peer(0)],
            group=_held[f"group {replicas}"],
            timeout=SECONDS,
            options=tr.options.RecoverOptions(reshare=replicas > 1),
        )


def _close(rank: int) -> None:
    if rank == 0:
        _held.pop("shared").close()


def measure(nbytes: int, laps: int, tell: Callable[[str], None]) -> dict[str, Any]:
    """Raises `Unavailable` where there can be no such network."""
    kinds = [(way, count) for way in WAYS for count in (1, REPLICAS)]
    seconds: dict[tuple[Way, int], list[float]] = {kind: [] for kind in kinds}
    sent: dict[tuple[Way, int], list[int]] = {kind: [] for kind in kinds}
    exact = True
    with Switch(1 + REPLICAS, GIGABIT) as switch, Hosts(switch) as hosts:
        hosts.run(_prepare, nbytes, timeout=SECONDS)
        for lap in range(laps + 1):
            for kind in kinds:
                found = hosts.run(_heal, *kind, timeout=SECONDS)
                digests = {digest for _, _, digest in found if digest is not None}
                exact = exact and len(digests) == 1
                if lap:
                    seconds[kind].append(max(spent for spent, _, digest in found if digest))
                    sent[kind].append(found[0][1])
            tell(f"lap {lap} of {laps}")
        hosts.run(_close, timeout=SECONDS)
    return {
        "benchmark": "healing",
        "command": "python -m benchmarks.healing",
        "machine": machine(),
        "links": f"{1 + REPLICAS} namespaces on a bridge, {GIGABIT} bit/s each way",
        "state_bytes": nbytes,
        "exact": exact,
        "rows": [
            {
                "way": way,
                "one_seconds": seconds[way, 1],
                "three_seconds": seconds[way, REPLICAS],
                "ratio": median(seconds[way, REPLICAS]) / median(seconds[way, 1]),
                "copies_sent": median(sent[way, REPLICAS]) / nbytes,
            }
            for way in WAYS
        ],
    }


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.healing", description=__doc__)
    parser.add_argument("--small", action="store_true", help="tiny sizes: a test, not a figure")
    parser.add_argument("--laps", type=int, default=5)
    parser.add_argument("--out", type=Path, help="result file; a full run goes to results/")
    options = parser.parse_args()
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # hosts without a name server
    nbytes, laps = (STATE_BYTES // 40, 1) if options.small else (STATE_BYTES, options.laps)
    try:
        found = measure(nbytes, laps, lambda text: print(text, file=sys.stderr, flush=True))
    except (Unavailable, HostFailed) as fault:
        print(f"failed: {fault}", file=sys.stderr)
        return 1
    for row in found["rows"]:
        one, three = median(row["one_seconds"]), median(row["three_seconds"])
        print(
            f"{row['way']:12} one {one:.3f} s, {REPLICAS} at once {three:.3f} s: "
            f"{row['ratio']:.2f}x, the source sends {row['copies_sent']:.2f} copies"
        )
    out = options.out or (None if options.small else RESULT)
    if out is not None:
        out.write_text(json.dumps(found, indent=2) + "\n")
    return 0 if found["exact"] else 1


if __name__ == "__main__":
    sys.exit(main())
