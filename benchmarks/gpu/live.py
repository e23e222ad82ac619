"""Live transfers on one GPU machine: `python -m benchmarks.gpu.live [--small] [--out F]`.

Two processes on one GPU, 8 GB of bf16 in 320 tensors. Every result is compared bit for bit, NaNs
with random payloads included. torch's own PGTransport runs beside them, on half the bytes.
"""

from __future__ import annotations

import argparse
import gc
import os
import re
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.harness import SECONDS, Ranks, machine, save
from benchmarks.versus import IN_PLACE, Course
from torchrelay import Relay

GB = 1e9
RESULTS = Path(__file__).parent / "results"

# In the ranks -----------------------------------------------------------------------------------

_state: dict[str, torch.Tensor] = {}
_relays: dict[str, Relay] = {}


def make(group: Any, count: int, nbytes: int, devices: list[str]) -> int:
    """Rank 0 has random bits, the others zeros; each on its device."""
    _state.clear()
    _relays.clear()
    gc.collect()
    device = devices[group.rank()]
    if device != "cpu":
        torch.cuda.empty_cache()
    for index in range(count):
        shape = (nbytes // 2,)
        if group.rank() == 0:
            bits = torch.randint(-(2**15), 2**15, shape, dtype=torch.int16, device=device)
            _state[f"w{index}"] = bits.view(torch.bfloat16)
        else:
            _state[f"w{index}"] = torch.zeros(shape, dtype=torch.bfloat16, device=device)
    _sync()
    return count * nbytes


def _sync() -> None:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def _print_of(state: dict[str, torch.Tensor]) -> Any:
    """Sums of words and of words times their place: the same for the same bits alone."""
    found: list[torch.Tensor] = []
    for tensor in state.values():
        words = tensor.view(torch.int64).cuda()
        place = torch.arange(1, words.numel() + 1, device=words.device)
        found += [words.sum(), (words * place).sum()]
    return torch.stack(found).tolist()


def _zero(group: Any) -> None:
    if group.rank():
        for tensor in _state.values():
            tensor.zero_()
    _sync()


def _lap(
    group: Any, name: str, options: dict[str, Any], fresh: bool, atomic: bool
) -> dict[str, Any]:
    relay = _relays.get(name)
    if relay is None:
        relay = _relays[name] = Relay(group, timeout=SECONDS, **options)
    _sync()
    group.barrier().wait()
    begun = time.perf_counter()
    if group.rank() == 0:
        report = relay.send(_state, to=1)
        state: Any = _state
    elif fresh:
        got = relay.recv(0)
        report, state = got.report, got.state
    else:
        report = relay.recv(0, into=_state, atomic=atomic).report
        state = _state
    seconds = time.perf_counter() - begun
    return {
        "seconds": seconds,
        "route": report.route,
        "instead": report.instead,
        "verified": report.verified,
        "phases": report.seconds,
        "print": _print_of(state),
    }


def _close(group: Any) -> None:
    for relay in _relays.values():
        relay.close()
    _relays.clear()


def _stock(group: Any) -> float:
    course = Course("torch", IN_PLACE, group, _state, SECONDS)
    course.lap()
    return min(course.lap().seconds for _ in range(2))


# In the parent ----------------------------------------------------------------------------------


def case(
    ranks: Ranks, name: str, nbytes: int, laps: int, *, fresh: bool = False, atomic: bool = False,
    bar: float | None = None, first_bar: float | None = None, **options: Any,
) -> dict[str, Any]:  # fmt: skip
    found = []
    for _ in range(laps):
        if not fresh:
            ranks.run(_zero)
        sender, receiver = ranks.run(_lap, name, options, fresh, atomic)
        if sender["print"] != receiver["print"]:
            raise SystemExit(f"{name}: WRONG BITS")
        found.append(receiver)
    ranks.run(_close)
    later = median(lap["seconds"] for lap in found[1:])
    row = {
        "case": name,
        "route": found[-1]["route"],
        "verified": found[-1]["verified"],
        "instead": found[-1]["instead"],
        "first_gb_s": round(nbytes / GB / found[0]["seconds"], 2),
        "gb_s": round(nbytes / GB / later, 2),
        "bar": bar,
        "first_bar": first_bar,
        "seconds": [round(lap["seconds"], 5) for lap in found],
        "phases": {k: round(v, 5) for k, v in found[-1]["phases"].items()},
        "exact": True,
    }
    bars = f"(bar {bar:g})" if bar else ""
    firsts = f"(bar {first_bar:g})" if first_bar else ""
    print(
        f"{name:44s} {row['route']:9s} first {row['first_gb_s']:8.2f} GB/s {firsts:10s} later "
        f"{row['gb_s']:8.2f} GB/s {bars:10s} verified={row['verified']} {row['seconds']}",
        flush=True,
    )
    return row


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.live", description=__doc__)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", default="", help="cases that this pattern finds")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("skipped: no GPU")
        return 0
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    count, each = (16, 1_000_000) if options.small else (320, 25_000_000)
    laps = 3 if options.small else 15
    rows: list[dict[str, Any]] = []
    speed = 0.0
    result = {
        "benchmark": "gpu live",
        "machine": {**machine(), "gpu": torch.cuda.get_device_name()},
        "bytes": count * each,
        "rows": rows,
    }

    def run(name: str, **how: Any) -> None:
        if re.search(options.only, name):
            rows.append(case(ranks, name, total, laps, **how))
            save(result, options.out)

    with Ranks(2) as ranks:
        total = ranks.run(make, count, each, ["cuda", "cuda"])[0]
        run("GPU to GPU, in place, atomic=False", bar=650, first_bar=25)
        run("GPU to GPU, in place, atomic", atomic=True)
        run("GPU to GPU, in place, atomic=False, verify=all", verify="all")
        run("GPU to GPU, in place, atomic=False, verify=False", verify=False)
        run("GPU to GPU, new tensors", fresh=True)
        run("GPU to GPU by memory, atomic=False", route="memory", bar=15)
        run("GPU to GPU by memory, atomic", atomic=True, route="memory")
        small = 200 if options.small else 20_000
        total = ranks.run(make, small, 4096, ["cuda", "cuda"])[0]
        run(f"{small} tensors of 4 KB, in place, atomic=False")
        run(f"{small} tensors of 4 KB, in place, atomic", atomic=True)
        run(f"{small} tensors of 4 KB, new tensors", fresh=True)
        total = ranks.run(make, count, each, ["cuda", "cpu"])[0]
        run("GPU to a CPU process", bar=10)
        run("GPU to a CPU process, atomic", atomic=True)
        ranks.run(make, count, each, ["cpu", "cuda"])
        run("CPU to a GPU process", bar=10)
        run("CPU to a GPU process, atomic", atomic=True)
        if not options.only:
            half = ranks.run(make, count // 2, each, ["cuda", "cuda"])[0]
            speed = half / GB / max(ranks.run(_stock))
            print(f"torch PGTransport over gloo, GPU to GPU: {speed:.2f} GB/s", flush=True)
    ends = {"torch_pgtransport_gb_s": round(speed, 3)}
    save(result | ends, options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
