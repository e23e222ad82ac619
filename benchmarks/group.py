"""Live transfers over a process group: torch's `PGTransport` and `Relay`, lap by lap in turn.

Both have processes of their own, since how one treats its memory would change what the other
finds; only one of them works at a time. A lap begins with a barrier and ends when the slowest rank,
sender or receiver, is done. The first lap of each kind is not counted: its result is compared with
what was sent, bit for bit.

The processes give freed memory back to the system, so new tensors are made in new memory, but in
memory that the system has just had in use. The first lap of a workload's first mode is in new
processes as well; its seconds are recorded apart, as `first_seconds`. Run with
MIMALLOC_PURGE_DELAY=-1 for the other condition, new tensors in memory that the process has kept:
the ranking of the two can change with it.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from statistics import median
from typing import Any

from benchmarks.harness import SECONDS, Ranks
from benchmarks.workloads import Bar, Workload, suite
from torchrelay.demo.job import clear, fingerprint, leaves, tensor_bytes
from torchrelay.demo.versus import DIRECT, IN_PLACE, NEW, SOURCE, Course, Lap, Mode, Who

STOCK_MODE: dict[Mode, Mode] = {NEW: NEW, IN_PLACE: IN_PLACE, DIRECT: IN_PLACE}


@dataclass(frozen=True)
class Measured:
    """One contender in one mode."""

    laps: list[float]
    first: float
    bytes: int  # that the sender sent, metadata and control messages included
    messages: int
    exact: bool
    sender_phases: dict[str, float]
    receiver_phases: dict[str, float]

    @property
    def seconds(self) -> float:
        return median(self.laps)


@dataclass(frozen=True)
class Row:
    """One workload in one mode, by both."""

    workload: str
    title: str
    mode: str
    receivers: int
    tensors: int
    state_bytes: int
    stock: Measured
    ours: Measured
    bar: Bar | None

    @property
    def speed(self) -> float:
        return self.stock.seconds / self.ours.seconds

    @property
    def fewer_bytes(self) -> float:
        return self.stock.bytes / self.ours.bytes

    @property
    def passed(self) -> bool | None:
        bar = self.bar
        if bar is None:
            return None
        return (
            (bar.speed is None or self.speed >= bar.speed)
            and (bar.fewer_bytes is None or self.fewer_bytes >= bar.fewer_bytes)
            and (
                bar.sent_per_state is None
                or self.ours.bytes <= bar.sent_per_state * self.state_bytes
            )
        )


# In the ranks -----------------------------------------------------------------------------------

_state: Any = None
_courses: dict[tuple[Who, Mode], Course] = {}


def _prepare(group: Any, name: str, small: bool) -> tuple[int, int]:
    """Make the state that rank 0 sends and the others are written into; its tensors and bytes."""
    global _state
    _courses.clear()
    _state = None  # before the next one is made: two may not fit
    gc.collect()
    _state = next(w for w in suite(small) if w.name == name).make()
    return sum(1 for _, leaf in leaves(_state) if hasattr(leaf, "nbytes")), tensor_bytes(_state)


def _first_lap(group: Any, who: Who, mode: Mode) -> tuple[Lap, str]:
    """A lap that is not counted, and the fingerprint of what was sent or has come."""
    sends = group.rank() == SOURCE
    if not sends:
        clear(_state)
    course = _courses[who, mode] = Course(who, mode, group, _state, SECONDS)
    lap = course.lap()
    seen = fingerprint(_state if sends or mode != NEW else course.received)
    course.received = None
    return lap, seen


def _lap(group: Any, who: Who, mode: Mode) -> Lap:
    course = _courses[who, mode]
    gc.collect()  # the garbage of another lap is not this one's cost
    lap = course.lap()
    course.received = None
    return lap


# In the parent ----------------------------------------------------------------------------------


def compare(
    workloads: list[Workload], small: bool, tell: Callable[[str], None]
) -> Iterator[list[Row]]:
    """The rows of each workload in turn."""
    with ExitStack() as shared:
        both: Ranks | None = None
        if small:  # not for its figures: saves the start of more processes
            both = shared.enter_context(Ranks(1 + max(w.receivers for w in workloads)))
        for workload in workloads:
            tell(f"{workload.title}: preparing")
            with ExitStack() as own:
                # New ones for each workload: a heap that has grown under the last one would make
                # new memory look cheaper than it is.
                size = 1 + workload.receivers
                stock = both or own.enter_context(Ranks(size))
                ours = both or own.enter_context(Ranks(size))
                yield _compare_one(workload, small, stock, ours, tell)


def _compare_one(
    workload: Workload, small: bool, stock: Ranks, ours: Ranks, tell: Callable[[str], None]
) -> list[Row]:
    count = 1 + workload.receivers
    tensors, state_bytes = stock.run(_prepare, workload.name, small, count=count)[0]
    if ours is not stock:
        ours.run(_prepare, workload.name, small, count=count)
    turns: list[tuple[Ranks, Who, Mode]] = []
    for mode in workload.modes:
        if (stock, "torch", STOCK_MODE[mode]) not in turns:
            turns.append((stock, "torch", STOCK_MODE[mode]))
        turns.append((ours, "torchrelay", mode))
    first: dict[tuple[Who, Mode], list[tuple[Lap, str]]] = {}
    laps: dict[tuple[Who, Mode], list[list[Lap]]] = {}
    tell(f"{workload.title}: first lap")
    for ranks, who, mode in turns:
        first[who, mode] = ranks.run(_first_lap, who, mode, count=count)
        laps[who, mode] = []
    for repeat in range(workload.repeats):
        tell(f"{workload.title}: lap {repeat + 1} of {workload.repeats}")
        for ranks, who, mode in turns:
            laps[who, mode].append(ranks.run(_lap, who, mode, count=count))
    measured = {kind: _measured(laps[kind], first[kind]) for kind in laps}
    return [
        Row(
            workload.name,
            workload.title,
            mode,
            workload.receivers,
            tensors,
            state_bytes,
            measured["torch", STOCK_MODE[mode]],
            measured["torchrelay", mode],
            bar,
        )
        for mode, bar in workload.modes.items()
    ]


def _measured(laps: list[list[Lap]], first: list[tuple[Lap, str]]) -> Measured:
    return Measured(
        laps=[max(lap.seconds for lap in ranks) for ranks in laps],
        first=max(lap.seconds for lap, _ in first),
        bytes=max(ranks[0].bytes for ranks in laps),
        messages=max(ranks[0].messages for ranks in laps),
        exact=len({digest for _, digest in first}) == 1,
        sender_phases=_phases([ranks[0] for ranks in laps]),
        receiver_phases=_phases([ranks[-1] for ranks in laps]),
    )


def _phases(laps: list[Lap]) -> dict[str, float]:
    return {name: median(lap.phases.get(name, 0.0) for lap in laps) for name in laps[0].phases}
