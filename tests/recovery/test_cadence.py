"""How often to stage and to save: the formulas, and that no other number of steps costs less."""

from __future__ import annotations

from math import inf, isclose

import pytest

import torchrelay as tr
from torchrelay.recovery.cadence import KeptCopy, cadence, cost, daly, failures, young


def test_young_and_daly() -> None:
    assert young(2.0, 10_000.0) == 200.0
    # Daly (2006), equation 37.
    part = (60 / (2 * 86_400.0)) ** 0.5
    expected = (2 * 60 * 86_400.0) ** 0.5 * (1 + part / 3 + part**2 / 9) - 60
    assert isclose(daly(60.0, 86_400.0), expected)
    assert daly(10.0, 4.0) == 4.0, "copies that take longer than failures come apart"


@pytest.mark.parametrize("stall", [0.05, 1.0, 20.0])
@pytest.mark.parametrize("mtbf", [3_600.0, 86_400.0, 1e6])
def test_hardly_any_other_number_of_steps_costs_less(stall: float, mtbf: float) -> None:
    copy = KeptCopy(stall, mtbf, restore=30.0)
    chosen = cadence(copy, step_seconds=0.5)
    best = min(cost(copy, 0.5, steps).lost for steps in range(1, 4 * chosen.steps + 2))
    assert chosen.lost <= best * 1.01


def test_limits() -> None:
    assert cadence(KeptCopy(0.0, 3_600.0, 1.0), 0.5).steps == 1, (
        "what costs nothing is done each step"
    )
    assert cadence(KeptCopy(0.1, 3_600.0, 1.0, shortest=100.0), 0.5).interval == 100.0
    never = cadence(KeptCopy(1.0, inf, 1.0), 0.5)
    assert never.interval == inf and never.lost == 0


def test_failures_of_a_job() -> None:
    often = failures(hosts=100, host_mtbf=1e7, beyond=0.1)
    assert isclose(1 / often.survived + 1 / often.lost, 100 / 1e7)
    assert failures(1, 1e7, 0.0) == (1e7, inf)
    assert failures(1, 1e7, 1.0) == (inf, 1e7)


@pytest.mark.parametrize(
    "copy", [KeptCopy(-1.0, 1.0, 1.0), KeptCopy(1.0, 0.0, 1.0), KeptCopy(1.0, 1.0, float("nan"))]
)
def test_what_cannot_be_is_refused(copy: KeptCopy) -> None:
    with pytest.raises(tr.UsageError):
        cadence(copy, 0.5)
    with pytest.raises(tr.UsageError):
        failures(0, 1.0, 0.5)
