"""Weights of four FSDP ranks to two tensor-parallel samplers on one host.

    python -m benchmarks.weights.reshard

One GB of bf16. The contenders take turns: a published step that both samplers fetch their parts of,
whole tensors gathered and sent by torch's `PGTransport`, whole tensors gathered and broadcast. A
lap ends when the slower sampler has its weights; its result is compared bit for bit.
"""

from __future__ import annotations

import argparse
import sys
import time
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint._pg_transport import PGTransport
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

import torchrelay as tr
from benchmarks.harness import SECONDS, Ranks, machine, save

RESULT = Path(__file__).parents[1] / "results" / "weights-reshard.json"
TRAINERS, SAMPLERS = 4, 2
SUBSCRIBE, STOCK, BROADCAST = CONTENDERS = (
    "torchrelay subscribe",
    "gather, torch PGTransport",
    "gather, broadcast",
)
BARS = {STOCK: 3.0, BROADCAST: 2.0}

# In the ranks -----------------------------------------------------------------------------------

_parts: dict[str, Any] = {}  # this rank's DTensors
_whole: dict[str, torch.Tensor] = {}
_with: dict[str, Any] = {}


def make(group: Any, count: int, side: int) -> int:
    rank = group.rank()
    trains = rank < TRAINERS
    trainers, samplers = dist.new_group(range(TRAINERS)), dist.new_group(range(TRAINERS, 6))
    meshes = DeviceMesh("cpu", torch.arange(TRAINERS)), DeviceMesh("cpu", torch.arange(4, 6))
    for index in range(count):
        # Every second one is cut along its rows by a sampler, across them by a trainer.
        shard = Shard(0) if trains else Shard(index % 2)
        rows, columns = side, side
        if trains:
            rows //= TRAINERS
        elif index % 2:
            columns //= SAMPLERS
        else:
            rows //= SAMPLERS
        seed = torch.Generator().manual_seed(100 * rank + index)
        local = torch.randn(rows, columns, generator=seed).bfloat16() if trains else None
        if local is None:
            local = torch.zeros(rows, columns, dtype=torch.bfloat16)
        mesh = meshes[0] if trains else meshes[1]
        _parts[f"w{index}"] = DTensor.from_local(local, mesh, [shard], run_check=False)
        _whole[f"w{index}"] = torch.zeros(side, side, dtype=torch.bfloat16)
    url: list[Any] = [None]
    if trains:
        _with["endpoint"] = tr.serve(_parts, step=0, group=trainers, timeout=SECONDS)
        url = [_with["endpoint"].url]
    dist.broadcast_object_list(url, src=0)
    if not trains:
        _with["subscription"] = tr.subscribe(url[0], into=_parts, group=samplers, timeout=SECONDS)
    limit = timedelta(seconds=SECONDS)
    _with["stock"] = PGTransport(group, limit, torch.device("cpu"), state_dict=lambda: _whole)
    return count * side * side * 2


def lap(group: Any, name: str, step: int) -> float:
    """Seconds until this rank is done."""
    rank = group.rank()
    trains = rank < TRAINERS
    if trains:
        for tensor in _parts.values():
            tensor.to_local().add_(1)
    group.barrier().wait()
    begun = time.perf_counter()
    if name == SUBSCRIBE:
        if trains:
            _with["endpoint"].publish(_parts, step=step).result(SECONDS)
        else:
            _with["subscription"].update(at_least=step)
        return time.perf_counter() - begun
    if trains:
        full = {key: tensor.full_tensor() for key, tensor in _parts.items()}
        if name == STOCK:
            if rank == 0:
                _with["stock"].send_checkpoint([4, 5], full)
            return time.perf_counter() - begun
    elif name == STOCK:
        full = _with["stock"].recv_checkpoint(0)
    else:
        full = _whole
    if name == BROADCAST:
        for tensor in full.values():
            dist.broadcast(tensor, src=0, group=group)
    if not trains:
        _cut(full, rank - TRAINERS)
    return time.perf_counter() - begun


def _cut(full: dict[str, torch.Tensor], mine: int) -> None:
    for index, (key, tensor) in enumerate(_parts.items()):
        part = full[key].chunk(SAMPLERS, dim=index % 2)[mine]
        tensor.to_local().copy_(part)


def right(group: Any) -> bool:
    """Whether the samplers have what the trainers have; the same answer on all ranks."""
    good = True
    for index, (key, tensor) in enumerate(_parts.items()):
        whole = tensor.full_tensor() if group.rank() < TRAINERS else _whole[key]
        dist.broadcast(whole, src=0, group=group)
        if group.rank() >= TRAINERS:
            part = whole.chunk(SAMPLERS, dim=index % 2)[group.rank() - TRAINERS]
            good = good and torch.equal(part, tensor.to_local())
            tensor.to_local().zero_()
    answers: list[Any] = [None] * group.size()
    dist.all_gather_object(answers, good, group=group)
    return all(answers)


# In the parent ----------------------------------------------------------------------------------


def measure(count: int, side: int, laps: int) -> dict[str, Any]:
    seconds: dict[str, list[float]] = {name: [] for name in CONTENDERS}
    with Ranks(TRAINERS + SAMPLERS, parents=True) as ranks:
        nbytes = ranks.run(make, count, side)[0]
        step = 0
        for number in range(laps + 1):
            for name in CONTENDERS:
                step += 1
                took = max(ranks.run(lap, name, step)[TRAINERS:])
                if not all(ranks.run(right)):
                    raise SystemExit(f"{name}: WRONG BITS")
                if number:  # the first warms memory
                    seconds[name].append(took)
    ours = median(seconds[SUBSCRIBE])
    rows = [
        {
            "contender": name,
            "seconds": [round(one, 4) for one in laps_of],
            "median": round(median(laps_of), 4),
            "min": round(min(laps_of), 4),
            "max": round(max(laps_of), 4),
            "ours_is_faster": round(median(laps_of) / ours, 2),
            "bar": BARS.get(name),
        }
        for name, laps_of in seconds.items()
    ]
    return {"bytes": nbytes, "rows": rows, "exact": True}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.weights.reshard")
    parser.add_argument("--small", action="store_true", help="tiny sizes: a test, not a figure")
    parser.add_argument("--laps", type=int, default=5)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    count, side, laps = (4, 64, 1) if options.small else (32, 4096, options.laps)
    found = measure(count, side, laps)
    for row in found["rows"]:
        bar = f"(at least {row['bar']:g}x)" if row["bar"] else ""
        print(f"{row['contender']:28s} {row['median']:8.3f} s  {row['ours_is_faster']:5.2f}x {bar}")
    result = {"benchmark": "weights reshard", "machine": machine(), **found}
    save(result, options.out or (None if options.small else RESULT))
    return 0


if __name__ == "__main__":
    sys.exit(main())
