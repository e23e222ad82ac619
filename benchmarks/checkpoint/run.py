"""The rows, one after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.checkpoint import tasks
from benchmarks.checkpoint.places import Peak, Places, can_drop, cool, pss, remove, warm
from benchmarks.checkpoint.rows import Bar, Entry, Row, Unit
from benchmarks.checkpoint.sides import (
    ATOMIC,
    COPY,
    DCP,
    DCP2,
    DIRECT,
    LOAD_DCP,
    LOAD_SAFETENSORS,
    OURS,
    PROCESS,
    SAFETENSORS,
    STAGER,
    THREAD,
    TORCH,
    UNVERIFIED,
)
from benchmarks.checkpoint.states import SMALL, Size
from benchmarks.harness import Ranks

MB = 1_000_000
Turn = tuple[str, Callable[[bool], list[Any]]]  # a name, and its lap on all ranks; first or not


@dataclass(frozen=True)
class Options:
    small: bool
    repeats: int
    places: Places
    tell: Callable[[str], None]

    @property
    def size(self) -> Size:
        return SMALL if self.small else Size()

    @property
    def budget(self) -> int:
        return 16 << 20 if self.small else 512 << 20

    def bars(self, *bars: Bar) -> tuple[Bar, ...]:
        """Seconds mean nothing at small sizes."""
        return () if self.small else bars


def run(options: Options) -> Iterator[Row]:
    with ExitStack() as shared:
        both: Ranks | None = None
        if options.small:  # not for its figures: saves the start of more processes
            both = shared.enter_context(Ranks(1, parents=True))
        for part in (_blocking, _asynchronous):
            # New processes for each part: a heap that has grown would make memory look cheap.
            with ExitStack() as own:
                stock = both or own.enter_context(Ranks(1, parents=True))
                ours = both or own.enter_context(Ranks(1, parents=True))
                yield from part(options, stock, ours)
        yield _memory(options, both)
    with ExitStack() as own:
        stock = own.enter_context(Ranks(2, parents=True))
        ours = stock if options.small else own.enter_context(Ranks(2, parents=True))
        yield from _two_ranks(options, stock, ours)


def _prepare(options: Options, stock: Ranks, ours: Ranks) -> int:
    """Bytes of the state, over all ranks."""
    found = stock.run(tasks.prepare, options.size)
    if ours is not stock:
        ours.run(tasks.prepare, options.size)
    return sum(nbytes for _, nbytes in found)


def _finish(stock: Ranks, ours: Ranks) -> None:
    for ranks in (stock, ours):
        ranks.run(tasks.finish)


# One process, or two: save and load ------------------------------------------------------------


def _blocking(options: Options, stock: Ranks, ours: Ranks) -> Iterator[Row]:
    options.tell("one process: preparing")
    nbytes = _prepare(options, stock, ours)
    memory, disk = options.places
    tools = (DCP, DCP2, SAFETENSORS, TORCH, OURS)
    bars = Bar(OURS, DCP, least=2), Bar(OURS, SAFETENSORS, least=1)
    yield _saves(options, "save-memory", "save to /dev/shm", memory, tools, stock, ours, nbytes,
                 options.bars(*bars))  # fmt: skip
    bars = Bar(OURS, DCP, least=1.6), Bar(OURS, SAFETENSORS, least=1)
    yield _saves(options, "save-disk", "save to disk, fsync", disk, tools, stock, ours, nbytes,
                 options.bars(*bars), keep=True)  # fmt: skip
    files = {LOAD_DCP: disk / "0", LOAD_SAFETENSORS: disk / "2"}
    hot = (LOAD_DCP, ATOMIC, DIRECT, LOAD_SAFETENSORS, UNVERIFIED)
    entries = _loads(options, "load, page cache warm", hot, files, disk / "4", stock, ours, warm)
    verified, unverified = entries[:3], entries[3:]
    yield Row("load-warm", "load in place, verified, page cache warm", "GB/s", nbytes, verified,
              options.bars(*(Bar(name, LOAD_DCP, least=2) for name in (ATOMIC, DIRECT))),
              "dcp.load has nothing to verify")  # fmt: skip
    yield Row("load-warm-unverified", "load in place, unverified, page cache warm", "GB/s", nbytes,
              unverified, options.bars(Bar(UNVERIFIED, LOAD_SAFETENSORS, least=0.9)))  # fmt: skip
    cold = (LOAD_DCP, LOAD_SAFETENSORS, ATOMIC, DIRECT)
    entries = _loads(options, "load, cold", cold, files, disk / "4", stock, ours, cool)
    how = "drop_caches" if can_drop() else "posix_fadvise(DONTNEED)"
    yield Row("load-cold", "load in place, page cache cold", "GB/s", nbytes, entries,
              options.bars(*(Bar(name, LOAD_DCP, least=1.7) for name in (ATOMIC, DIRECT))),
              f"cold by {how}")  # fmt: skip
    _finish(stock, ours)
    for folder in disk.iterdir():
        remove(folder)


def _two_ranks(options: Options, stock: Ranks, ours: Ranks) -> Iterator[Row]:
    options.tell("two ranks: preparing")
    nbytes = _prepare(options, stock, ours)
    memory, disk = options.places
    tools = (DCP, DCP2, OURS)
    yield _saves(options, "save-memory-2", "2 ranks, DTensors: save to /dev/shm", memory, tools,
                 stock, ours, nbytes)  # fmt: skip
    yield _saves(options, "save-disk-2", "2 ranks, DTensors: save to disk, fsync", disk, tools,
                 stock, ours, nbytes, keep=True)  # fmt: skip
    files = {LOAD_DCP: disk / "0"}
    hot = (LOAD_DCP, ATOMIC, DIRECT)
    entries = _loads(options, "2 ranks: load", hot, files, disk / "2", stock, ours, warm)
    yield Row("load-warm-2", "2 ranks, DTensors: load in place, verified, page cache warm",
              "GB/s", nbytes, entries)  # fmt: skip
    _finish(stock, ours)


def _saves(
    options: Options, key: str, title: str, place: Path, tools: tuple[str, ...], stock: Ranks,
    ours: Ranks, nbytes: int, bars: tuple[Bar, ...] = (), *, keep: bool = False,
) -> Row:  # fmt: skip
    """`keep`: the files of the last lap stay, each tool's in a folder named by its place."""
    folders = {name: place / str(index) for index, name in enumerate(tools)}

    def lap(name: str) -> Turn:
        ranks = ours if name == OURS else stock

        def once(first: bool) -> list[Any]:
            remove(folders[name])
            try:
                return ranks.run(tasks.save, name, str(folders[name]))
            finally:
                if not keep:
                    remove(folders[name])

        return name, once

    entries = _in_turn(options, title, [lap(name) for name in tools])
    return Row(key, title, "GB/s", nbytes, entries, bars)


