"""Two states beside each other: paths, shapes, dtypes, and how far apart the values are."""

from __future__ import annotations

import math
from pathlib import Path

import torch

import torchrelay as tr
from tests.support.held_source import HeldSource
from torchrelay.inspection.comparison import Changed, compare, distance
from torchrelay.inspection.opened_state import PlainValue
from torchrelay.inspection.step_source import contents_of


def test_paths_shapes_and_values() -> None:
    one = HeldSource({"a": torch.zeros(2), "b": torch.zeros(3), "c": torch.zeros(1)})
    other = HeldSource({"b": torch.zeros(3, 1), "c": torch.ones(1), "d": torch.zeros(2)})
    before = one.contents._replace(values=(PlainValue("lr", "0.1"), PlainValue("n", "1")))
    after = other.contents._replace(values=(PlainValue("lr", "0.2"), PlainValue("n", "1")))
    found = compare(before, after)
    assert (found.added, found.removed, found.same) == (["d"], ["a"], ["c"])
    assert found.changed == [
        Changed("b", "float32 3", "float32 3x1"),
        Changed("lr", "0.1", "0.2"),
    ]
    assert not found.equal and compare(before, before).equal


def test_long_values_are_compared_whole(tmp_path: Path) -> None:
    with tr.Checkpointer(tmp_path) as checkpointer:
        same = {"text": "x" * 200, "set": {*range(500)}, "zero": 0, "n": float("nan")}
        other = {"text": "x" * 199 + "y", "set": {*range(499), 999}, "zero": 0, "n": float("nan")}
        for step, state in enumerate((same, same, other)):
            checkpointer.save(step, state)
        found = [contents_of(checkpointer.record(step)) for step in range(3)]
    assert compare(found[0], found[1]).equal
    assert [one.path for one in compare(found[0], found[2]).changed] == ["text", "set"]


def test_distance_of_tensors_that_are_cut_otherwise() -> None:
    tensor = torch.arange(24, dtype=torch.float32).reshape(4, 6)
    moved = tensor.clone()
    moved[3, 5] += 3.0
    one = HeldSource({"t": tensor}, {"t": [((0, 0), (2, 6)), ((2, 0), (2, 6))]})
    other = HeldSource({"t": moved}, {"t": [((0, 0), (4, 1)), ((0, 1), (4, 5))]})
    found = distance((one, one.contents.tensors[0]), (other, other.contents.tensors[0]))
    assert (found.elements, found.differing, found.largest) == (24, 1, 3.0)
    assert found.relative is not None
    assert math.isclose(found.relative, 3.0 / tensor.norm().item(), rel_tol=1e-6)


def test_distance_sees_a_nan_and_the_sign_of_zero() -> None:
    one = HeldSource({"t": torch.tensor([1.0, 0.0, 2.0])})
    other = HeldSource({"t": torch.tensor([math.nan, -0.0, 2.0])})
    found = distance((one, one.contents.tensors[0]), (other, other.contents.tensors[0]))
    assert (found.differing, found.largest) == (2, 0.0)
