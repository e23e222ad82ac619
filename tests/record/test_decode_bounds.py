"""No input of 2 MB costs more than 2 seconds or 300 MB to read, whoever wrote it.

Inputs and readers stand in `tests/support/hostile.py`; what each costs is printed, the worst first.
"""

from __future__ import annotations

import pytest

from tests.support.hostile import CASES, LENGTH, SOON, Case, Cost, measure
from tests.support.records import stream_record
from torchrelay.errors import TransferTimeoutError
from torchrelay.record import manifest as m
from torchrelay.record.encoding import decode, encode

SECONDS = 2.0
MEGABYTES = 300.0
SLACK = 3.0  # CPU seconds count for more on a machine that others keep busy

costs: list[Cost] = []


@pytest.fixture(scope="module", autouse=True)
def table() -> object:
    yield
    for cost in sorted(costs, key=lambda one: -one.seconds):
        print(f"{cost.seconds:7.2f} s {cost.megabytes:5.0f} MB {cost.name}: {cost.outcome}")


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=case.name, marks=[] if case.name in SOON else [pytest.mark.slow])
        for case in CASES
    ],
)
def test_an_input_costs_no_more_than_its_length_allows(case: Case) -> None:
    cost = measure(case)
    costs.append(cost)
    assert cost.nbytes <= LENGTH * 1.1
    assert not cost.outcome.startswith("BARE"), cost
    assert cost.seconds < SECONDS * SLACK, cost
    assert cost.megabytes < MEGABYTES, cost


def test_the_deadline_ends_the_decoding_of_a_large_tree() -> None:
    tree: m.Node = m.SequenceNode("list", (m.SequenceNode("list", ()),) * 100_000)
    data = encode(stream_record(tree))
    looks = []

    def in_time() -> None:
        looks.append(0)
        if len(looks) > 20:
            raise TransferTimeoutError("late")

    with pytest.raises(TransferTimeoutError):
        decode(data, in_time=in_time)
