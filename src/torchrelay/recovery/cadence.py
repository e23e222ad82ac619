"""How often to stage and to save: the work that failures cost, weighed against the stalls.

A copy every `t` seconds costs its stall each time, and a failure costs on average half of `t` of
work done again, and the time to be back. At Young's `t = sqrt(2 * stall * mtbf)` the two are equal;
Daly's has the terms that matter where failures are frequent. Pure.
"""

from __future__ import annotations

from math import inf, sqrt
from typing import NamedTuple

from torchrelay.errors import UsageError


class KeptCopy(NamedTuple):
    """A way to keep a copy: what it stalls training by, what failures it is for, how it is
    restored. Seconds."""

    stall: float
    mtbf: float  # between failures that need this copy
    restore: float
    shortest: float = 0.0  # a copy takes so long in the background: no next one before


class Cadence(NamedTuple):
    """How often to make a copy, and what that costs. Fractions of the time."""

    interval: float  # seconds; infinite where there is nothing to save
    steps: int  # the same in steps
    stalled: float
    redone: float
    restoring: float

    @property
    def lost(self) -> float:
        return self.stalled + self.redone + self.restoring


def young(stall: float, mtbf: float) -> float:
    """Young's interval between copies, in seconds."""
    return sqrt(2 * stall * mtbf)


def daly(stall: float, mtbf: float) -> float:
    """Daly's interval of higher order; the time between failures where copies take longer."""
    if stall >= 2 * mtbf:
        return mtbf
    part = sqrt(stall / (2 * mtbf))
    return young(stall, mtbf) * (1 + part / 3 + part * part / 9) - stall


def cadence(copy: KeptCopy, step_seconds: float) -> Cadence:
    """The best whole number of steps between two copies, at least one."""
    for name, value in (("mtbf", copy.mtbf), ("a step's seconds", step_seconds)):
        if not value > 0:
            raise UsageError(f"{name} is a positive number, not {value}")
    for name, value in zip(
        ("stall", "restore", "shortest"), (copy.stall, copy.restore, copy.shortest), strict=True
    ):
        if not 0 <= value < inf:
            raise UsageError(f"{name} is a number of seconds, not {value}")
    wanted = max(daly(copy.stall, copy.mtbf), copy.shortest)
    if wanted == inf:
        return Cadence(inf, 0, 0.0, 0.0, 0.0)
    steps = max(1, round(wanted / step_seconds))
    return cost(copy, step_seconds, steps)


def cost(copy: KeptCopy, step_seconds: float, steps: int) -> Cadence:
    """What a copy every so many steps costs."""
    interval = steps * step_seconds
    return Cadence(
        interval,
        steps,
        copy.stall / (interval + copy.stall),
        (interval + copy.stall) / 2 / copy.mtbf,
        copy.restore / copy.mtbf,
    )


class Failures(NamedTuple):
    """Seconds between failures of the whole job: of a process or a host, whose state is in other
    memory, and of more than memory survives."""

    survived: float
    lost: float


def failures(hosts: int, host_mtbf: float, beyond: float) -> Failures:
    """Of a job on so many hosts, each of which fails once in `host_mtbf` seconds; `beyond` is the
    share of failures that take every copy in memory along (power, network, two hosts at once)."""
    if hosts < 1 or not host_mtbf > 0 or not 0 <= beyond <= 1:
        raise UsageError(
            "hosts is at least 1, their time between failures positive, and the share of "
            f"failures beyond memory 0 to 1, not {hosts}, {host_mtbf} and {beyond}"
        )
    all_of_them = host_mtbf / hosts
    survived = all_of_them / (1 - beyond) if beyond < 1 else inf
    return Failures(survived, all_of_them / beyond if beyond > 0 else inf)
