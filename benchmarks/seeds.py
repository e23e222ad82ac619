"""Eight pullers at once over links of 1 Gbit/s: `python -m benchmarks.seeds` (needs root).

A trainer and its pullers are in network namespaces behind a bridge, every port shaped. One pulls
alone, then all pull at once with `reshare=True`: how much longer that takes, and how many copies
of the state the trainer sends.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

import torchrelay as tr
from benchmarks.harness import machine, save
from tests.support.netns import Hosts, Switch, Unavailable

RESULT = Path(__file__).parent / "results" / "seeds.json"
TOKEN = "a-token-of-the-benchmark"

_made: dict[str, Any] = {}


def pattern(nbytes: int) -> torch.Tensor:
    return torch.arange(251, dtype=torch.uint8).repeat(nbytes // 251 + 1)[:nbytes]


def serve_at(rank: int, nbytes: int) -> str:
    """The first host serves a state at its own address; every host hears the URL."""
    told: list[Any] = [None]
    if rank == 0:
        state = {"w": pattern(nbytes)}
        options: dict[str, Any] = {"address": f"{Switch.address(0)}:0", "token": TOKEN}
        _made["endpoint"] = tr.serve(state, step=1, group=False, **options)
        told = [_made["endpoint"].url]
    dist.broadcast_object_list(told)
    _made["url"] = told[0]
    return str(told[0])


def pull_at(rank: int, pullers: int, reshare: bool) -> tuple[float, bool, int]:
    """Hosts 1 to `pullers` pull at once: seconds, whether it is right, and bytes that were sent."""
    sent = _made["endpoint"].status()["sent_bytes"] if rank == 0 else 0
    dist.barrier()
    begun = time.monotonic()
    right = True
    if 0 < rank <= pullers:
        got = tr.pull(_made["url"], token=TOKEN, reshare=reshare, same_host=False, timeout=110)
    spent = time.monotonic() - begun
    dist.barrier()
    if 0 < rank <= pullers:
        right = torch.equal(got.state["w"], pattern(len(got.state["w"])))
        if got.seed is not None:
            got.seed.close()
    if rank == 0:
        sent = _made["endpoint"].status()["sent_bytes"] - sent
    return spent, right, sent


def close_at(rank: int) -> None:
    if rank == 0:
        _made.pop("endpoint").close()


def run(pullers: int, nbytes: int, laps: int, tell: Callable[[str], None]) -> dict[str, Any]:
    alone, together, copies, exact = [], [], [], True
    with Switch(pullers + 1) as switch, Hosts(switch) as hosts:
        hosts.run(serve_at, nbytes)
        for number in range(laps):
            for count, reshare in ((1, False), (pullers, True)):
                found = hosts.run(pull_at, count, reshare, timeout=120)
                exact = exact and all(right for _, right, _ in found)
                slowest = max(seconds for seconds, _, _ in found[1:])
                (together if reshare else alone).append(slowest)
                if reshare:
                    copies.append(found[0][2] / nbytes)
            tell(f"lap {number + 1} of {laps}: {alone[-1]:.2f} s alone, {together[-1]:.2f} s all")
        hosts.run(close_at)
    return {
        "machine": machine(),
        "pullers": pullers,
        "bytes": nbytes,
        "alone_seconds": alone,
        "together_seconds": together,
        "ratio": median(together) / median(alone),
        "copies": median(copies),
        "exact": exact,
    }


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.seeds", description=__doc__)
    parser.add_argument("--pullers", type=int, default=8)
    parser.add_argument("--megabytes", type=int, default=400)
    parser.add_argument("--laps", type=int, default=3)
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args()
    try:
        result = run(
            options.pullers,
            options.megabytes << 20,
            options.laps,
            lambda text: print(text, file=sys.stderr),
        )
    except Unavailable as missing:
        print(f"skipped: {missing}")
        return 0
    print(
        f"{options.pullers} at once: {result['ratio']:.2f}x the time of one, the trainer sends "
        f"{result['copies']:.2f} copies"
    )
    save(result, options.out)
    return 0 if result["exact"] else 1


if __name__ == "__main__":
    sys.exit(main())
