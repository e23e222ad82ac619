"""Eight pullers at once over links of 1 Gbit/s: `python -m benchmarks.seeds` (needs root).

A trainer and its pullers are in network namespaces behind a bridge, every port shaped. One pulls
alone, then all pull at once with `reshare=True`, and again while one of them gives up midway: how
much longer that takes, and how many copies of the state the trainer sends. Seconds of a processor
stand beside: all of them share one machine, which must not be the limit.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

import torchrelay as tr
from benchmarks.harness import machine, save
from tests.support.netns import Hosts, Switch, Unavailable

RESULT = Path(__file__).parent / "results" / "seeds.json"
ACCESS = tr.Access(token="a-token-of-the-benchmark")

_made: dict[str, Any] = {}


def pattern(nbytes: int) -> torch.Tensor:
    return torch.arange(251, dtype=torch.uint8).repeat(nbytes // 251 + 1)[:nbytes]


def serve_at(rank: int, nbytes: int) -> str:
    """The first host serves a state at its own address; every host hears the URL."""
    told: list[Any] = [None]
    if rank == 0:
        state = {"w": pattern(nbytes)}
        address = f"{Switch.address(0)}:0"
        _made["endpoint"] = tr.serve(state, step=1, address=address, access=ACCESS, no_dist=True)
        told = [_made["endpoint"].url]
    dist.broadcast_object_list(told)
    _made["url"] = told[0]
    return str(told[0])


class Pulled(NamedTuple):
    """One host's part in a lap: wall and processor seconds, whether it is right, bytes sent."""

    seconds: float
    processor: float
    right: bool
    sent: int


def pull_at(rank: int, pullers: int, reshare: bool, gives_up: float | None) -> Pulled:
    """Hosts 1 to `pullers` pull at once; the last of them has but `gives_up` seconds, if any."""
    sent = _made["endpoint"].status()["sent_bytes"] if rank == 0 else 0
    dist.barrier()
    begun, processor = time.monotonic(), sum(os.times()[:2])
    right, got = True, None
    if 0 < rank <= pullers:
        short = rank == pullers and gives_up is not None
        limit = gives_up if short and gives_up is not None else 110
        options: dict[str, Any] = {"access": ACCESS, "timeout": limit}
        try:
            got = tr.pull(
                _made["url"],
                no_dist=True,
                options=tr.options.PullOptions(same_host=False, reshare=reshare),
                **options,
            )
            right = not short
        except tr.errors.TransferTimeoutError:
            right = short
    spent, processor = time.monotonic() - begun, sum(os.times()[:2]) - processor
    dist.barrier()
    if got is not None:
        right = right and torch.equal(got.state["w"], pattern(len(got.state["w"])))
        if got.seed is not None:
            got.seed.close()
    if rank == 0:
        sent = _made["endpoint"].status()["sent_bytes"] - sent
    return Pulled(spent, processor, right, sent)


def close_at(rank: int) -> None:
    if rank == 0:
        _made.pop("endpoint").close()


def run(pullers: int, nbytes: int, laps: int, tell: Callable[[str], None]) -> dict[str, Any]:
    rows: dict[str, dict[str, list[float]]] = {
        case: {"seconds": [], "processor": [], "copies": []}
        for case in ("alone", "all", "one dies")
    }
    exact = True
    with Switch(pullers + 1) as switch, Hosts(switch) as hosts:
        hosts.run(serve_at, nbytes)
        for number in range(laps):
            for case, row in rows.items():
                count, reshare = (1, False) if case == "alone" else (pullers, True)
                midway = rows["alone"]["seconds"][-1] / 2 if case == "one dies" else None
                found = hosts.run(pull_at, count, reshare, midway, timeout=120)
                exact = exact and all(one.right for one in found)
                stayed = found[1 : count + 1 - (midway is not None)]
                row["seconds"].append(max(one.seconds for one in stayed))
                row["processor"].append(sum(one.processor for one in found[1:]))
                row["copies"].append(found[0].sent / nbytes)
            shown = ", ".join(f"{case} {row['seconds'][-1]:.2f} s" for case, row in rows.items())
            tell(f"lap {number + 1} of {laps}: {shown}")
        hosts.run(close_at)
    middle = {case: {k: median(v) for k, v in row.items()} for case, row in rows.items()}
    return {
        "machine": machine(),
        "pullers": pullers,
        "bytes": nbytes,
        "laps": rows,
        "median": middle,
        "ratio": middle["all"]["seconds"] / middle["alone"]["seconds"],
        "ratio_one_dies": middle["one dies"]["seconds"] / middle["alone"]["seconds"],
        "copies": middle["all"]["copies"],
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
    print("case        seconds  processor  copies")
    for case, row in result["median"].items():
        print(f"{case:10s} {row['seconds']:8.2f} {row['processor']:10.2f} {row['copies']:7.2f}")
    print(
        f"{options.pullers} at once: {result['ratio']:.2f}x the time of one, the trainer sends "
        f"{result['copies']:.2f} copies; {result['ratio_one_dies']:.2f}x where one dies midway"
    )
    save(result, options.out)
    return 0 if result["exact"] else 1


if __name__ == "__main__":
    sys.exit(main())
