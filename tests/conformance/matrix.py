"""Door by job by number of ranks: each ends in the losses of the next steps.

What is compared: a job trains `BEFORE` steps and goes through a door into a job that was built
with other values. That one trains `AFTER` steps. Its losses have to be, bit for bit, those of a
job that got the same values by torch's own means (`full_tensor`, `redistribute`), and on the same
number of ranks also those of the job that was never interrupted.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from tests.conformance.doors import DURABLE, LIVE, PARTS
from tests.conformance.jobs import JOBS, Job, Place, makes, painted, portrait

BEFORE, AFTER = 2, 3
RANKS = (1, 2, 3, 4)
FIRST, OTHER = 1, 2  # seeds
DOORS = (*DURABLE, *LIVE, *PARTS)
BEHIND = max(RANKS)  # the first rank of a job that takes parts from another one


class Cell(NamedTuple):
    """One trip of a job through a door; `loaded` is the number of ranks at the load."""

    door: str
    job: str
    ranks: int
    loaded: int


def cells(door: str, job: str, *, all_ranks: bool) -> list[Cell]:
    """Every number of ranks, or one; for durable doors as many at the load, and another number, or
    one of these.

    The choices turn, so that each door, and each job, meets every pair of numbers.
    """
    turn = DOORS.index(door) + list(JOBS).index(job)
    sizes = RANKS if all_ranks else (RANKS[turn % len(RANKS)],)
    if door in LIVE:
        return [Cell(door, job, ranks, ranks) for ranks in sizes]
    shift = 1 + turn // len(RANKS) % (len(RANKS) - 1)
    found = [
        Cell(door, job, ranks, loaded)
        for ranks in sizes
        for loaded in (ranks, RANKS[(RANKS.index(ranks) + shift) % len(RANKS)])
    ]
    if all_ranks:
        return found
    another = door in PARTS or turn // len(RANKS) % 2
    return found[1:] if another else found[:1]


def chosen(door: str, job: str) -> bool:
    """Whether a pair is tried every day: a third of all, and the commonest job with each door.

    Each door, and each job, is among these with every number of ranks.
    """
    return job == "FSDP2 + AdamW" or DOORS.index(door) % 3 == list(JOBS).index(job) % 3


def all_cells(*, all_ranks: bool) -> Iterator[Cell]:
    for door in DOORS:
        for job in JOBS:
            yield from cells(door, job, all_ranks=all_ranks)


# In the ranks. What a job is before a door, and what comes after, is worked out once a process.


@cache
def place(replicas: int, ranks: int, first: int = 0) -> Place | None:
    return makes(dist.get_world_size(), replicas, ranks, first)


@cache
def source(job: str, replicas: int, ranks: int) -> Job:
    here = place(replicas, ranks)
    assert here is not None
    made = JOBS[job](here, FIRST)
    made.train(BEFORE)
    return made


@cache
def undisturbed(job: str, replicas: int, ranks: int) -> list[str]:
    here = place(replicas, ranks)
    assert here is not None
    return JOBS[job](here, FIRST).train(BEFORE + AFTER)[BEFORE:]


def save(rank: int, group: Any, cell: Cell, root: str) -> None:
    """Save a job, and beside it the portrait that a load is compared with."""
    place(1, cell.ranks)
    job = source(cell.job, 1, cell.ranks)
    picture = portrait(job.plain())
    if rank == 0:
        Path(root).mkdir(parents=True)
        torch.save(picture, Path(root) / "portrait.pt")
    dist.barrier()
    DURABLE[cell.door].save(root, job)


def load(rank: int, group: Any, cell: Cell, root: str) -> str:
    """Load into a new job and train it; what went wrong, if anything did."""
    here = place(1, cell.loaded)
    assert here is not None
    door = DURABLE[cell.door]
    wanted = expected(cell.job, cell.ranks, cell.loaded, door.whole, root)
    job = JOBS[cell.job](here, OTHER)
    door.load(root, job)
    return compared(job.train(AFTER), wanted)


_expected: dict[tuple[str, int, int, bool], list[str]] = {}


def expected(
    job: str, ranks: int, loaded: int, whole: bool, root: str, first: int = 0
) -> list[str]:
    """The losses of a job that got its values from the portrait that `save` left at `root`."""
    key = (job, ranks, loaded, whole)
    if key not in _expected:
        here = place(1, loaded, first)
        assert here is not None
        made = JOBS[job](here, OTHER)
        if whole:
            made.train(1)  # so that its optimizer has a state to be painted over
        picture = torch.load(Path(root) / "portrait.pt", weights_only=False)
        plain = made.plain()
        parts = picture if whole else [made.model_key]
        made.adopt({**plain, **{part: painted(plain.get(part), picture[part]) for part in parts}})
        _expected[key] = made.train(AFTER)
        if whole and loaded == ranks and not first:
            never = undisturbed(job, 1, ranks)
            assert _expected[key] == never, f"by torch: {_expected[key]}, undisturbed: {never}"
    return _expected[key]


def live(rank: int, group: Any, cell: Cell) -> str:
    """Send the job of one replica to another, and train both."""
    here = place(2, cell.ranks)
    if here is None:
        return ""
    job = source(cell.job, 2, cell.ranks) if rank < cell.ranks else JOBS[cell.job](here, OTHER)
    if rank < cell.ranks:
        LIVE[cell.door].send(job, rank + cell.ranks)
        return ""
    LIVE[cell.door].recv(job, rank - cell.ranks)
    return compared(job.train(AFTER), undisturbed(cell.job, 2, cell.ranks))


def parts(rank: int, group: Any, cell: Cell, root: str) -> str:
    """Send a job from its ranks to those of another, and train that one."""
    theirs = place(1, cell.ranks)
    here = place(1, cell.loaded, BEHIND)
    door = PARTS[cell.door]
    job = source(cell.job, 1, cell.ranks) if theirs else None
    picture = portrait(job.plain()) if job else None
    if rank == 0:
        Path(root).mkdir(parents=True)
        torch.save(picture, Path(root) / "portrait.pt")
    dist.barrier()
    if job is not None:
        door.send(job, list(range(BEHIND, BEHIND + cell.loaded)))
    if here is None:
        return ""
    wanted = expected(cell.job, cell.ranks, cell.loaded, True, root, BEHIND)
    made = JOBS[cell.job](here, OTHER)
    door.recv(made, list(range(cell.ranks)))
    return compared(made.train(AFTER), wanted)


def compared(got: list[str], expected: list[str]) -> str:
    return "" if got == expected else f"losses {got}, expected {expected}"


# In the test.


def run(cell: Cell, pools: dict[int, Any], root: Path) -> str:
    """Take a job through a door; what went wrong, if anything did."""
    try:
        if cell.door in LIVE:
            # A pool of its size, or the largest: not every rank of it takes part.
            pool = pools[2 * cell.ranks] if 2 * cell.ranks in pools else pools[8]
            found = pool.run(live, cell, timeout=90)
        elif cell.door in PARTS:
            target = str(root / f"{cell}".replace("/", "-"))
            found = pools[8].run(parts, cell, target, timeout=90)
        else:
            target = str(root / f"{cell.door}-{cell.job}-{cell.ranks}".replace("/", "-"))
            if not Path(target).exists():
                pools[cell.ranks].run(save, cell, target, timeout=90)
            found = pools[cell.loaded].run(load, cell, target, timeout=90)
    except Exception:
        return traceback.format_exc(limit=1)
    return "\n".join(f"rank {rank}: {said}" for rank, said in enumerate(found) if said)
