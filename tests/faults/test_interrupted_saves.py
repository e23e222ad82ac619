"""A save that is interrupted, at whatever line, leaves the next ones right."""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable
from contextlib import suppress
from itertools import count, product
from pathlib import Path
from typing import Any

import pytest
import torch

import torchrelay as tr
from tests.support.interrupts import Line, interrupted, lines_of
from tests.support.ranks import RankPool
from tests.support.saved import equal, state
from torchrelay.shares.planner import SavePlan

PARTS = ("checkpointer", "stores", "shares", "processes", "coordination", "memory/arena.py")
SEED = 20


def other(seed: int) -> dict[str, Any]:
    """A state that is planned otherwise than `state`."""
    return {**state(seed, rows=3), "more": {"x": torch.full((4,), float(seed))}}


class Job:
    """Saves of a checkpointer, each under the next step."""

    def __init__(self, root: str, kind: str, group: Any = None) -> None:
        self.checkpointer = tr.Checkpointer(
            root, group=group, no_dist=group is None, timeout=30, keep=tr.KeepLast(2)
        )
        self._kind = kind
        self._steps = count(1)

    def save(self, make: Callable[[int], Any], timeout: float | None = None) -> int:
        step = next(self._steps)
        if self._kind == "save":
            self.checkpointer.save(step, make(step), timeout=timeout)
        else:
            self.checkpointer.save_async(step, make(step), timeout=timeout).result(30)
        return step

    def lines(self) -> list[Line]:
        """What a save runs through that cannot repeat the plan of the one before."""
        self.save(state)
        return lines_of(lambda: self.save(other), PARTS)

    def wrong(self) -> list[str]:
        """Save like the save that was interrupted, and like that before it."""
        found = []
        for make in (other, state):
            step = self.save(make)
            if not equal(self.checkpointer.load(step=step).state, make(step)):
                found.append(f"step {step} is not what was saved")
        return found


def check_lines(root: Path, kind: str, lines: list[Line], *, first: bool) -> None:
    job = Job(str(root / "trials"), kind)
    hit = 0
    for number, line in enumerate(lines):
        if first:
            job.checkpointer.close()
            job = Job(str(root / f"trial-{number}"), kind)
        hit += interrupted(lambda job=job: job.save(other), PARTS, line)  # type: ignore[misc]
        assert job.wrong() == [], f"after an interrupt at {line}"
    job.checkpointer.close()
    assert hit > 0.8 * len(lines)


@pytest.mark.parametrize("kind", ["save", "save_async"])
def test_a_save_interrupted_at_any_line_leaves_the_next_ones_right(
    tmp_path: Path, kind: str
) -> None:
    """What is planned and remembered, and what is on its way to the writer, is all or nothing."""
    print(f"seed {SEED}")
    learner = Job(str(tmp_path / "lines"), kind)
    lines = learner.lines()
    learner.checkpointer.close()
    assert len(lines) > 150
    keeping = (
        "shares/planner.py",
        "checkpointer/saver.py",
        "checkpointer/save_attempt.py",
        "checkpointer/share_writer.py",
        "stores/writer/client.py",
    )
    some = random.Random(SEED)
    chosen = some.sample([line for line in lines if line[0] in keeping], 25)
    check_lines(tmp_path, kind, chosen + some.sample(lines, 5), first=False)
    check_lines(tmp_path, kind, some.sample(chosen, 6), first=True)


@pytest.mark.slow
@pytest.mark.timeout(600)  # a save for each line
@pytest.mark.parametrize("first", [False, True], ids=["later", "first"])
@pytest.mark.parametrize("kind", ["save", "save_async"])
def test_a_save_interrupted_at_every_line_leaves_the_next_ones_right(
    tmp_path: Path, kind: str, first: bool
) -> None:
    learner = Job(str(tmp_path / "lines"), kind)
    lines = learner.lines()
    learner.checkpointer.close()
    check_lines(tmp_path, kind, lines, first=first)


def interrupt_ranks(rank: int, group: Any, root: str) -> list[str]:
    """Interrupt one of the ranks late in its planning, then let all save again."""
    late = []
    for method, mark in ((SavePlan.share, "_part("), (SavePlan._made, "arrange(")):
        text, begin = inspect.getsourcelines(method)
        late += [begin + i for i, line in enumerate(text) if mark in line]
    job = Job(root, "save", group)
    job.save(state)
    found = []
    for victim, number in product(range(group.size()), late):
        line = ("shares/planner.py", number)
        hit = True
        if rank == victim:
            hit = interrupted(lambda: job.save(other, 1.5), PARTS, line)
        else:
            with suppress(tr.errors.RelayError):
                job.save(other, 1.5)
        found += [f"rank {victim} at {line}: {wrong}" for wrong in job.wrong()]
        found += [] if hit else [f"{line} was not reached"]
    job.checkpointer.close()
    return found


def test_a_rank_interrupted_while_planning_leaves_the_next_saves_right(
    pool2: RankPool, tmp_path: Path
) -> None:
    assert pool2.run(interrupt_ranks, str(tmp_path), timeout=90) == [[], []]
