"""What all parts of the benchmark share: options, processes, laps."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from statistics import median
from typing import Any

from benchmarks.checkpoint import tasks
from benchmarks.checkpoint.places import Places
from benchmarks.checkpoint.rows import Bar
from benchmarks.checkpoint.states import SMALL, Size
from benchmarks.harness import Ranks


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

    @property
    def laps(self) -> int:
        """Of each kind; the first is not counted, unless nothing is meant by the figures."""
        return 1 if self.small else 1 + self.repeats

    def bars(self, *bars: Bar) -> tuple[Bar, ...]:
        """Seconds mean nothing at small sizes."""
        return () if self.small else bars


@dataclass(frozen=True)
class Crew:
    """The first `count` of some ranks, as a group of their own."""

    ranks: Ranks
    count: int

    def run(self, fn: Callable[..., Any], *args: Any) -> list[Any]:
        return self.ranks.run(fn, *args, count=self.count)

    @property
    def pids(self) -> list[int]:
        return self.ranks.pids[: self.count]


MakeCrew = Callable[[ExitStack, int], Crew]
"""Ranks of a number, until the stack is closed."""


def prepare(options: Options, stock: Crew, ours: Crew) -> int:
    """Bytes of the state, over all ranks."""
    found = stock.run(tasks.prepare, options.size)
    if ours.ranks is not stock.ranks:
        ours.run(tasks.prepare, options.size)
    return sum(nbytes for _, nbytes in found)


def finish(stock: Crew, ours: Crew) -> None:
    for ranks in (stock, ours):
        ranks.run(tasks.finish)


def all_exact(laps: list[Any]) -> bool | None:
    looked = [lap.exact for lap in laps if lap.exact is not None]
    return all(looked) if looked else None


def phases(found: list[dict[str, float]]) -> dict[str, float]:
    return {name: median(one.get(name, 0.0) for one in found) for name in found[0]}
