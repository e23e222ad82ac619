"""Live transfers: torch's `PGTransport`, torchft's transport and `Relay`, lap by lap in turn.

Each has processes of its own, since how one treats its memory would change what the other finds;
only one of them works at a time. A lap begins with a barrier and ends when the slowest rank, sender
or receiver, is done. The first lap of each kind is not counted: its result is compared with what
was sent, bit for bit.

The processes give freed memory back to the system, so torch's new tensors are in new memory in each
lap, but in memory that the system has just had in use: "warm". A `Relay` keeps memory by itself and
has it again in the next lap, which is part of what is compared; rows with pool=0 are without that.
`cold` has the first lap, where nobody has kept any. MIMALLOC_PURGE_DELAY=-1 lets torch keep memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from statistics import median

from benchmarks import tasks
from benchmarks.harness import Ranks, busy
from benchmarks.rows import By, Case, Kind, Measured, Row
from benchmarks.versus import Lap
from benchmarks.workloads import Workload

Crews = dict[By, Ranks]
BUSY = 0.1


def compare(
    workload: Workload, small: bool, skip: set[By], one: Ranks | None, tell: Callable[[str], None]
) -> Iterator[list[Row]]:
    """The rows of each heat; `skip` names who cannot run here, `one` is used for all if given."""
    cases = [case for case in workload.cases if case.theirs.by not in skip]
    # Where there is nothing to write into, there is room for new tensors, of two contenders.
    heats = [
        [case for case in cases if not case.ours.fresh],
        [case for case in cases if case.ours.fresh and case.theirs.by != "torchft"],
        [case for case in cases if case.theirs.by == "torchft"],
    ]
    crews: Crews = {}
    with ExitStack() as own:
        for heat in filter(None, heats):
            for kind in (kind for case in heat for kind in (case.theirs, case.ours)):
                if home(kind) not in crews:
                    # New ones for each workload: a heap that has grown under the last one would
                    # make new memory look cheaper than it is.
                    ranks = one or own.enter_context(Ranks(1 + workload.receivers))
                    crews[home(kind)] = ranks
                    if one is None and home(kind) == "torchft":
                        crews.pop("torch").close()
            yield _heat(workload, heat, small, crews, tell)


def home(kind: Kind) -> By:
    """Whose processes a kind runs in: the copy is measured in the receiver of ours."""
    return "torchrelay" if kind.by == "copy_" else kind.by


def _heat(
    workload: Workload, cases: list[Case], small: bool, crews: Crews, tell: Callable[[str], None]
) -> list[Row]:
    count = 1 + workload.receivers
    fresh = cases[0].ours.fresh
    what = f"{workload.title}, {'new tensors' if fresh else 'in place'}"
    tell(f"{what}: preparing")
    turns = list(dict.fromkeys(kind for case in cases for kind in (case.theirs, case.ours)))
    for by in dict.fromkeys(home(kind) for kind in turns):
        made = crews[by].run(tasks.prepare, workload.name, small, not fresh, count=count)
    others = busy(0.0 if small else 1.0)
    if others > BUSY:
        tell(f"{what}: others keep {others:.0%} of the cores busy, which changes the figures")
    first: dict[Kind, list[tuple[Lap, str]]] = {}
    laps: dict[Kind, list[list[Lap]]] = {kind: [] for kind in turns}
    tell(f"{what}: first lap")
    for kind in turns:
        first[kind] = crews[home(kind)].run(tasks.first_lap, kind, count=count)
    for repeat in range(workload.repeats):
        tell(f"{what}: lap {repeat + 1} of {workload.repeats}")
        for kind in turns:
            laps[kind].append(crews[home(kind)].run(tasks.lap, kind, count=count))
    found = {kind: measured(laps[kind], first[kind]) for kind in turns}
    return [
        Row(
            workload.name,
            workload.title,
            case,
            "warm" if fresh else "in use",
            workload.receivers,
            *made[0],
            found[case.theirs],
            found[case.ours],
            others,
        )
        for case in cases
    ]


def measured(laps: list[list[Lap]], first: list[tuple[Lap, str]]) -> Measured:
    return Measured(
        laps=[max(lap.seconds for lap in ranks) for ranks in laps],
        first=max(lap.seconds for lap, _ in first),
        bytes=max(ranks[0].bytes + sum(lap.read for lap in ranks) for ranks in laps),
        messages=max(ranks[0].messages for ranks in laps),
        exact=len({digest for _, digest in first}) == 1,
        route=" and ".join(sorted({lap.route for ranks in laps for lap in ranks[1:]})),
        cpu_seconds=median(sum(lap.cpu_seconds for lap in ranks) for ranks in laps),
        sender_phases=_phases([ranks[0] for ranks in laps]),
        receiver_phases=_phases([ranks[-1] for ranks in laps]),
    )


def _phases(laps: list[Lap]) -> dict[str, float]:
    return {name: median(lap.phases.get(name, 0.0) for lap in laps) for name in laps[0].phases}
