"""A model to a GPU by torchrelay and by what people use for it: the same files, the same run.

    python -m benchmarks.gpu.loaders --out benchmarks/gpu/results/loaders.json

A step that torchrelay has saved is a directory of plain .safetensors files, which the others read.
Each contender has a process of its own. Files are in /dev/shm, in the page cache of a disk, and on
that disk alone. The first load of a process stands apart from the later ones. What was loaded is
compared bit for bit with what was saved. A library that is not installed is left out, and told.
With `--rounds` the contenders take turns so often, each in a new process: what else the machine is
busy with changes from minute to minute.
"""

from __future__ import annotations

import argparse
import gc
import json
import mmap
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.harness import machine, save
from torchrelay import Checkpointer
from torchrelay.memory.thread_pool import run_on_threads
from torchrelay.stores.reading.device_fetch import DISK_PIECE, DISK_THREADS

State = dict[str, torch.Tensor]
Load = Callable[[Path, State], State]
STEP = 1
GB = 1e9


def made(count: int, nbytes: int, seed: int | None) -> State:
    """Random bits for a seed, zeros without one."""
    if seed is None:
        return {
            f"w{n}": torch.zeros(nbytes // 2, dtype=torch.bfloat16, device="cuda")
            for n in range(count)
        }
    draw = torch.Generator("cuda").manual_seed(seed)

    def bits() -> torch.Tensor:
        shape = (nbytes // 2,)
        return torch.randint(
            -(2**15), 2**15, shape, dtype=torch.int16, device="cuda", generator=draw
        )

    return {f"w{n}": bits().view(torch.bfloat16) for n in range(count)}


def same(found: State, count: int, nbytes: int, seed: int) -> bool:
    wanted = made(count, nbytes, seed)
    return found.keys() == wanted.keys() and all(
        torch.equal(found[name].view(torch.int16), wanted[name].view(torch.int16))
        for name in wanted
    )


# The contenders ---------------------------------------------------------------------------------


def ours(**options: Any) -> Load:
    kept: list[Checkpointer] = []

    def load(place: Path, into: State) -> State:
        if not kept:
            kept.append(Checkpointer(place))
        new = options.get("new", False)
        rest = {name: value for name, value in options.items() if name != "new"}
        got = kept[0].load(into=None if new else into, device="cuda" if new else None, **rest)
        if got.report.instead:
            raise SystemExit(f"not as it should be: {got.report.instead}")
        state: State = got.state
        return state

    return load


def files(place: Path) -> list[str]:
    return sorted(map(str, (place / f"step-{STEP}").glob("*.safetensors")))


def safetensors(place: Path, into: State) -> State:
    from safetensors.torch import load_file

    found: State = {}
    for file in files(place):
        found |= load_file(file, device="cuda")
    return found


def fastsafetensors(place: Path, into: State) -> State:
    from fastsafetensors import SafeTensorsFileLoader, SingleGroup

    loader = SafeTensorsFileLoader(SingleGroup(), torch.device("cuda:0"), nogds=True)
    loader.add_filenames({0: files(place)})
    buffers = loader.copy_files_to_device()
    found = {name: buffers.get_tensor(name).clone() for name in list(buffers.key_to_rank_lidx)}
    buffers.close()
    loader.close()
    return found


def instanttensor(**options: Any) -> Load:
    def load(place: Path, into: State) -> State:
        import instanttensor as it

        more = {"backend": it.BackendPolicy.BUFFERED} if options else {}
        with it.safe_open(files(place), framework="pt", device=0, **more) as opened:
            return dict(opened.tensors())

    return load


def runai(place: Path, into: State) -> State:
    from runai_model_streamer import SafetensorsStreamer

    found: State = {}
    with SafetensorsStreamer() as streamer:
        streamer.stream_files(files(place))
        for name, tensor in streamer.get_tensors():
            found[name] = tensor.to("cuda")
    return found


def disk(place: Path, into: State) -> State:
    """The files read past the page cache, and nothing done with them: what a disk gives."""
    tasks = []
    for file in files(place):
        fd = os.open(file, os.O_RDONLY | os.O_DIRECT)
        tasks += [(fd, at) for at in range(0, os.fstat(fd).st_size, DISK_PIECE)]

    def hand() -> Callable[[tuple[int, int]], None]:
        buffer = mmap.mmap(-1, DISK_PIECE)

        def read(task: tuple[int, int]) -> None:
            os.preadv(task[0], [buffer], task[1])

        return read

    run_on_threads(tasks, hand, DISK_THREADS)
    for fd in {fd for fd, _ in tasks}:
        os.close(fd)
    return into


DISK = "the disk alone"
OURS = "torchrelay, in place, atomic"
NEW = "torchrelay, new tensors"
CONTENDERS: dict[str, tuple[str, Load]] = {
    OURS: ("", ours()),
    "torchrelay, in place, atomic=False": ("", ours(atomic=False)),
    "torchrelay, in place, atomic=False, verify=False": ("", ours(atomic=False, verify=False)),
    NEW: ("", ours(new=True)),
    "instanttensor": ("instanttensor", instanttensor()),
    "instanttensor, buffered": ("instanttensor", instanttensor(buffered=True)),
    "fastsafetensors": ("fastsafetensors", fastsafetensors),
    "runai-model-streamer": ("runai-model-streamer", runai),
    "safetensors": ("safetensors", safetensors),
    DISK: ("", disk),
}

# In a contender's process -----------------------------------------------------------------------


def forget(place: Path) -> None:
    """Have the page cache forget the files."""
    for file in place.rglob("*"):
        if file.is_file():
            fd = os.open(file, os.O_RDONLY)
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


def child(name: str, place: Path, cold: bool, count: int, nbytes: int, laps: int) -> None:
    load = CONTENDERS[name][1]
    into = made(count, nbytes, None)
    torch.cuda.synchronize()
    seconds = []
    found: State = {}
    for _ in range(laps):
        found = {}
        gc.collect()
        if cold:
            forget(place)
        for tensor in into.values():
            tensor.zero_()
        torch.cuda.synchronize()
        begun = time.perf_counter()
        found = load(place, into)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begun)
    exact = None if name == DISK else same(found, count, nbytes, STEP)
    print("RESULT", json.dumps({"seconds": seconds, "exact": exact}))
    sys.stdout.flush()
    os._exit(0)  # some libraries do not end well


# In the parent ----------------------------------------------------------------------------------


def measured(row: dict[str, Any], place: Path, size: tuple[int, int], laps: int) -> dict[str, Any]:
    """A row with the laps of one more process."""
    name, where = row["name"], row["where"]
    package = CONTENDERS[name][0]
    try:
        row["version"] = version(package) if package else ""
    except PackageNotFoundError:
        return row | {"error": "not installed"}
    command = [sys.executable, "-m", "benchmarks.gpu.loaders", "--child", name, str(place)]
    command += [where, *map(str, size), str(laps)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    except subprocess.TimeoutExpired:
        return row | {"error": "not done in 120 s"}
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if not lines:
        return row | {"error": (done.stderr.strip().splitlines() or ["no result"])[-1][:300]}
    told = json.loads(lines[0].removeprefix("RESULT "))
    total = size[0] * size[1] / GB
    seconds = [*row.get("seconds", []), [round(value, 4) for value in told["seconds"]]]
    # Of a cold disk every load is a first one.
    later = [value for some in seconds for value in (some if where == "cold disk" else some[1:])]
    return row | {
        "exact": told["exact"] and row.get("exact", True),  # None where there is nothing to compare
        "first_gb_s": round(total / median(some[0] for some in seconds), 2),
        "gb_s": round(total / median(later), 2),
        "best_gb_s": round(total / min(later), 2),
        "seconds": seconds,
    }


def main() -> int:
    if "--child" in sys.argv:
        name, place, where, count, nbytes, laps = sys.argv[sys.argv.index("--child") + 1 :]
        child(name, Path(place), where == "cold disk", int(count), int(nbytes), int(laps))
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.loaders", description=__doc__)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--disk", type=Path, default=Path("/tmp"), help="a place on a disk")
    parser.add_argument("--laps", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--only", default="", help="contenders that this pattern finds")
    parser.add_argument("--where", default="", help="places whose name has this in it")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("skipped: no GPU")
        return 0
    size = (8, 1_000_000) if options.small else (320, 25_000_000)
    rows: list[dict[str, Any]] = []
    result = {
        "benchmark": "gpu loaders",
        "machine": {**machine(), "gpu": torch.cuda.get_device_name()},
        "bytes": size[0] * size[1],
        "tensors": size[0],
        "rows": rows,
    }
    for base, kinds in (
        (Path("/dev/shm"), ["/dev/shm"]),
        (options.disk, ["hot page cache", "cold disk"]),
    ):
        chosen = [where for where in kinds if options.where in where]
        if not chosen:
            continue
        with tempfile.TemporaryDirectory("-torchrelay", dir=base) as folder:
            place = Path(folder)
            with Checkpointer(place) as checkpointer:
                checkpointer.save(STEP, made(*size, STEP))
            torch.cuda.empty_cache()
            for where in chosen:
                cold = where == "cold disk"
                laps = min(2, options.laps) if cold else options.laps
                names = [name for name in CONTENDERS if re.search(options.only, name)]
                if not cold:
                    names = [name for name in names if name != DISK]
                else:
                    names = [
                        name
                        for name in names
                        if name in (OURS, NEW) or not name.startswith("torchrelay,")
                    ]
                first = len(rows)
                rows += [{"name": name, "where": where} for name in names]
                for _ in range(options.rounds):
                    for number in range(first, len(rows)):
                        if "error" not in rows[number]:
                            rows[number] = measured(rows[number], place, size, laps)
                            print(_shown(rows[number]), flush=True)
                        save(result, options.out)
    mine = [row for row in rows if row["name"].startswith("torchrelay")]
    return 0 if all(row.get("exact") for row in mine) else 1


def _shown(row: dict[str, Any]) -> str:
    told = row.get("error") or (
        f"{row['gb_s']:7.2f} GB/s, first {row['first_gb_s']:7.2f}  exact={row['exact']}"
    )
    return f"{row['where']:15} {row['name']:50} {told}"


if __name__ == "__main__":
    sys.exit(main())
