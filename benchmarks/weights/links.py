"""Updates of weights over links of 1 Gbit/s: `python -m benchmarks.weights.links`.

Each trainer and each worker is a host of its own (a network namespace with a shaped port): one of
both, then two trainers with FSDP shards and two tensor-parallel workers. One GB of bf16. Kinds of
updates: everything; two percent of the elements changed; nothing changed; fp32 weights published as
they are, and cast to bf16. A lap is one `update` of a step that the trainers show already; bytes
are those that enter a worker's port. Every result is compared bit for bit. All hosts share the
cores of this machine. Needs root, for the namespaces alone.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

import torchrelay as tr
from benchmarks.harness import machine, save
from benchmarks.versus import hush_torch
from tests.support.netns import GIGABIT, HostFailed, Hosts, Switch, Unavailable, received_bytes
from torchrelay.weights import Encoding

RESULT = Path(__file__).parents[1] / "results" / "weights-links.json"
ONE, TWO = 1, 2  # trainers, and as many workers
FULL, CHANGED, SAME, FLOAT32, CAST = KINDS = (
    "everything",
    "2 % changed",
    "nothing changed",
    "fp32, everything",
    "fp32 cast to bf16, everything",
)
SECONDS = 110.0
TOKEN = "a-token-for-the-benchmark"

# On the hosts -----------------------------------------------------------------------------------

_parts: dict[str, Any] = {}
_with: dict[str, Any] = {}


def _trains(rank: int) -> bool:
    return rank < dist.get_world_size() // 2


def _prepare(rank: int, count: int, side: int, dtype: torch.dtype, cast: bool) -> int:
    """Make the weights and serve them; returns the bytes that a worker needs."""
    hush_torch()
    _close(rank)
    trains, half = _trains(rank), dist.get_world_size() // 2
    if "trainers" not in _with:
        _with["trainers"] = dist.new_group(range(half))
        _with["workers"] = dist.new_group(range(half, 2 * half))
        _with["meshes"] = [
            DeviceMesh("cpu", torch.arange(half)),
            DeviceMesh("cpu", torch.arange(half, 2 * half)),
        ]
    mesh = _with["meshes"][0 if trains else 1]
    _parts.clear()
    for index in range(count):
        along = 0 if trains else index % 2
        shape = [side, side]
        shape[along] //= half
        seed = torch.Generator().manual_seed(100 * rank + index)
        local = torch.randn(shape, generator=seed).to(dtype) if trains else torch.zeros(shape)
        if not trains:
            local = local.to(torch.bfloat16 if cast else dtype)
        _parts[f"w{index}"] = DTensor.from_local(local, mesh, [Shard(along)], run_check=False)
    url: list[Any] = [None]
    if trains:
        encoding = Encoding(dtype=torch.bfloat16 if cast else None)
        _with["endpoint"] = tr.serve(
            _parts,
            step=0,
            address=f"{_address()}:0",
            access=tr.Access(token=TOKEN),
            group=_with["trainers"],
            timeout=SECONDS,
            encoding=encoding,
        )
        url = [_with["endpoint"].url]
    dist.broadcast_object_list(url, src=0)
    _with["url"] = url[0]
    return sum(t.to_local().numel() * t.element_size() for t in _parts.values())


def _address() -> str:
    from torchrelay.transports.meeting.addresses import listen_here

    with listen_here() as probe:
        host: str = probe.getsockname()[0]
    return host


def _close(rank: int) -> None:
    for name in ("endpoint", "subscription"):
        if name in _with:
            _with.pop(name).close()


def _subscribe() -> None:
    if "subscription" in _with:
        _with.pop("subscription").close()
    _with["subscription"] = tr.subscribe(
        _with["url"],
        into=_parts,
        access=tr.Access(token=TOKEN),
        group=_with["workers"],
        same_host=False,
        timeout=SECONDS,
    )


def _lap(rank: int, kind: str, step: int, fresh: bool) -> tuple[float, int, float]:
    """Seconds and bytes of this host's update; seconds of the publish at a trainer."""
    if _trains(rank):
        if kind == CHANGED:
            _change(rank, step)
        elif kind != SAME:
            for tensor in _parts.values():
                tensor.to_local().mul_(-1)
        begun = time.perf_counter()
        _with["endpoint"].publish(_parts, step=step).result(SECONDS)
        published = time.perf_counter() - begun
        dist.barrier()
        dist.barrier()
        return 0.0, 0, published
    if fresh:
        _subscribe()
    dist.barrier()
    before, begun = received_bytes(), time.perf_counter()
    _with["subscription"].update(at_least=step)
    seconds, nbytes = time.perf_counter() - begun, received_bytes() - before
    dist.barrier()
    return seconds, nbytes, 0.0


def _change(rank: int, step: int) -> None:
    """Two percent of the elements, at random."""
    seed = torch.Generator().manual_seed(1000 * step + rank)
    for tensor in _parts.values():
        bits = tensor.to_local().view(torch.int16)
        bits ^= (torch.rand(bits.shape, generator=seed) < 0.02).to(torch.int16)


