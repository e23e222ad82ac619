"""Checkpoints of a state on a GPU: is every way exact, how long does the trainer wait, how fast?

`Checkpointer` beside torch's DCP and safetensors on 8 GB of bf16 in 320 tensors. Stock tools and
ours have a process each, both on the same GPU; laps are run in turn, one at a time.

    python -m benchmarks.gpu.checkpoint --out benchmarks/gpu/results/checkpoint.json

Without a GPU, to see that it runs: `--small --device cpu`.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.checkpoint import sides
from benchmarks.checkpoint.places import remove
from benchmarks.checkpoint.sides import (
    ATOMIC,
    DCP,
    DCP2,
    DIRECT,
    LOAD_DCP,
    LOAD_SAFETENSORS,
    OURS,
    SAFETENSORS,
    STAGER,
    THREAD,
    UNVERIFIED,
)
from benchmarks.harness import RankFailed, Ranks, machine

TENSORS = 320
CALLS = 3
ON_HOST, ON_DEVICE = 'torchrelay, stage_on="host"', 'torchrelay, stage_on="device"'
DEFAULTS = "torchrelay, defaults, no prepare"
UNPREPARED = 'torchrelay, stage_on="host", no prepare'
STAGES = {DEFAULTS: "auto", ON_HOST: "host", UNPREPARED: "host", ON_DEVICE: "device"}
RESULTS = Path(__file__).parent / "results"

Found = dict[str, Any]

# In the processes -------------------------------------------------------------------------------

_state: dict[str, Any] = {}
_saved: list[torch.Tensor] = []  # a copy on the same device, to compare with


def _tensors() -> list[torch.Tensor]:
    return list(_state["model"].values())


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """NaNs are not equal to themselves; their bits are."""
    return tensor.view(torch.int16)


def _synchronize() -> None:
    if _tensors()[0].is_cuda:
        torch.cuda.synchronize()


def prepare(group: Any, device: str, nbytes: int) -> int:
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    generator = torch.Generator(device).manual_seed(7)
    numel = nbytes // 2 // TENSORS // 8 * 8

    def bits() -> torch.Tensor:
        ends = -(1 << 15), 1 << 15
        made = torch.randint(*ends, (numel,), dtype=torch.int16, device=device, generator=generator)
        return made.view(torch.bfloat16).view(-1, 8)

    _state["model"] = {f"layers.{index}.weight": bits() for index in range(TENSORS)}
    _saved[:] = [tensor.clone() for tensor in _tensors()]
    _synchronize()
    return sum(tensor.nbytes for tensor in _tensors())


def finish(group: Any) -> None:
    sides.close()


def _exact() -> bool:
    pairs = zip(_tensors(), _saved, strict=True)
    return all(torch.equal(_bits(mine), _bits(known)) for mine, known in pairs)


def _update() -> None:
    """What a trainer does next: every bit of the state changes."""
    for tensor in _tensors():
        _bits(tensor).bitwise_not_()


def save(group: Any, how: str, folder: str) -> Found:
    gc.collect()
    _synchronize()
    begun = time.perf_counter()
    phases = sides.save(how, group, _state, folder)
    return {"seconds": time.perf_counter() - begun, "phases": phases}


def load(group: Any, how: str, folder: str) -> Found:
    _update()
    gc.collect()
    _synchronize()
    begun = time.perf_counter()
    phases = sides.load(how, group, _state, folder)
    _synchronize()
    return {"seconds": time.perf_counter() - begun, "phases": phases, "exact": _exact()}


def ready(group: Any, how: str, folder: str) -> float:
    begun = time.perf_counter()
    checkpointer = sides.checkpointer(group, folder, stage_on=STAGES[how])
    if how not in (DEFAULTS, UNPREPARED):
        checkpointer.prepare(_state)
    return time.perf_counter() - begun


def stall(group: Any, how: str, folder: str, step: int) -> Found:
    """The wait of the trainer, which updates the state at once; then what was saved is loaded."""
    gc.collect()
    _synchronize()
    begun = time.perf_counter()
    saving = sides.save_async(OURS if how in STAGES else how, group, _state, folder, step)
    stalled = time.perf_counter() - begun
    _update()
    _synchronize()
    updated = time.perf_counter() - begun
    phases = saving.result()
    total = time.perf_counter() - begun
    sides.load(ATOMIC if how in STAGES else LOAD_DCP, group, _state, folder)
    _synchronize()
    exact = _exact()
    return {
        "stall": stalled,
        "stall_and_update": updated,  # with what the device still had to copy before the update
        "total": total,
        "phases": phases,
        "exact": exact,
    }


# In the parent ----------------------------------------------------------------------------------


def _rounded(found: Any) -> Any:
    if isinstance(found, float):
        return round(found, 5)
    if isinstance(found, dict):
        return {key: _rounded(value) for key, value in found.items()}
    return found


def _laps(name: str, kind: str, laps: list[Found], nbytes: int) -> Found:
    """A row; the first lap is not counted if there are more."""
    counted = laps[1:] or laps
    seconds = median(lap["seconds"] for lap in counted)
    row: Found = {
        "kind": kind,
        "name": name,
        "seconds": round(seconds, 5),
        "laps": [round(lap["seconds"], 5) for lap in laps],
        "GB/s": round(nbytes / seconds / 1e9, 2),
        "phases": _rounded(counted[-1]["phases"]),
    }
    if "exact" in laps[0]:
        row["exact"] = all(lap["exact"] for lap in laps)
    return row


def _throughput(
    stock: Ranks | None,
    ours: Ranks,
    place: Path,
    repeats: int,
    nbytes: int,
    tell: Callable[[str], None],
) -> list[Found]:
    saves: dict[str, list[Found]] = {DCP: [], DCP2: [], SAFETENSORS: [], OURS: []}
    if stock is None:
        saves = {OURS: []}
    folders = {name: place / str(index) for index, name in enumerate(saves)}
    for repeat in range(1 + repeats):
        tell(f"save, lap {repeat}")
        for name, laps in saves.items():
            remove(folders[name])
            ranks = ours if name == OURS or stock is None else stock
            laps += ranks.run(save, name, str(folders[name]))
    names = (LOAD_DCP, LOAD_SAFETENSORS, ATOMIC, DIRECT, UNVERIFIED)
    sources = {}
    if stock is None:
        names = names[2:]
    else:
        sources = {LOAD_DCP: folders[DCP], LOAD_SAFETENSORS: folders[SAFETENSORS]}
    loads: dict[str, list[Found]] = {name: [] for name in names}
    for repeat in range(1 + repeats):
        tell(f"load, lap {repeat}")
        for name, laps in loads.items():
            ranks = stock if stock is not None and name in sources else ours
            laps += ranks.run(load, name, str(sources.get(name, folders[OURS])))
    for folder in folders.values():
        remove(folder)
    return [
        *(_laps(name, "save", laps, nbytes) for name, laps in saves.items()),
        *(_laps(name, "load", laps, nbytes) for name, laps in loads.items()),
    ]


def _stalls(
    stock: Ranks | None, ours: Ranks, place: Path, nbytes: int, tell: Callable[[str], None]
) -> list[Found]:
    rows: list[Found] = []
    for name in (*([] if stock is None else [THREAD]), *STAGES):
        tell(f"stall: {name}")
        folder = place / f"async-{len(rows)}"
        ranks = ours if name in STAGES or stock is None else stock
        row: Found = {"kind": "stall", "name": name, "calls": []}
        if name in STAGES:
            row["prepare"] = ranks.run(ready, name, str(folder))[0]
        for call in range(CALLS):
            row["calls"] += ranks.run(stall, name, str(folder), call)
            remove(folder)
        row["exact"] = all(call["exact"] for call in row["calls"])
        row["calls"] = [_rounded(call) for call in row["calls"]]
        rows.append(_rounded(row))
    return rows


def _kept_stager(device: str, nbytes: int, place: Path, tell: Callable[[str], None]) -> Found:
    """DCP with a stager that is kept, which fails in some versions: in a process of its own."""
    tell(f"stall: {STAGER}")
    row: Found = {"kind": "stall", "name": STAGER, "calls": []}
    folder = place / "stager"
    try:
        with Ranks(1, parents=True) as ranks:
            ranks.run(prepare, device, nbytes)
            for call in range(CALLS):
                row["calls"] += [
                    _rounded(one) for one in ranks.run(stall, STAGER, str(folder), call)
                ]
                remove(folder)
    except RankFailed as fault:
        row["error"] = str(fault).strip().splitlines()[-1][:300]
    remove(folder)
    return row


def _show(rows: list[Found]) -> None:
    for row in rows:
        parts = ", ".join(f"{name} {spent:.3f}" for name, spent in row.get("phases", {}).items())
        if row["kind"] == "stall":
            waits = ", ".join(f"{call['stall']:.3f}" for call in row["calls"])
            then = ", ".join(f"{call['stall_and_update']:.3f}" for call in row["calls"])
            totals = ", ".join(f"{call['total']:.2f}" for call in row["calls"])
            parts = f"stall {waits} s; until updated {then} s; committed {totals} s"
            if "prepare" in row:
                parts += f"; prepare {row['prepare']:.2f} s"
        speed = f"{row['GB/s']:8.2f} GB/s" if "GB/s" in row else " " * 13
        exact = "" if "exact" not in row else f"exact={row['exact']}"
        print(f"{row['kind']:6} {row['name']:36} {speed} {exact:11} {parts}"
              f"{row.get('error', '')}")  # fmt: skip
        for call in row.get("calls", []):
            if call["phases"]:
                spent = ", ".join(f"{name} {value:.3f}" for name, value in call["phases"].items())
                print(f"{'':43} {spent}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true", help="tiny sizes: a test, not a figure")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dir", type=Path, default=Path("/dev/shm"), help="where files go")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--ours", action="store_true", help="torchrelay alone")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    cuda = torch.device(options.device).type == "cuda"
    if cuda and not torch.cuda.is_available():
        raise SystemExit("no GPU here: this benchmark needs one")
    begun = time.monotonic()

    def tell(text: str) -> None:
        print(f"[{time.monotonic() - begun:5.1f} s] {text}", file=sys.stderr, flush=True)

    wanted, repeats = (8 << 20, 0) if options.small else (8 << 30, options.repeats)
    with ExitStack() as stack:
        place = Path(
            stack.enter_context(tempfile.TemporaryDirectory("-torchrelay", dir=options.dir))
        )
        rows: list[Found] = []
        faults: list[str] = []
        try:
            with Ranks(1, parents=True) as others, Ranks(1, parents=True) as ours:
                stock = None if options.ours else others
                tell("preparing")
                nbytes = ours.run(prepare, options.device, wanted)[0]
                if stock is not None:
                    stock.run(prepare, options.device, wanted)
                rows += _stalls(stock, ours, place, nbytes, tell)
                rows += _throughput(stock, ours, place, repeats, nbytes, tell)
                ours.run(finish)
                others.run(finish)
            if not options.ours:
                rows.append(_kept_stager(options.device, wanted, place, tell))
        except RankFailed:
            faults.append(traceback.format_exc())
    _show(rows)
    facts = machine() | {"gpu": torch.cuda.get_device_name() if cuda else None}
    result = {
        "benchmark": "gpu checkpoint",
        "command": " ".join(["python -m benchmarks.gpu.checkpoint", *sys.argv[1:]]),
        "machine": facts,
        "conditions": {
            "state_bytes": nbytes if rows else None,
            "tensors": TENSORS,
            "device": options.device,
            "dir": str(options.dir),
            "digests": "on for torchrelay; the others have none",
            "stall": "from call to return; every bit is changed at once after it, what was saved "
            "is loaded afterwards and compared",
        },
        "rows": rows,
        "faults": faults,
    }
    out = options.out or (None if options.small else RESULTS / "checkpoint.json")
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(result, indent=1) + "\n")
    for fault in faults:
        print(fault, file=sys.stderr)
    # What torch gets wrong is a figure to look at; what we get wrong is a failure.
    mine = [row for row in rows if row["name"].startswith("torchrelay")]
    return 1 if faults or not all(row.get("exact", True) for row in mine) else 0


if __name__ == "__main__":
    sys.exit(main())
