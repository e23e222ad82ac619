"""API by job by number of ranks: each ends in the losses of the next steps.

What is compared: a job trains `BEFORE` steps and goes through an API into a job that was built
with other values. That one trains `AFTER` steps. Its losses have to be, bit for bit, those of a
job that got the same values by torch's own means (`full_tensor`, `redistribute`), and on the same
number of ranks also those of the job that was never interrupted. Losses are those of each rank, and
so are the values that they depend on.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from tests.conformance.apis import DURABLE, LIVE, PARTS
from tests.conformance.jobs import JOBS, Job, Place, makes, painted, portrait

BEFORE, AFTER = 2, 3
RANKS = (1, 2, 3, 4)
FIRST, OTHER = 1, 2  # seeds
APIS = (*DURABLE, *LIVE, *PARTS)
BEHIND = max(RANKS)  # the first rank of a job that takes parts from another one


class Cell(NamedTuple):
    """One trip of a job through an API; `loaded` is the number of ranks at the load."""

    api: str
    job: str
    ranks: int
    loaded: int


def cells(api: str, job: str, *, all_ranks: bool) -> list[Cell]:
    """Every number of ranks, or one; for durable APIs as many at the load, and another number, or
    one of these.

    The choices turn, so that each API, and each job, meets every pair of numbers.
    """
    if not fits(api, job):
        return []
    turn = APIS.index(api) + list(JOBS).index(job)
    sizes = RANKS if all_ranks else (RANKS[turn % len(RANKS)],)
    if api in LIVE:
        return [Cell(api, job, ranks, ranks) for ranks in sizes]
    shift = 1 + turn // len(RANKS) % (len(RANKS) - 1)
    found = [
        Cell(api, job, ranks, loaded)
        for ranks in sizes
        for loaded in (ranks, RANKS[(RANKS.index(ranks) + shift) % len(RANKS)])
    ]
    if all_ranks:
        return found
    another = api in PARTS or turn // len(RANKS) % 2
    return found[1:] if another else found[:1]


def fits(api: str, job: str) -> bool:
    """Whether an API carries what a job has."""
    return not JOBS[job].of_each_rank or api not in DURABLE or DURABLE[api].of_each_rank


def chosen(api: str, job: str) -> bool:
    """Whether a pair is tried every day: a third of all, and the commonest job with each API.

    Each API, and each job, is among these with every number of ranks.
    """
    return job == "FSDP2 + AdamW" or APIS.index(api) % 3 == list(JOBS).index(job) % 3


def all_cells(*, all_ranks: bool) -> Iterator[Cell]:
    for api in APIS:
        for job in JOBS:
            yield from cells(api, job, all_ranks=all_ranks)


# In the ranks. What a job is before an API, and what comes after, is worked out once a process.


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
    """Save a job, and next to it the portraits that a load is compared with."""
    place(1, cell.ranks)
    job = source(cell.job, 1, cell.ranks)
    _keep_portrait(job, root, rank)
    dist.barrier()
    DURABLE[cell.api].save(root, job)


def _keep_portrait(job: Job, root: str, rank: int) -> None:
    """What a rank has, with whole tensors. All ranks of the job call it together."""
    picture = portrait(job.plain())
    Path(root).mkdir(parents=True, exist_ok=True)
    torch.save(picture, Path(root) / f"portrait-{rank}.pt")


def load(rank: int, group: Any, cell: Cell, root: str) -> str:
    """Load into a new job and train it; what went wrong, if anything did."""
    here = place(1, cell.loaded)
    assert here is not None
    api = DURABLE[cell.api]
    known = rank if rank < cell.ranks else 0
    wanted = expected(cell.job, cell.ranks, cell.loaded, api.whole, root, known=known)
    job = JOBS[cell.job](here, OTHER)
    api.load(root, job)
    return compared(job.train(AFTER), wanted)


_expected: dict[tuple[str, int, int, bool, int, int], list[str]] = {}


def expected(
    job: str, ranks: int, loaded: int, whole: bool, root: str, *, known: int, first: int = 0
) -> list[str]:
    """The losses of a job that got its values from the portrait of rank `known` at `root`."""
    key = (job, ranks, loaded, whole, known, first)
    if key not in _expected:
        here = place(1, loaded, first)
        assert here is not None
        made = JOBS[job](here, OTHER)
        if whole:
            made.train(1)  # so that its optimizer has a state to be painted over
        picture = torch.load(Path(root) / f"portrait-{known}.pt", weights_only=False)
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
        LIVE[cell.api].send(job, rank + cell.ranks)
        return ""
    LIVE[cell.api].recv(job, rank - cell.ranks)
    return compared(job.train(AFTER), undisturbed(cell.job, 2, cell.ranks))


def parts(rank: int, group: Any, cell: Cell, root: str) -> str:
    """Send a job from its ranks to those of another, and train that one."""
    theirs = place(1, cell.ranks)
    here = place(1, cell.loaded, BEHIND)
    api = PARTS[cell.api]
    job = source(cell.job, 1, cell.ranks) if theirs else None
    if job is not None:
        _keep_portrait(job, root, rank)
    dist.barrier()
    if job is not None:
        api.send(job, list(range(BEHIND, BEHIND + cell.loaded)))
    if here is None:
        return ""
    # Values are those of the first source.
    wanted = expected(cell.job, cell.ranks, cell.loaded, True, root, known=0, first=BEHIND)
    made = JOBS[cell.job](here, OTHER)
    api.recv(made, list(range(cell.ranks)))
    return compared(made.train(AFTER), wanted)


def compared(got: list[str], expected: list[str]) -> str:
    return "" if got == expected else f"losses {got}, expected {expected}"


# In the test.


def run(cell: Cell, pools: dict[int, Any], root: Path) -> str:
    """Take a job through an API; what went wrong, if anything did."""
    try:
        if cell.api in LIVE:
            # A pool of its size, or the largest: not every rank of it takes part.
            pool = pools[2 * cell.ranks] if 2 * cell.ranks in pools else pools[8]
            found = pool.run(live, cell, timeout=90)
        elif cell.api in PARTS:
            target = str(root / f"{cell}".replace("/", "-"))
            found = pools[8].run(parts, cell, target, timeout=90)
        else:
            target = str(root / f"{cell.api}-{cell.job}-{cell.ranks}".replace("/", "-"))
            if not Path(target).exists():
                pools[cell.ranks].run(save, cell, target, timeout=90)
            found = pools[cell.loaded].run(load, cell, target, timeout=90)
    except Exception:
        return traceback.format_exc(limit=1)
    return "\n".join(f"rank {rank}: {said}" for rank, said in enumerate(found) if said)
