"""Comparison of two states: common and different tensors, and the distance of their values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from torchrelay.inspection.numbers import Array, numbers_of
from torchrelay.inspection.slabs import slabs
from torchrelay.record.dtypes import itemsize

if TYPE_CHECKING:
    from torchrelay.inspection.seam import Contents, StateReader
    from torchrelay.plan.stored import StoredTensor


@dataclass(frozen=True)
class Changed:
    """A path that both states have, with another dtype, shape or value there."""

    path: str
    before: str
    after: str


@dataclass(frozen=True)
class Distance:
    """How far the values of a tensor are apart. `differing` elements differ in at least a bit;
    `largest` is the largest absolute difference, `relative` the norm of all differences by the norm
    of the values before. NaN where the other has a number too counts as differing alone."""

    path: str
    elements: int
    differing: int
    largest: float | None
    relative: float | None


@dataclass(frozen=True)
class Differences:
    added: list[str]
    removed: list[str]
    changed: list[Changed]
    same: list[str]

    @property
    def equal(self) -> bool:
        return not (self.added or self.removed or self.changed)


def compare(before: Contents, after: Contents) -> Differences:
    """Paths that were added and removed, and those with another shape, dtype or plain value."""
    one, other = _described(before), _described(after)
    changed = [
        Changed(path, text, other[path])
        for path, text in one.items()
        if path in other and other[path] != text
    ]
    tensors = {tensor.name for tensor in before.tensors}
    return Differences(
        [path for path in other if path not in one],
        [path for path in one if path not in other],
        changed,
        [path for path, text in one.items() if path in tensors and other.get(path) == text],
    )


def _described(contents: Contents) -> dict[str, str]:
    found = {tensor.name: kind_of(tensor) for tensor in contents.tensors}
    found |= {value.path: value.text for value in contents.values}
    return found | {alias.path: f"tied to {alias.tensor}" for alias in contents.aliases}


def kind_of(tensor: StoredTensor) -> str:
    """Dtype and shape, as one writes them."""
    return f"{tensor.dtype} {'x'.join(map(str, tensor.shape)) or '()'}"


def distance(
    one: tuple[StateReader, StoredTensor], other: tuple[StateReader, StoredTensor]
) -> Distance:
    """How far apart two tensors of one dtype and shape are, however each is cut."""
    tensor = one[1]
    size = itemsize(tensor.dtype)
    as_numbers = numbers_of(tensor.dtype)
    elements = differing = 0
    largest = gaps = squares = 0.0
    for before, after in zip(slabs(*one), slabs(*other), strict=True):
        elements += before.size // size
        unequal = (before.reshape(-1, size) != after.reshape(-1, size)).any(axis=1)
        count = int(unequal.sum())
        differing += count
        if as_numbers is None:
            continue
        old = as_numbers(before).astype("float64")
        with np.errstate(over="ignore", invalid="ignore"):
            squares += _square_sum(old)
            if count:
                gap = np.abs(as_numbers(after).astype("float64") - old)
                gaps += _square_sum(gap)
                largest = max(largest, float(np.nanmax(gap, initial=0.0)))
    if as_numbers is None:
        return Distance(tensor.name, elements, differing, None, None)
    relative = float(np.sqrt(gaps / squares)) if squares else None
    return Distance(tensor.name, elements, differing, largest, relative if differing else 0.0)


def _square_sum(numbers: Array) -> float:
    finite = numbers[np.isfinite(numbers)]
    return float(np.dot(finite, finite))
