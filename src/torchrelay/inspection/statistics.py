"""Numbers about a tensor's values: norm, extremes, NaNs, a histogram. A slab is held at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from torchrelay.inspection.numbers import Array, numbers_of
from torchrelay.inspection.slabs import slabs

if TYPE_CHECKING:
    from torchrelay.inspection.opened_state import StateReader
    from torchrelay.planning.stored import StoredTensor

BINS = 64


@dataclass
class Statistics:
    """Of all elements that are finite; the others are counted. None: no element is finite."""

    norm: float = 0.0
    mean: float | None = None
    min: float | None = None
    max: float | None = None
    zeros: int = 0
    nan: int = 0
    inf: int = 0


def values(source: StateReader, tensor: StoredTensor) -> Iterator[Array] | None:
    """The numbers in a tensor, a slab at a time; None for a dtype that has none."""
    as_numbers = numbers_of(tensor.dtype)
    if as_numbers is None:
        return None
    return map(as_numbers, slabs(source, tensor))


def statistics(source: StateReader, tensor: StoredTensor) -> Statistics | None:
    """The statistics of a tensor; None for a dtype that has no numbers."""
    parts = values(source, tensor)
    if parts is None:
        return None
    found = Statistics()
    count, total, squares = 0, 0.0, 0.0
    for part in parts:
        finite, nan, inf = _finite(part)
        found.nan += nan
        found.inf += inf
        if not finite.size:
            continue
        low, high = finite.min().item(), finite.max().item()
        found.min = low if found.min is None else min(found.min, low)
        found.max = high if found.max is None else max(found.max, high)
        found.zeros += int(finite.size - np.count_nonzero(finite))
        precise = finite.astype("float64", copy=False)
        count += precise.size
        with np.errstate(over="ignore"):
            total += float(precise.sum())
            squares += float(np.dot(precise, precise))
    found.norm = float(np.sqrt(squares))
    found.mean = total / count if count else None
    return found


def _finite(part: Array) -> tuple[Array, int, int]:
    """The finite elements, and how many are NaN and infinite."""
    if part.dtype.kind != "f":
        return part, 0, 0
    whole = np.isfinite(part)
    if whole.all():
        return part, 0, 0
    nan = int(np.isnan(part).sum())
    return part[whole], nan, int(part.size - whole.sum()) - nan


def histogram(
    source: StateReader, tensor: StoredTensor, known: Statistics, bins: int = BINS
) -> list[int]:
    """How many finite elements of a tensor with these statistics lie in each of equal ranges from
    the least to the largest."""
    counts = np.zeros(bins, "int64")
    low, high = known.min or 0.0, known.max or 0.0
    # Halves, because the width of the whole range may be more than a float can hold.
    half = high / 2 - low / 2 or 1.0
    for part in values(source, tensor) or ():
        places = _finite(part)[0].astype("float64")
        places /= 2
        places -= low / 2
        places /= half
        places *= bins
        bars = places.astype("int64")
        np.clip(bars, 0, bins - 1, out=bars)
        counts += np.bincount(bars, minlength=bins)
    return [int(count) for count in counts]
