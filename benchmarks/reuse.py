"""Steps that cost what changed: `python -m benchmarks.reuse`.

A large model that is not trained and a small one that is, with its AdamW, saved by two ranks, as
plain tensors of both and with FSDP2. Two checkpointers save each step in turns; one of
them reuses nothing. And all of a model trained, where nothing can be reused.
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
from uuid import uuid4

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import torchrelay as tr
from benchmarks.harness import Ranks, machine, save
from benchmarks.plot import plot_reuse

RESULT = Path(__file__).parent / "results" / "reuse.json"
RANKS = 2
WIDTH = 1024  # of a layer of the model: 4.2 MB
WAYS = {"reuse": True, "all": False}
CASES = [
    ("plain", "trains 1 %", "save"),
    ("FSDP2", "trains 1 %", "save"),
    ("plain", "trains 1 %", "save_async"),
    ("FSDP2", "trains 1 %", "save_async"),
    ("plain", "trains all", "save"),
    ("FSDP2", "trains all", "save"),
]

_made: dict[str, Any] = {}


def prepare(group: Any, how: str, trains: str, layers: int, roots: dict[str, str]) -> int:
    """The model of a case, and a checkpointer for each way; returns the bytes that are trained,
    with their optimizer."""
    torch.manual_seed(0)
    base = torch.nn.Sequential(*[torch.nn.Linear(WIDTH, WIDTH) for _ in range(layers)])
    adapter = torch.nn.Linear(WIDTH, max(1, layers * WIDTH // 100))
    model = torch.nn.ModuleDict({"base": base, "adapter": adapter})
    if trains != "trains all":
        base.requires_grad_(False)
    if how == "FSDP2":
        mesh = init_device_mesh("cpu", (RANKS,))
        for layer in [*base, adapter]:
            fully_shard(layer, mesh=mesh)
    trained = [one for one in model.parameters() if one.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3, foreach=True)
    _made.update(model=model, optimizer=optimizer, trained=trained)
    _made["held"] = {
        way: tr.Checkpointer(
            roots[way], keep=2, group=group, options=tr.options.CheckpointerOptions(reuse=reuses)
        )
        for way, reuses in WAYS.items()
    }
    return sum(3 * 4 * one.numel() for one in trained)


def lap(group: Any, step: int, call: str) -> dict[str, tuple[float, float, int]]:
    """Train a step and save it each way. Of each, the seconds until it was committed, those that
    the caller waited, and the bytes that this rank wrote."""
    for one in _made["trained"]:
        one.grad = torch.full_like(one, 1e-3)
    _made["optimizer"].step()
    state = {"model": _made["model"], "optimizer": _made["optimizer"]}
    found = {}
    for way in list(WAYS)[:: 1 if step % 2 else -1]:
        held = _made["held"][way]
        dist.barrier(group)
        begun = time.monotonic()
        pending = getattr(held, call)(step, state)
        waited = time.monotonic() - begun
        report = pending if call == "save" else pending.result()
        dist.barrier(group)
        found[way] = (time.monotonic() - begun, waited, report.bytes_written)
    return found


def finish(group: Any, step: int) -> bool:
    """Whether the step that was saved last is exact, each way."""
    expected = {key: _local(one) for key, one in _made["model"].state_dict().items()}
    exact = True
    for held in _made["held"].values():
        held.verify(step)
        state = {key: torch.zeros_like(one) for key, one in _made["model"].state_dict().items()}
        held.load(state, step=step, key="model")
        exact = exact and all(torch.equal(_local(state[key]), expected[key]) for key in expected)
        held.close()
    _made.clear()
    return exact


def _local(tensor: Any) -> torch.Tensor:
    local: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local


def run(small: bool, saves: int, places: list[str], tell: Callable[[str], None]) -> dict[str, Any]:
    layers = 2 if small else 120
    rows = []
    with Ranks(RANKS) as ranks:
        for place in places:
            for case in CASES[:2] + CASES[-1:] if small else CASES:
                tell(f"{place}: {', '.join(case)}")
                rows.append(_row(ranks, place, case, layers, saves))
    return {"machine": machine(), "saves": saves, "ranks": RANKS, "rows": rows}


def _row(
    ranks: Ranks, place: str, case: tuple[str, str, str], layers: int, saves: int
) -> dict[str, Any]:
    how, trains, call = case
    root = f"{place}/reuse-{uuid4()}"
    roots = {way: f"{root}/{way}" for way in WAYS}
    trained = ranks.run(prepare, how, trains, layers, roots)[0]
    try:
        laps = [ranks.run(lap, step, call) for step in range(1, saves + 1)]
        exact = all(ranks.run(finish, saves))
    finally:
        if "://" not in place:
            shutil.rmtree(root, ignore_errors=True)
    written = {way: [sum(one[way][2] for one in each) for each in laps] for way in WAYS}
    seconds = {way: [each[0][way][0] for each in laps] for way in WAYS}
    waited = {way: [max(one[way][1] for one in each) for each in laps] for way in WAYS}
    middle = {way: median(seconds[way][1:]) for way in WAYS}
    return {
        "case": f"{how}, {trains}, {call}",
        "place": place,
        "trained_bytes": trained,
        "written": written,
        "seconds": seconds,
        "waited": waited,
        "median_seconds": middle,
        "median_waited": {way: median(waited[way][1:]) for way in WAYS},
        "times_as_fast": middle["all"] / middle["reuse"],
        "written_of_trained": max(written["reuse"][1:]) / trained,
        "exact": exact,
    }


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.reuse", description=__doc__)
    parser.add_argument("--small", action="store_true", help="tiny sizes: a test, not a figure")
    parser.add_argument("--saves", type=int, default=20, help="of each case")
    parser.add_argument(
        "--dir", nargs="*", help="directories or buckets; by default /tmp, /dev/shm"
    )
    parser.add_argument("--out", type=Path, help="result file; by default a full run has one")
    options = parser.parse_args()
    places = options.dir or [tempfile.gettempdir(), *(["/dev/shm"] if not options.small else [])]
    saves = 3 if options.small else options.saves
    result = run(options.small, saves, places, lambda text: print(text, file=sys.stderr))
    print(f"{saves} saves of {RANKS} ranks, each with reuse and without, in turns")
    for row in result["rows"]:
        middle, waited = row["median_seconds"], row["median_waited"]
        print(
            f"{row['place']:10s} {row['case']:28s} {middle['reuse']:7.3f} s,"
            f" all {middle['all']:7.3f} s: {row['times_as_fast']:5.2f}x;"
            f" waited {waited['reuse']:.3f}, {waited['all']:.3f} s;"
            f" written {row['written_of_trained']:.3f} of what is trained"
        )
    out = options.out or (None if options.small else RESULT)
    save(result, out)
    if out is not None:
        plot_reuse(result, out.with_suffix(".png"))
    return 0 if all(row["exact"] for row in result["rows"]) else 1


if __name__ == "__main__":
    sys.exit(main())
