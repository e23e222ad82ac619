"""States on a GPU over a host backend: is every route exact, and how fast?

Two processes share one GPU and a gloo group. Each case sends a state, checks it bit for bit, and
is timed beside torch's `PGTransport` on the same state.

    python -m benchmarks.gpu.staging --out benchmarks/gpu/results/staging.json
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.checkpoint._pg_transport import PGTransport as Stock

import torchrelay as tr

TIMEOUT = 120
TENSORS = 40


def state(device: str, seed: int, megabytes: int) -> dict[str, Any]:
    """Large bf16 tensors, and the odd ones: views, strides, ties, small leaves, scalars."""
    generator = torch.Generator().manual_seed(seed)
    numel = megabytes * (1 << 20) // 2 // TENSORS

    def make(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(torch.bfloat16).to(device)

    big = {
        f"layer.{i}": torch.full((numel,), seed + i, dtype=torch.bfloat16, device=device)
        for i in range(TENSORS)
    }
    base = make(64, 64)
    odd = {
        "view": base[8:16, ::2],
        "transposed": base.t(),
        "channels_last": make(2, 3, 8, 8).to(memory_format=torch.channels_last),
        "scalar": torch.tensor(float(seed), device=device),
        "tied": [base, base],
        "parameter": torch.nn.Parameter(make(5)),
        "conj": torch.complex(make(4).float(), make(4).float()).conj(),
        "small": [make(7) for _ in range(200)],
        "step": seed,
    }
    return {"big": big, "odd": odd}


def flat(tree: Any) -> list[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        return [tree]
    if isinstance(tree, dict):
        return [leaf for value in tree.values() for leaf in flat(value)]
    return [leaf for value in tree for leaf in flat(value)] if isinstance(tree, list) else []


def same(a: Any, b: Any, device: str) -> bool:
    mine, theirs = flat(a), flat(b)
    return len(mine) == len(theirs) and all(
        x.dtype == y.dtype
        and x.device.type == device
        and torch.equal(x.detach().cpu().resolve_conj(), y.detach().cpu().resolve_conj())
        for x, y in zip(mine, theirs, strict=True)
    )


Case = tuple[str, str, str, dict[str, Any]]
CASES: list[Case] = [
    # name, sender's device, receiver's device, options of recv
    ("GPU to GPU, new", "cuda", "cuda", {}),
    ("GPU to GPU, in place", "cuda", "cuda", {"into": True}),
    ("GPU to GPU, in place, atomic=False", "cuda", "cuda", {"into": True, "atomic": False}),
    ("GPU to CPU, in place", "cuda", "cpu", {"into": True}),
    ("CPU to GPU, in place", "cpu", "cuda", {"into": True}),
    ("GPU to CPU, new", "cuda", "cpu", {}),
    ("CPU to GPU, new", "cpu", "cuda", {}),
]


def run_case(rank: int, case: Case, megabytes: int, repeats: int) -> dict[str, Any]:
    name, here, there, options = case
    relay = tr.Relay(timeout=TIMEOUT)
    seconds: list[float] = []
    exact = True
    for repeat in range(repeats + 1):
        sent = state(here, repeat, megabytes)
        mine = state(there, 100 + repeat, megabytes) if rank == 1 and "into" in options else None
        torch.cuda.synchronize()
        dist.barrier()
        begun = time.perf_counter()
        if rank == 0:
            relay.send(sent, 1, step=repeat)
        else:
            got = relay.recv(
                0,
                into=mine,
                atomic=options.get("atomic", True),
                device=None if mine is not None else there,
                step=repeat,
            )
            torch.cuda.synchronize()
        dist.barrier()
        if repeat:
            seconds.append(time.perf_counter() - begun)
        if rank == 1:
            exact = exact and same(got.state, sent, there) and got.state["odd"]["step"] == repeat
            if mine is not None:
                exact = exact and got.state is mine
            tied = got.state["odd"]["tied"]
            exact = exact and tied[0].data_ptr() == tied[1].data_ptr()
    relay.close()
    nbytes = sum(t.nbytes for t in flat(sent["big"]))
    return {"case": name, "exact": exact, "seconds": statistics.median(seconds), "bytes": nbytes}


def run_stock(rank: int, device: str, megabytes: int, repeats: int) -> dict[str, Any]:
    """torch's class on the large tensors alone: it does not take all the others.

    Over gloo it sends host memory only, and skips destinations on a GPU: those are copied after.
    """
    seconds: list[float] = []
    cpu = torch.device("cpu")
    for repeat in range(repeats + 1):
        sent = state(device, repeat, megabytes)["big"]
        mine = state(device, 100, megabytes)["big"]
        into = (lambda mine=mine: mine) if device == "cpu" else None
        transport = Stock(dist.group.WORLD, timedelta(seconds=TIMEOUT), cpu, into)
        torch.cuda.synchronize()
        dist.barrier()
        begun = time.perf_counter()
        if rank == 0:
            transport.send_checkpoint([1], sent)
        else:
            got: Any = transport.recv_checkpoint(0)
            if device != "cpu":
                for name, tensor in got.items():
                    mine[name].copy_(tensor)
            torch.cuda.synchronize()
        dist.barrier()
        if repeat:
            seconds.append(time.perf_counter() - begun)
    nbytes = sum(t.nbytes for t in sent.values())
    name = f"torch PGTransport, {device} to {device}, in place"
    return {"case": name, "exact": True, "seconds": statistics.median(seconds), "bytes": nbytes}


def worker(rank: int, folder: str, megabytes: int, repeats: int) -> None:
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=TIMEOUT)
    )
    torch.cuda.set_device(0)
    rows: list[dict[str, Any]] = []
    jobs: list[tuple[str, Callable[[], dict[str, Any]]]] = [
        (f"stock {device}", lambda device=device: run_stock(rank, device, megabytes, repeats))
        for device in ("cuda", "cpu")
    ]
    jobs += [
        (case[0], lambda case=case: run_case(rank, case, megabytes, repeats)) for case in CASES
    ]
    for name, job in jobs:
        try:
            rows.append(job())
        except Exception as fault:
            traceback.print_exc()
            rows.append({"case": name, "exact": False, "error": str(fault)[:300]})
            break
    if rank == 1:
        Path(folder, "rows.json").write_text(json.dumps(rows))
    sys.stdout.flush()
    os._exit(0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=2048)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("no GPU here: this benchmark needs one")
    with tempfile.TemporaryDirectory() as folder:
        context = mp.get_context("spawn")
        arguments = (folder, options.megabytes, options.repeats)
        ranks = [context.Process(target=worker, args=(rank, *arguments)) for rank in (0, 1)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join(400)
            process.kill()
        rows = json.loads(Path(folder, "rows.json").read_text())
    for row in rows:
        if "seconds" in row:
            row["GB/s"] = round(row["bytes"] / row["seconds"] / 1e9, 2)
        print(f"{row['case']:45} exact={row['exact']!s:6} {row.get('GB/s', row.get('error'))}")
    machine = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
    result = {"machine": machine, "cores": os.cpu_count(), "rows": rows}
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    if not all(row["exact"] for row in rows):
        raise SystemExit("not exact")


if __name__ == "__main__":
    main()
