"""Saves and loads next to what plain threads of `write` and `read` reach on the same bytes.

    python -m benchmarks.checkpoint.limits [--gigabytes 1.6] [--repeats 7] [--dir D] [--out F]

The limit has one thread for each core, calls of 8 MiB, no digests, no headers and no record. For
loads there is a second one, whose threads hash what they read by 512 KiB, and a third, which then
reads once more, as a load must that verifies everything before it writes anything.
Iterations of the limit and of torchrelay alternate; memory is warm and files are in the page cache.
Both sync what they write to a disk.
"""

from __future__ import annotations

import argparse
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import xxhash

import torchrelay as tr
from benchmarks.checkpoint.output import table
from benchmarks.checkpoint.places import places, remove, warm
from benchmarks.checkpoint.rows import Bar, Entry, Row, record
from benchmarks.harness import machine, save

RESULT = Path(__file__).parents[1] / "results" / "checkpoint-limits.json"
PIECE, HASHED_PIECE = 8 << 20, 512 << 10
TENSORS, SMALL_TENSORS = 300, 20
HASHED, TWICE = "plain threads that hash", "plain threads that hash, then read again"
LIMIT, OURS, ATOMIC, ONCE = "plain threads", "torchrelay", "torchrelay, atomic", "torchrelay, once"
CORES = len(os.sched_getaffinity(0))


def state_of(nbytes: int, tensors: int) -> dict[str, Any]:
    """A model and two moments of an optimizer, in tensors of one size."""
    each = max(1, nbytes // tensors // 4)
    torch.manual_seed(0)
    parts = {
        "model": tensors // 3,
        "exp_avg": tensors // 3,
        "exp_avg_sq": tensors - 2 * (tensors // 3),
    }
    return {
        name: {f"layer-{n:03}": torch.rand(each) for n in range(count)}
        for name, count in parts.items()
    }


def memory_of(state: dict[str, Any]) -> list[memoryview]:
    return [
        memoryview(tensor.numpy()).cast("B") for part in state.values() for tensor in part.values()
    ]


def in_threads(act: Callable[[int], None]) -> float:
    """Seconds until a thread for each core has done its part."""
    threads = [threading.Thread(target=act, args=(number,)) for number in range(CORES)]
    begun = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return time.perf_counter() - begun


def pieces(views: Sequence[memoryview], nbytes: int = PIECE) -> Iterator[memoryview]:
    for view in views:
        for at in range(0, len(view), nbytes):
            yield view[at : at + nbytes]


def write_plain(views: Sequence[memoryview], folder: Path, sync: bool) -> float:
    """One file for each thread."""
    folder.mkdir()

    def write(number: int) -> None:
        with open(folder / str(number), "wb", buffering=0) as file:
            for piece in pieces(views[number::CORES]):
                file.write(piece)
            if sync:
                os.fsync(file.fileno())

    return in_threads(write)


def read_plain(views: Sequence[memoryview], folder: Path) -> float:
    """The same files into the same memory."""

    def read(number: int) -> None:
        with open(folder / str(number), "rb", buffering=0) as file:
            for piece in pieces(views[number::CORES]):
                assert file.readinto(piece) == len(piece)

    return in_threads(read)


def read_hashed(views: Sequence[memoryview], folder: Path) -> float:
    def read(number: int) -> None:
        hashed = xxhash.xxh3_128()
        with open(folder / str(number), "rb", buffering=0) as file:
            for piece in pieces(views[number::CORES], HASHED_PIECE):
                assert file.readinto(piece) == len(piece)
                hashed.update(piece)

    return in_threads(read)


def timed(act: Callable[[], Any]) -> float:
    begun = time.perf_counter()
    act()
    return time.perf_counter() - begun


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return all(
        torch.equal(tensor, other[part][name])
        for part, tensors in one.items()
        for name, tensor in tensors.items()
    )


def measure(
    folder: Path, title: str, nbytes: int, tensors: int, repeats: int, bar: float
) -> list[Row]:
    """A row of saves and one of loads. `bar`: what a save has to reach of the limit."""
    state, into = state_of(nbytes, tensors), state_of(nbytes, tensors)
    views, targets = memory_of(state), memory_of(into)
    size = sum(map(len, views))
    saves: dict[str, list[float]] = {LIMIT: [], OURS: []}
    loads: dict[str, list[float]] = {LIMIT: [], HASHED: [], TWICE: [], ATOMIC: [], ONCE: []}
    sync = not str(folder).startswith("/dev/shm")
    exact = True
    with tr.Checkpointer(folder / "steps", no_dist=True) as checkpointer:
        for step in range(repeats + 1):  # the first one is not counted
            saves[LIMIT].append(write_plain(views, folder / "plain", sync))
            remove(folder / "plain")
            saves[OURS].append(timed(lambda step=step: checkpointer.save(step, state)))
            if step < repeats:
                checkpointer.delete(step)
                os.sync()
        write_plain(views, folder / "plain", sync)
        warm(folder)
        for _ in range(repeats + 1):
            loads[LIMIT].append(read_plain(targets, folder / "plain"))
            loads[HASHED].append(read_hashed(targets, folder / "plain"))
            again = read_plain(targets, folder / "plain")
            loads[TWICE].append(loads[HASHED][-1] + again)
            for name, atomic in ((ATOMIC, True), (ONCE, False)):
                for target in targets:
                    target[:8] = bytes(8)
                act = lambda atomic=atomic: checkpointer.load(into, atomic=atomic)  # noqa: E731
                loads[name].append(timed(act))
                exact = exact and same(state, into)
    note = f"{CORES} threads at the limit"
    title_of_loads = f"load from {title}, verified, in place"
    return [
        Row(
            f"save {title}",
            f"save to {title}",
            "GB/s",
            size,
            [Entry(name, laps[1:], laps[0]) for name, laps in saves.items()],
            [Bar(OURS, LIMIT, least=bar)],
            note,
        ),
        Row(
            f"load {title}",
            title_of_loads,
            "GB/s",
            size,
            [Entry(name, laps[1:], laps[0], exact) for name, laps in loads.items()],
            [Bar(ATOMIC, LIMIT, least=0.5), Bar(ONCE, LIMIT, least=0.75)],
            note,
        ),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--small", action="store_true", help="a few megabytes: a test")
    parser.add_argument("--gigabytes", type=float, default=1.6)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--dir", type=Path, help="a folder on the disk to be measured")
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    given = parser.parse_args()
    nbytes, tensors = int(given.gigabytes * 1e9), TENSORS
    if given.small:
        nbytes, tensors = 8_000_000, SMALL_TENSORS
    rows: list[Row] = []
    with places(given.dir) as found:
        for folder, title, bar in ((found.memory, "/dev/shm", 0.75), (found.disk, "disk", 0.9)):
            rows += measure(folder, title, nbytes, tensors, given.repeats, bar)
    print(table(rows))
    words = " --small" if given.small else f" --gigabytes {given.gigabytes:g}"
    save(
        {
            "benchmark": "limits",
            "command": f"python -m benchmarks.checkpoint.limits{words} --repeats {given.repeats}",
            "machine": machine(),
            "load_average": os.getloadavg()[0],
            "rows": [record(row) for row in rows],
        },
        given.out or (None if given.small else RESULT),
    )
    return 0 if all(row.exact for row in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