def _loads(
    options: Options, title: str, tools: tuple[str, ...], files: dict[str, Path], own: Path,
    stock: Ranks, ours: Ranks, before: Callable[[Path], None],
) -> list[Entry]:  # fmt: skip
    def lap(name: str) -> Turn:
        folder = files.get(name, own)
        ranks = stock if name in files else ours

        def once(first: bool) -> list[Any]:
            before(folder)
            return ranks.run(tasks.load, name, str(folder), first)

        return name, once

    return _in_turn(options, title, [lap(name) for name in tools])


def _in_turn(options: Options, title: str, turns: list[Turn]) -> list[Entry]:
    """Laps of every tool, in turn; a lap lasts until the slowest rank is done."""
    first: dict[str, list[Any]] = {}
    laps: dict[str, list[list[Any]]] = {name: [] for name, _ in turns}
    for repeat in range(1 + options.repeats):
        options.tell(f"{title}: " + (f"lap {repeat}" if repeat else "first lap"))
        for name, once in turns:
            found = once(not repeat)
            if repeat:
                laps[name].append(found)
            else:
                first[name] = found
    return [
        Entry(
            name,
            [max(lap.seconds for lap in ranks) for ranks in laps[name]],
            max(lap.seconds for lap in first[name]),
            _all_exact(first[name]),
            _phases([ranks[0].phases for ranks in laps[name]]),
        )
        for name, _ in turns
    ]


