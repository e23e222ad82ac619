"""A state over slow links, to one receiver and to three: `python -m benchmarks.links`.

Four hosts, as network namespaces behind a bridge, each with a port of 1 Gbit/s each way and one
rank of a gloo group. A lap begins with a barrier and ends when the slowest rank is done. Laps of
all kinds are run in turn; the first of each is not counted: what came is compared with what was
sent, bit for bit. Needs root, for the namespaces alone.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.checkpoint._pg_transport import PGTransport

from benchmarks.harness import machine
from benchmarks.versus import DIRECT, IN_PLACE, NEW, Mode, Who, hush_torch
from benchmarks.workloads import clear, large
from tests.support.netns import GIGABIT, HostFailed, Hosts, Switch, Unavailable, sent_bytes
from torchrelay.demo.job import fingerprint
from torchrelay.relay import Relay

RESULT = Path(__file__).parent / "results" / "links.json"
STATE_BYTES = 100_000_000
TENSORS = 10
RECEIVERS = 3
SECONDS = 60.0
"""That any one lap may last."""

SIDES: list[tuple[Who, Mode]] = [
    ("torch", IN_PLACE),
    ("torchrelay", NEW),
    ("torchrelay", IN_PLACE),
    ("torchrelay", DIRECT),
]


class Kind(NamedTuple):
    who: Who
    mode: Mode
    receivers: int


@dataclass
class Measured:
    """One kind of transfer, lap by lap."""

    laps: list[float] = field(default_factory=list)
    sent: list[int] = field(default_factory=list)  # bytes that left the sender's port
    exact: bool = False

    @property
    def seconds(self) -> float:
        return median(self.laps)


@dataclass(frozen=True)
class Row:
    """One side in one mode: to one receiver, and to all."""

    who: Who
    mode: Mode
    one: Measured
    all: Measured

    @property
    def ratio(self) -> float:
        return self.all.seconds / self.one.seconds

    @property
    def exact(self) -> bool:
        return self.one.exact and self.all.exact


# On the hosts -----------------------------------------------------------------------------------

_state: dict[str, torch.Tensor] = {}
_relay: Relay | None = None


def _prepare(rank: int, nbytes: int) -> None:
    global _relay
    hush_torch()
    _state.update(large(TENSORS, nbytes))
    # The hosts are one machine, and it is the links that are measured.
    _relay = Relay(timeout=SECONDS, route="tcp")


def _lap(rank: int, kind: Kind) -> tuple[float, int]:
    """Seconds, and bytes that left this host."""
    gc.collect()  # the garbage of another lap is not this one's cost
    before = sent_bytes()
    seconds, _ = _transfer(rank, kind)
    dist.barrier()  # a sender is done when the rest of it stands in queues
    return seconds, sent_bytes() - before


def _first_lap(rank: int, kind: Kind) -> str | None:
    """A lap that is not counted; the fingerprint of what was sent or has come."""
    if rank:
        clear(_state)
    _, got = _transfer(rank, kind)
    return fingerprint(got) if rank <= kind.receivers else None


def _transfer(rank: int, kind: Kind) -> tuple[float, Any]:
    assert _relay is not None
    into = None if kind.mode == NEW else _state
    callback = None if into is None else lambda: into
    limit, cpu = timedelta(seconds=SECONDS), torch.device("cpu")
    stock = PGTransport(dist.group.WORLD, limit, cpu, callback)  # type: ignore[arg-type]
    to = list(range(1, 1 + kind.receivers))
    got: Any = _state
    dist.barrier()
    begun = time.perf_counter()
    if rank > kind.receivers:
        return 0.0, None
    if kind.who == "torch":
        if rank:
            got = stock.recv_checkpoint(0)
        else:
            stock.send_checkpoint(to, _state)
    elif rank:
        got = _relay.recv(0, into=into, atomic=kind.mode != DIRECT).state
    else:
        _relay.send(_state, to)
    return time.perf_counter() - begun, got


# In the parent ----------------------------------------------------------------------------------


def measure(
    sides: Sequence[tuple[Who, Mode]],
    nbytes: int,
    repeats: int,
    tell: Callable[[str], None] = lambda text: None,
) -> list[Row]:
    """Raises `Unavailable` where there can be no such network."""
    kinds = [Kind(*side, receivers) for side in sides for receivers in (1, RECEIVERS)]
    found = {kind: Measured() for kind in kinds}
    with Switch(1 + RECEIVERS, GIGABIT) as switch, Hosts(switch) as hosts:
        hosts.run(_prepare, nbytes, timeout=SECONDS)
        tell("first laps")
        for kind in kinds:
            seen = hosts.run(_first_lap, kind, timeout=SECONDS)
            found[kind].exact = len(set(seen[: 1 + kind.receivers])) == 1
        for repeat in range(repeats):
            tell(f"lap {repeat + 1} of {repeats}")
            for kind in kinds:
                if kind.who == "torch" and repeat % 2:
                    continue  # its laps are long, and differ little
                laps = hosts.run(_lap, kind, timeout=SECONDS)
                found[kind].laps.append(max(seconds for seconds, _ in laps))
                found[kind].sent.append(laps[0][1])
    return [Row(*side, found[Kind(*side, 1)], found[Kind(*side, RECEIVERS)]) for side in sides]


def table(rows: Sequence[Row]) -> str:
    head = ("", "mode", "1 receiver s", f"{RECEIVERS} receivers s", "ratio", "sent MB", "")
    lines = [head]
    for row in rows:
        sent = f"{median(row.all.sent) / 1e6:.0f}"
        seconds = (f"{row.one.seconds:.3f}", f"{row.all.seconds:.3f}", f"{row.ratio:.2f}x")
        lines.append((row.who, row.mode, *seconds, sent, "" if row.exact else "WRONG BITS"))
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column < 2 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def record(rows: Sequence[Row], nbytes: int, *, small: bool) -> dict[str, Any]:
    def measured(side: Measured) -> dict[str, Any]:
        return {
            "median_seconds": round(side.seconds, 4),
            "seconds": [round(lap, 4) for lap in side.laps],
            "sender_port_bytes": max(side.sent),
            "bit_exact": side.exact,
        }

    return {
        "benchmark": "links",
        "command": "python -m benchmarks.links" + (" --small" if small else ""),
        "machine": machine(),
        "conditions": {
            "backend": "gloo",
            "links": f"{1 + RECEIVERS} namespaces on a bridge, {GIGABIT} bit/s each way (tbf)",
            "congestion_control": "reno",
            "priority": "ranks before other processes of the machine",
            "torch_threads": 1,
            "digests": "on for torchrelay; torch has none",
            "lap": "from a barrier until the slowest rank is done; the first is not counted",
        },
        "state_bytes": nbytes,
        "tensors": TENSORS,
        "rows": [
            {
                "who": row.who,
                "mode": row.mode,
                "one": measured(row.one),
                str(RECEIVERS): measured(row.all),
                "ratio": round(row.ratio, 3),
            }
            for row in rows
        ],
    }


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.links", description=__doc__)
    parser.add_argument("--small", action="store_true", help="tiny sizes: a test, not a figure")
    parser.add_argument(
        "--repeats", type=int, default=5, help="laps of each kind that count; torch has half"
    )
    parser.add_argument("--out", type=Path, help="result file; a full run goes to results/")
    options = parser.parse_args()
    begun = time.monotonic()

    def tell(text: str) -> None:
        print(f"[{time.monotonic() - begun:5.1f} s] {text}", file=sys.stderr, flush=True)

    # Hosts without a name server: c10d would warn of every peer whose name it cannot find.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    nbytes = STATE_BYTES // 20 if options.small else STATE_BYTES
    try:
        rows = measure(SIDES, nbytes, 1 if options.small else options.repeats, tell)
    except (Unavailable, HostFailed) as fault:
        print(f"failed: {fault}", file=sys.stderr)
        return 1
    print(table(rows))
    out: Path | None = options.out or (None if options.small else RESULT)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(record(rows, nbytes, small=options.small), indent=2) + "\n")
    return 0 if all(row.exact for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
