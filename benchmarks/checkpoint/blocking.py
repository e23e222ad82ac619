"""Saves and loads that the caller waits for: in one process, and over two ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.checkpoint import tasks
from benchmarks.checkpoint.crew import Crew, Options, all_exact, finish, phases, prepare
from benchmarks.checkpoint.places import can_drop, cool, remove, warm
from benchmarks.checkpoint.rows import Bar, Entry, Row
from benchmarks.checkpoint.sides import (
    ATOMIC,
    DCP,
    DCP2,
    DIRECT,
    LOAD_DCP,
    LOAD_SAFETENSORS,
    MANAGER,
    OURS,
    SAFETENSORS,
    TORCH,
    UNVERIFIED,
    installed,
)

Turn = tuple[str, Callable[[int], list[Any]]]  # a name, and its lap on all ranks by number


def one_process(options: Options, stock: Crew, ours: Crew) -> Iterator[Row]:
    options.tell("one process: preparing")
    nbytes = prepare(options, stock, ours)
    memory, disk = options.places
    tools = installed((DCP, DCP2, SAFETENSORS, TORCH, MANAGER, OURS))
    bars = Bar(OURS, DCP, least=2), Bar(OURS, SAFETENSORS, least=1)
    yield _saves(options, "save-memory", "save to /dev/shm", memory, tools, stock, ours, nbytes,
                 options.bars(*bars), keep=installed((MANAGER, OURS)))  # fmt: skip
    if MANAGER in tools:  # it cannot write to ext4, so its loads are compared here
        files = {MANAGER: memory / str(tools.index(MANAGER))}
        own = memory / str(tools.index(OURS))
        entries = _loads(options, "load from /dev/shm", (MANAGER, ATOMIC, DIRECT), files, own,
                         stock, ours, warm)  # fmt: skip
        yield Row("load-memory", "load in place from /dev/shm", "GB/s", nbytes, entries)
    for folder in memory.iterdir():
        remove(folder)
    tools = (DCP, DCP2, SAFETENSORS, OURS)
    bars = Bar(OURS, DCP, least=1.6), Bar(OURS, SAFETENSORS, least=1)
    yield _saves(options, "save-disk", "save to disk, fsync", disk, tools, stock, ours, nbytes,
                 options.bars(*bars), keep=(DCP, SAFETENSORS, OURS))  # fmt: skip
    files = {LOAD_DCP: disk / "0", LOAD_SAFETENSORS: disk / "2"}
    hot = (LOAD_DCP, ATOMIC, DIRECT, LOAD_SAFETENSORS, UNVERIFIED)
    entries = _loads(options, "load, page cache warm", hot, files, disk / "3", stock, ours, warm)
    verified, unverified = entries[:3], entries[3:]
    yield Row("load-warm", "load in place, verified, page cache warm", "GB/s", nbytes, verified,
              options.bars(*(Bar(name, LOAD_DCP, least=2) for name in (ATOMIC, DIRECT))),
              "dcp.load has nothing to verify")  # fmt: skip
    yield Row("load-warm-unverified", "load in place, unverified, page cache warm", "GB/s", nbytes,
              unverified, options.bars(Bar(UNVERIFIED, LOAD_SAFETENSORS, least=0.9)))  # fmt: skip
    cold = (LOAD_DCP, LOAD_SAFETENSORS, ATOMIC, DIRECT)
    entries = _loads(options, "load, cold", cold, files, disk / "3", stock, ours, cool)
    how = "drop_caches" if can_drop() else "posix_fadvise(DONTNEED)"
    yield Row("load-cold", "load in place, page cache cold", "GB/s", nbytes, entries,
              options.bars(*(Bar(name, LOAD_DCP, least=1.7) for name in (ATOMIC, DIRECT))),
              f"cold by {how}")  # fmt: skip
    finish(stock, ours)
    for folder in disk.iterdir():
        remove(folder)


def two_ranks(options: Options, stock: Crew, ours: Crew) -> Iterator[Row]:
    options.tell("two ranks: preparing")
    nbytes = prepare(options, stock, ours)
    memory, disk = options.places
    tools = (DCP, DCP2, OURS)
    yield _saves(options, "save-memory-2", "2 ranks, DTensors: save to /dev/shm", memory, tools,
                 stock, ours, nbytes)  # fmt: skip
    yield _saves(options, "save-disk-2", "2 ranks, DTensors: save to disk, fsync", disk, tools,
                 stock, ours, nbytes, keep=(DCP, OURS))  # fmt: skip
    files = {LOAD_DCP: disk / "0"}
    hot = (LOAD_DCP, ATOMIC, DIRECT)
    entries = _loads(options, "2 ranks: load", hot, files, disk / "2", stock, ours, warm)
    yield Row("load-warm-2", "2 ranks, DTensors: load in place, verified, page cache warm",
              "GB/s", nbytes, entries)  # fmt: skip
    finish(stock, ours)


def _saves(
    options: Options, key: str, title: str, place: Path, tools: tuple[str, ...], stock: Crew,
    ours: Crew, nbytes: int, bars: tuple[Bar, ...] = (), *, keep: tuple[str, ...] = (),
) -> Row:  # fmt: skip
    """`keep`: whose files of the last lap stay, in a folder named by the tool's place."""
    folders = {name: place / str(index) for index, name in enumerate(tools)}

    def lap(name: str) -> Turn:
        ranks = ours if name == OURS else stock

        def once(number: int) -> list[Any]:
            found = ranks.run(tasks.save, name, str(folders[name]))
            if name not in keep or number < options.laps - 1:
                remove(folders[name])
            return found

        return name, once

    entries = _in_turn(options, title, [lap(name) for name in tools])
    return Row(key, title, "GB/s", nbytes, entries, bars)


def _loads(
    options: Options, title: str, tools: tuple[str, ...], files: dict[str, Path], own: Path,
    stock: Crew, ours: Crew, before: Callable[[Path], None],
) -> list[Entry]:  # fmt: skip
    def lap(name: str) -> Turn:
        folder = files.get(name, own)
        ranks = stock if name in files else ours

        def once(number: int) -> list[Any]:
            before(folder)
            return ranks.run(tasks.load, name, str(folder), not number)

        return name, once

    return _in_turn(options, title, [lap(name) for name in tools])


def _in_turn(options: Options, title: str, turns: list[Turn]) -> list[Entry]:
    """Laps of every tool, in turn; a lap lasts until the slowest rank is done."""
    first: dict[str, list[Any]] = {}
    laps: dict[str, list[list[Any]]] = {name: [] for name, _ in turns}
    for number in range(options.laps):
        options.tell(f"{title}: " + (f"lap {number}" if number else "first lap"))
        for name, once in turns:
            found = once(number)
            if number or options.small:
                laps[name].append(found)
            first.setdefault(name, found)
    return [
        Entry(
            name,
            [max(lap.seconds for lap in ranks) for ranks in laps[name]],
            max(lap.seconds for lap in first[name]),
            all_exact(first[name]),
            phases([ranks[0].phases for ranks in laps[name]]),
        )
        for name, _ in turns
    ]
