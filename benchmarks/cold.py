"""New tensors in cold memory: the first lap of new processes after the machine has been idle.

Cold memory cannot be had on demand. The pause is the closest to it, and the rate at which memory is
handed out before and after tells whether it worked. One pause serves both contenders: what the
first received is kept until the second is done, so that the second does not get its memory. They
go first in turn.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from benchmarks import tasks
from benchmarks.harness import Ranks, busy
from benchmarks.live import measured
from benchmarks.pages import Probe, just_freed
from benchmarks.rows import Bar, Case, Kind, Row
from benchmarks.versus import NEW, Lap
from benchmarks.workloads import Workload


@dataclass(frozen=True)
class Cold:
    """How long to leave the machine alone, and whether the seconds are judged."""

    seconds: float
    judged: bool = True


def cold_row(workload: Workload, small: bool, cold: Cold, tell: Callable[[str], None]) -> Row:
    theirs, ours = Kind("torch", NEW), Kind("torchrelay", NEW)
    laps: dict[Kind, list[list[Lap]]] = {theirs: [], ours: []}
    first: dict[Kind, list[tuple[Lap, str]]] = {theirs: [], ours: []}
    evidence: list[dict[str, Any]] = []
    others = 0.0
    count = 1 + workload.receivers
    for sample in range(workload.cold_samples):
        tell(f"{workload.title}, cold: sample {sample + 1} of {workload.cold_samples}")
        with Ranks(count) as torchs, Ranks(count) as relays:
            crews = {theirs: torchs, ours: relays}
            for ranks in crews.values():
                tensors, size = ranks.run(tasks.prepare, workload.name, small, False)[0]
            warm = just_freed()
            others = max(others, busy(cold.seconds))
            probe = Probe()
            order = [theirs, ours] if sample % 2 == 0 else [ours, theirs]
            for kind in order:
                laps[kind].append(crews[kind].run(tasks.held_lap, kind))
            probe.close()
            for kind in order:
                digests = crews[kind].run(tasks.seen, kind)
                first[kind] += zip(laps[kind][-1], digests, strict=True)
        evidence.append(
            {
                "first": order[0].by,
                "populate_gb_s_just_freed": warm,
                "populate_gb_s_after_pause": probe.rates,
            }
        )
    return Row(
        workload.name,
        workload.title,
        Case(ours, theirs, Bar(speed=1.0) if cold.judged else None),
        "cold",
        workload.receivers,
        tensors,
        size,
        measured(laps[theirs], first[theirs]),
        measured(laps[ours], first[ours]),
        others,
        evidence,
    )
