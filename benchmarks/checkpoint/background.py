"""Saves beside the caller's work: its wait, its steps meanwhile, the memory that it takes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import torch

from benchmarks.checkpoint import tasks
from benchmarks.checkpoint.crew import Crew, MakeCrew, Options, all_exact, finish, phases, prepare
from benchmarks.checkpoint.places import Peak, pss, remove
from benchmarks.checkpoint.rows import Bar, Entry, Row, Unit
from benchmarks.checkpoint.sides import COPY, OURS, PROCESS, STAGER, THREAD
from benchmarks.harness import RankFailed

MB = 1_000_000
FAILED = f"fails on torch {torch.__version__}"


def asynchronous(options: Options, crew: MakeCrew) -> Iterator[Row]:
    options.tell("save_async: preparing")
    folder = options.places.disk / "async"
    others = (STAGER,) if options.small else (PROCESS, STAGER)
    laps: dict[str, list[Any]] = {name: [] for name in (THREAD, *others, OURS)}
    copies: list[float] = []

    def call(ranks: Crew, name: str, repeat: int) -> None:
        options.tell(f"save_async, {name}: " + (f"call {repeat + 1}" if repeat else "first call"))
        remove(folder)
        given = name, str(folder), repeat, not repeat, options.small
        laps[name] += ranks.run(tasks.save_async, *given)

    with ExitStack() as own:
        stock, ours = crew(own, 1), crew(own, 1)
        nbytes = prepare(options, stock, ours)
        prepared = ours.run(tasks.ready, str(folder), {})[0]
        for repeat in range(1 + options.repeats):
            call(stock, THREAD, repeat)
            call(ours, OURS, repeat)
            copies.append(stock.run(tasks.copy_twice)[0].seconds)
        finish(stock, ours)
    # These keep a copy of the state or two between calls: all of them at once would not fit.
    failed = []
    for name in others:
        with ExitStack() as own:
            alone = crew(own, 1)
            prepare(options, alone, alone)
            try:
                for repeat in range(1 + min(2, options.repeats)):
                    call(alone, name, repeat)
            except RankFailed as fault:  # the other tools have their figures all the same
                options.tell(f"save_async, {name}: {fault}")
                failed.append(f"{name} {FAILED}")
                del laps[name]
            else:
                finish(alone, alone)
    remove(folder)

    def row(key: str, title: str, of: Callable[[Any], float], unit: Unit, calls: slice,
            note: str = "") -> Row:  # fmt: skip
        entries = [
            Entry(
                name,
                [of(lap) for lap in laps[name][calls]],
                exact=all_exact(laps[name]),
                phases=phases([lap.phases for lap in laps[name][calls]]),
            )
            for name in laps
        ]
        return Row(key, title, unit, nbytes, entries, (), "; ".join([note] * bool(note) + failed))

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
    idle = [lap.idle for kind in laps.values() for lap in kind[later]]
    entries = [Entry("nothing", idle), *found.entries]
    yield Row("step", found.title, "seconds", nbytes, entries, note=found.note)


def memory(options: Options, crew: MakeCrew) -> Row:
    folder = options.places.disk / "memory"
    bounded = f"torchrelay, memory_budget={options.budget >> 20} MiB"
    settings = {OURS: {}, bounded: {"memory_budget": options.budget}}
    stock = (THREAD,) if options.small else (THREAD, PROCESS)
    entries: list[Entry] = []
    nbytes = 0
    for name in (*stock, *settings):
        options.tell(f"memory: {name}")
        with ExitStack() as own:
            ranks = crew(own, 1)
            nbytes = ranks.run(tasks.prepare, options.size)[0][1]
            before = pss(ranks.pids)
            with Peak(ranks.pids) as peak:
                if name in settings:
                    ranks.run(tasks.ready, str(folder), settings[name])
                ranks.run(tasks.write_async, name if name in stock else OURS, str(folder))
            entries.append(Entry(name, [float(max(1, peak.bytes - before))]))
            ranks.run(tasks.finish)
            remove(folder)
    bars = options.bars(
        Bar(OURS, most=nbytes + 256 * MB), Bar(bounded, most=options.budget + 64 * MB)
    )
    note = "PSS of all processes, writer included, over that before"
    title = "save_async: peak of memory beside the state"
    return Row("memory", title, "bytes", nbytes, entries, bars, note)
