"""Statistics and histograms are what torch computes, NaNs and infinities counted apart."""

from __future__ import annotations

import math

import pytest
import torch

from tests.support.held_source import HeldSource
from torchrelay.inspection.statistics import Statistics, histogram, statistics


def of(tensor: torch.Tensor) -> Statistics:
    source = HeldSource({"t": tensor}, None)
    found = statistics(source, source.contents.tensors[0])
    assert found is not None
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_floats(dtype: torch.dtype) -> None:
    tensor = torch.randn(300, 7, generator=torch.Generator().manual_seed(1)).to(dtype)
    exact = tensor.to(torch.float64)
    found = of(tensor)
    assert math.isclose(found.norm, exact.norm().item(), rel_tol=1e-9)
    assert found.mean is not None and math.isclose(found.mean, exact.mean().item(), rel_tol=1e-9)
    assert (found.min, found.max) == (exact.min().item(), exact.max().item())
    assert (found.nan, found.inf) == (0, 0) and found.zeros == int((exact == 0).sum())


def test_what_is_not_finite_is_counted_and_left_out() -> None:
    found = of(torch.tensor([3.0, math.nan, -4.0, math.inf, -math.inf, math.nan, 0.0]))
    assert found == Statistics(5.0, -1 / 3, -4.0, 3.0, 1, 2, 2)
    assert of(torch.tensor([math.nan])) == Statistics(0.0, None, None, None, 0, 1, 0)


def test_integers_are_exact() -> None:
    found = of(torch.tensor([(1 << 62) + 1, -(1 << 62) - 1]))
    assert (found.min, found.max) == (-(1 << 62) - 1, (1 << 62) + 1)


def test_histogram() -> None:
    source = HeldSource({"t": torch.tensor([0.0, 1.0, 1.9, 2.0, 10.0, math.nan, math.inf])})
    known = statistics(source, source.contents.tensors[0])
    assert known is not None
    assert (known.min, known.max, known.nan, known.inf) == (0.0, 10.0, 1, 1)
    assert histogram(source, source.contents.tensors[0], known, bins=5) == [3, 1, 0, 0, 1]


@pytest.mark.parametrize("value", [0.0, -1e308, 5.0])
def test_histogram_of_one_value_and_of_the_widest_range(value: float) -> None:
    tensor = torch.tensor([value, value, 1.7e308 if value < 0 else value], dtype=torch.float64)
    source = HeldSource({"t": tensor})
    known = statistics(source, source.contents.tensors[0])
    assert known is not None
    assert sum(histogram(source, source.contents.tensors[0], known, bins=4)) == 3