def _all_exact(laps: list[Any]) -> bool | None:
    looked = [lap.exact for lap in laps if lap.exact is not None]
    return all(looked) if looked else None


def _phases(found: list[dict[str, float]]) -> dict[str, float]:
    return {name: median(one.get(name, 0.0) for one in found) for name in found[0]}


# Asynchronous: the stall, and training beside it -----------------------------------------------


def _asynchronous(options: Options, stock: Ranks, ours: Ranks) -> Iterator[Row]:
    options.tell("save_async: preparing")
    nbytes = _prepare(options, stock, ours)
    tools = (THREAD, PROCESS, STAGER, OURS)
    folder = options.places.disk / "async"
    prepared = ours.run(tasks.ready, str(folder), {})[0]
    laps: dict[str, list[Any]] = {name: [] for name in tools}
    copies: list[float] = []
    for repeat in range(1 + options.repeats):
        options.tell("save_async: " + (f"call {repeat + 1}" if repeat else "first call"))
        for name in tools:
            ranks = ours if name == OURS else stock
            remove(folder)
            given = name, str(folder), repeat, not repeat, options.small
            laps[name] += ranks.run(tasks.save_async, *given)
        copies.append(stock.run(tasks.copy_twice)[0].seconds)
    remove(folder)
    _finish(stock, ours)

    def row(key: str, title: str, of: Callable[[Any], float], unit: Unit, calls: slice,
            note: str = "") -> Row:  # fmt: skip
        entries = [
            Entry(name, [of(lap) for lap in laps[name][calls]], exact=_all_exact(laps[name]),
                  phases=_phases([lap.phases for lap in laps[name][calls]]))  # fmt: skip
            for name in tools
        ]
        return Row(key, title, unit, nbytes, entries, (), note)

    stalls = Bar(OURS, THREAD, most=0.5), Bar(OURS, PROCESS, most=0.5), Bar(OURS, COPY, most=1.25)
    for key, title, calls in (
        ("stall-first", "save_async: stall of the first call", slice(0, 1)),
        ("stall", "save_async: stall of later calls", slice(1, None)),
    ):
        found = row(key, title, lambda lap: lap.stall, "GB/s", calls, f"prepare: {prepared:.2f} s")
        found.entries.append(Entry(COPY, copies[calls]))
        yield Row(found.key, found.title, found.unit, nbytes, found.entries,
                  options.bars(*stalls), found.note)  # fmt: skip
    later = slice(1, None)
    yield row("async-total", "save_async: call to commit, training beside", lambda lap: lap.total,
              "GB/s", later)  # fmt: skip
    found = row("step", "training step beside a save", lambda lap: lap.beside, "seconds", later)
    idle = [lap.idle for kind in tools for lap in laps[kind][later]]
    yield Row("step", found.title, "seconds", nbytes, [Entry("nothing", idle), *found.entries])


# Memory ----------------------------------------------------------------------------------------


def _memory(options: Options, shared: Ranks | None) -> Row:
    folder = options.places.disk / "memory"
    small_budget = f"torchrelay, memory_budget={options.budget >> 20} MiB"
    entries: list[Entry] = []
    nbytes = 0
    for name in (THREAD, PROCESS, OURS, small_budget):
        options.tell(f"memory: {name}")
        with ExitStack() as own:
            ranks = shared or own.enter_context(Ranks(1, parents=True))
            nbytes = ranks.run(tasks.prepare, options.size)[0][1]
            before = pss(ranks.pids)
            how = name if name in (THREAD, PROCESS) else OURS
            with Peak(ranks.pids) as peak:
                if how == OURS:
                    budget = {"memory_budget": options.budget} if name == small_budget else {}
                    ranks.run(tasks.ready, str(folder), budget)
                ranks.run(tasks.write_async, how, str(folder), 0)
            entries.append(Entry(name, [float(max(1, peak.bytes - before))]))
            ranks.run(tasks.finish)
            remove(folder)
    bars = options.bars(
        Bar(OURS, most=nbytes + 256 * MB), Bar(small_budget, most=(512 << 20) + 64 * MB)
    )
    return Row("memory", "save_async: peak of memory beside the state", "bytes", nbytes, entries,
               bars, "PSS of all processes, writer included, over that before")  # fmt: skip
