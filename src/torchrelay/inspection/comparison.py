"""Comparison of two states: common and different tensors, by digests of chunks or by their values.
No torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from torchrelay.arguments import matches
from torchrelay.inspection.numbers import Array, numbers_of
from torchrelay.inspection.slabs import slabs
from torchrelay.record.dtypes import itemsize

if TYPE_CHECKING:
    from torchrelay.inspection.opened_state import Contents, StateReader
    from torchrelay.planning.stored import StoredTensor
    from torchrelay.record.schema import VolumeRecord


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
    digests = {value.path: value.digest for value in before.values if value.digest}
    cut = {
        value.path
        for value in after.values
        if value.digest and digests.get(value.path, value.digest) != value.digest
    }
    changed = [
        Changed(path, text, other[path])
        for path, text in one.items()
        if path in other and (other[path] != text or path in cut)
    ]
    tensors = {tensor.name for tensor in before.tensors}
    return Differences(
        [path for path in other if path not in one],
        [path for path in one if path not in other],
        changed,
        [path for path, text in one.items() if path in tensors and other.get(path) == text],
    )


def thawed(found: Differences, patterns: Sequence[str]) -> list[str]:
    """Paths that match a pattern and are not in both states, or have another shape, dtype or plain
    value there."""
    paths = [*found.removed, *found.added, *(change.path for change in found.changed)]
    return [path for path in paths if matches(path, patterns)]


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


@dataclass(frozen=True)
class Touched:
    """A tensor that may have other bytes, and which share of them at most. `certain`: it has some,
    since a chunk that differs is all its own. Else the difference may be in what it shares a chunk
    with, or it lies elsewhere than before, so that digests tell nothing."""

    path: str
    share: float
    certain: bool


def touched(before: Contents, after: Contents) -> list[Touched]:
    """Tensors of both states that are not certain to have the same bytes."""
    known = {volume.name: volume for volume in before.volumes}
    other = [_differing(known.get(volume.name), volume) for volume in after.volumes]
    places = {tensor.name: _places(before, tensor) for tensor in before.tensors}
    found = []
    for tensor in after.tensors:
        if tensor.name not in places:
            continue
        if places[tensor.name] == _places(after, tensor):
            one = _touched(tensor, other)
        else:
            one = Touched(tensor.name, 1.0, False)
        if one.share:
            found.append(one)
    return found


def _places(contents: Contents, tensor: StoredTensor) -> list[tuple[str, int, tuple[int, ...]]]:
    return [(contents.volumes[box.file].name, box.start, box.sizes) for box in tensor.shards]


def _touched(tensor: StoredTensor, other: list[_ChunkDiff | None]) -> Touched:
    total = differing = own = 0
    for box in tensor.shards:
        diff = other[box.file]
        if diff is None:
            return Touched(tensor.name, 1.0, False)
        stop = box.start + prod(box.sizes) * itemsize(tensor.dtype)
        in_differing, in_own = diff.within(box.start, stop)
        total, differing, own = total + stop - box.start, differing + in_differing, own + in_own
    return Touched(tensor.name, differing / total if total else 0.0, own > 0)


class _ChunkDiff(NamedTuple):
    """Which chunks of a volume differ."""

    size: int  # of a chunk
    nbytes: int
    differs: Array

    def within(self, start: int, stop: int) -> tuple[int, int]:
        """How many bytes of a range lie in chunks that differ, and how many in those of them that
        lie in the range."""
        first, last = start // self.size, -(-stop // self.size)
        low = np.arange(first, last) * self.size
        high = np.minimum(low + self.size, self.nbytes)  # the last chunk may be shorter
        shared = np.minimum(high, stop) - np.maximum(low, start)
        differs = self.differs[first:last]
        whole = differs & (shared == high - low)
        return int(shared[differs].sum()), int(shared[whole].sum())


def _differing(one: VolumeRecord | None, other: VolumeRecord) -> _ChunkDiff | None:
    """None where the digests cannot be compared."""
    if one is None or not one.digests or len(one.digests) != len(other.digests):
        return None
    if (one.nbytes, one.chunk_bytes) != (other.nbytes, other.chunk_bytes):
        return None
    rows = [np.frombuffer(volume.digests, "V16") for volume in (one, other)]
    return _ChunkDiff(one.chunk_bytes, one.nbytes, rows[0] != rows[1])
