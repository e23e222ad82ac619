"""Route "tcp" over loopback next to torch's PGTransport: `python -m benchmarks.tcp`.

One GiB of host memory in 16 tensors, in place, digests on, as it would go between two machines. All
contenders take turns in one run; the figure is the ratio of the medians.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint._pg_transport import PGTransport

from benchmarks.harness import SECONDS, Ranks, machine, save
from torchrelay import Relay
from torchrelay.transports.routes.tcp import usual_connections
from torchrelay.transports.streams import sockets

RESULT = Path(__file__).parent / "results" / "tcp.json"
TORCH, ATOMIC, DIRECT, UNVERIFIED = CONTENDERS = (
    "torch PGTransport",
    "tcp, atomic=True",
    "tcp, atomic=False",
    "tcp, atomic=False, verify=False",
)

_state: dict[str, torch.Tensor] = {}
_relays: dict[str, Any] = {}


def make(group: Any, nbytes: int, connections: int, chunk: int | None) -> None:
    _state.clear()
    for index in range(16):
        fill = torch.rand if group.rank() == 0 else torch.zeros
        _state[f"w{index}"] = fill(nbytes // 64)
    limit = timedelta(seconds=SECONDS)
    _relays[TORCH] = PGTransport(group, limit, torch.device("cpu"), state_dict=lambda: _state)
    for name in CONTENDERS[1:]:
        verify = name != UNVERIFIED
        _relays[name] = Relay(
            group,
            timeout=SECONDS,
            route="tcp",
            connections=connections,
            verify=verify,
            chunk_bytes=chunk,
        )


def once(group: Any, name: str, piece: int) -> float:
    """Seconds of one transfer."""
    sockets.PIECE = piece
    relay = _relays[name]
    if group.rank():
        for tensor in _state.values():
            tensor.zero_()
    dist.barrier(group)
    begun = time.perf_counter()
    if group.rank() == 0:
        relay.send_checkpoint([1], _state) if name == TORCH else relay.send(_state, 1)
    elif name == TORCH:
        relay.recv_checkpoint(0)
    else:
        relay.recv(0, into=_state, atomic=name == ATOMIC)
    spent = time.perf_counter() - begun
    dist.barrier(group)
    if group.rank() and not all(float(tensor[-1]) for tensor in _state.values()):
        raise RuntimeError(f"{name}: not all of the state came")
    return spent


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tcp", description=__doc__)
    parser.add_argument("--small", action="store_true", help="tiny sizes: a test, not a figure")
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--connections", type=int, default=usual_connections())
    parser.add_argument("--piece", type=int, nargs="*", default=[sockets.PIECE])
    parser.add_argument("--chunk", type=int, default=None, help="bytes of a chunk")
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    nbytes = 1 << 22 if options.small else 1 << 30
    cases = [(name, piece) for piece in options.piece for name in CONTENDERS]
    seconds: dict[tuple[str, int], list[float]] = {case: [] for case in cases}
    with Ranks(2) as ranks:
        ranks.run(make, nbytes, options.connections, options.chunk)
        for run in range(options.runs + 1):
            for case in cases:
                spent = max(ranks.run(once, *case))
                if run:  # the first of each makes connections and buffers
                    seconds[case].append(spent)
    stock = median([one for case in cases if case[0] == TORCH for one in seconds[case]])
    rows = []
    for (name, piece), found in seconds.items():
        middle = median(found)
        rows.append(
            {
                "name": name,
                "piece_bytes": piece,
                "seconds": found,
                "gb_s": round(nbytes / middle / 1e9, 2),
                "ratio": round(stock / middle, 3),
            }
        )
        speed, ratio = nbytes / middle / 1e9, stock / middle
        print(f"{name:34s} {piece:9d} {middle:8.4f} s {speed:7.2f} GB/s {ratio:6.2f}x")
    save(
        {
            "benchmark": "tcp",
            "machine": machine(),
            "bytes": nbytes,
            "connections": options.connections,
            "rows": rows,
        },
        options.out or (None if options.small else RESULT),
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