def _right(rank: int) -> bool:
    """Whether the workers have what the trainers have, by digests of what each two have in
    common."""
    half = dist.get_world_size() // 2
    kinds: list[Any] = [None] * (2 * half)
    dist.all_gather_object(kinds, next(iter(_parts.values())).dtype)
    mine: dict[tuple[int, int, int], bytes] = {}
    for index, tensor in enumerate(_parts.values()):
        local = tensor.to_local().to(kinds[-1])
        for other in range(half):
            trainer, worker = (rank, other) if _trains(rank) else (other, rank - half)
            if index % 2:  # the worker has columns, the trainer rows
                cut = local.chunk(half, dim=1 if _trains(rank) else 0)[other]
            elif trainer == worker:
                cut = local
            else:
                continue
            bits = cut.contiguous().view(torch.uint8).numpy()
            mine[index, trainer, worker] = xxhash.xxh3_128_digest(bits)
    all_of_them: list[Any] = [None] * (2 * half)
    dist.all_gather_object(all_of_them, mine)
    known: dict[tuple[int, int, int], bytes] = {}
    for some in all_of_them[:half]:
        known |= some
    return all(known[key] == value for some in all_of_them[half:] for key, value in some.items())


# In the parent ----------------------------------------------------------------------------------


def measure(pairs: int, count: int, side: int, laps: int) -> list[dict[str, Any]]:
    """The rows of so many trainers and as many workers."""
    found: list[dict[str, Any]] = []
    with Switch(2 * pairs, GIGABIT) as switch, Hosts(switch) as hosts:
        scenes = [
            ((FULL, CHANGED, SAME), count, torch.bfloat16, False),
            ((FLOAT32,), count // 2, torch.float32, False),
            ((CAST,), count // 2, torch.float32, True),
        ]
        for kinds, many, dtype, cast in scenes[:1] if pairs > ONE else scenes:
            needs = hosts.run(_prepare, many, side, dtype, cast, timeout=SECONDS)[pairs]
            seen: dict[str, list[Any]] = {kind: [] for kind in kinds}
            step = 0
            for _ in range(laps):
                for kind in kinds:
                    step += 1
                    fresh = kind not in (CHANGED, SAME)
                    said = hosts.run(_lap, kind, step, fresh, timeout=SECONDS)
                    if not all(hosts.run(_right, timeout=SECONDS)):
                        raise SystemExit(f"{kind}: WRONG BITS")
                    seen[kind].append(said)
            found += [_row(pairs, kind, needs, seen[kind]) for kind in kinds]
        hosts.run(_close, timeout=SECONDS)
    return found


def _row(pairs: int, kind: str, needs: int, seen: list[Any]) -> dict[str, Any]:
    seconds = [max(one[0] for one in lap[pairs:]) for lap in seen]
    nbytes = [max(one[1] for one in lap[pairs:]) for lap in seen]
    publish = [max(one[2] for one in lap[:pairs]) for lap in seen]
    return {
        "trainers": pairs,
        "workers": pairs,
        "kind": kind,
        "needed_bytes": needs,
        "entered_bytes": round(median(nbytes)),
        "entered_per_needed": round(median(nbytes) / needs, 4),
        "seconds": [round(one, 4) for one in seconds],
        "median": round(median(seconds), 4),
        "publish_seconds": round(median(publish), 4),
    }


def _ratio(slow: dict[str, Any], fast: dict[str, Any]) -> float:
    return round(slow["median"] / fast["median"], 2)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.weights.links")
    parser.add_argument("--small", action="store_true", help="tiny sizes: a test, not a figure")
    parser.add_argument("--laps", type=int, default=3)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    count, side, laps = (4, 256, 1) if options.small else (32, 4096, options.laps)
    try:
        rows = [row for pairs in (ONE, TWO) for row in measure(pairs, count, side, laps)]
    except (Unavailable, HostFailed) as fault:
        print(f"failed: {fault}", file=sys.stderr)
        return 1
    by = {(row["trainers"], row["kind"]): row for row in rows}
    for row in rows:
        print(
            f"{row['trainers']} to {row['workers']}: {row['kind']:30s} {row['median']:8.3f} s"
            f"  {row['entered_bytes'] / 1e6:9.2f} MB enter,"
            f" {row['entered_per_needed']:.4f} of what is needed,"
            f" publish {row['publish_seconds']:.3f} s"
        )
    ratios = {
        "changed_is_faster": _ratio(by[ONE, FULL], by[ONE, CHANGED]),
        "changed_is_faster_two": _ratio(by[TWO, FULL], by[TWO, CHANGED]),
        "same_takes": round(by[ONE, SAME]["median"] / by[ONE, FULL]["median"], 4),
        "cast_is_faster": _ratio(by[ONE, FLOAT32], by[ONE, CAST]),
    }
    print(ratios)
    result = {"benchmark": "weights links", "machine": machine(), "rows": rows, **ratios}
    save(result, options.out or (None if options.small else RESULT))
    return 0


if __name__ == "__main__":
    sys.exit(main())
