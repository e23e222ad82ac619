"""What the page shows of states, as JSON: the tree, histograms, what changed. No torch."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import asdict
from math import isfinite, prod
from typing import Any, Protocol

from torchrelay.inspection.comparison import compare, touched
from torchrelay.inspection.facts import nbytes_of
from torchrelay.inspection.seam import BoxedTensor, Contents, StateReader
from torchrelay.inspection.statistics import histogram, statistics


class WatchedSteps(Protocol):
    """The steps that a page looks into. One that is not there raises `KeyError`."""

    def steps(self) -> list[int]:
        """Steps whose contents are known, in ascending order."""

    def contents(self, step: int) -> Contents: ...

    def source(self, step: int) -> AbstractContextManager[StateReader]:
        """The step, to be read from."""


def tree(contents: Contents) -> dict[str, Any]:
    """Every path of a state. Rows are short, because a state may have many thousands."""
    return {
        "step": contents.step,
        "ranks": contents.ranks,
        "tensors": [
            [tensor.name, tensor.dtype, tensor.shape, nbytes_of(tensor), _ranks(contents, tensor)]
            for tensor in contents.tensors
        ],
        "values": [[value.path, value.text] for value in contents.values],
        "aliases": [[alias.path, alias.tensor] for alias in contents.aliases],
    }


def _ranks(contents: Contents, tensor: BoxedTensor) -> list[int]:
    found = {contents.volumes[box.file].rank for box in tensor.shards}
    return sorted(rank for rank in found if rank is not None)


def values(source: StateReader, name: str) -> dict[str, Any]:
    """Statistics and a histogram of a tensor; `KeyError` if there is no such tensor."""
    tensor = next((one for one in source.contents.tensors if one.name == name), None)
    if tensor is None:
        raise KeyError(name)
    facts: dict[str, Any] = {
        "tensor": name,
        "dtype": tensor.dtype,
        "shape": tensor.shape,
        "elements": prod(tensor.shape),
        "counts": None,
    }
    numbers = statistics(source, tensor)
    bars = histogram(source, tensor, known=numbers)
    if numbers is not None and bars is not None:
        facts |= {name: _finite(value) for name, value in asdict(numbers).items()}
        facts |= {"low": _finite(bars.low), "high": _finite(bars.high), "counts": bars.counts}
    return facts


def _finite(value: float | int | None) -> float | int | None:
    return None if isinstance(value, float) and not isfinite(value) else value


def changes(before: Contents, after: Contents) -> dict[str, Any]:
    """What two states do not have in common. `touched`: tensors with bytes in chunks that differ,
    the share of such bytes, and whether that is certain to be the tensor's own difference; None
    where the digests cannot tell. `same`: how many tensors have the same bytes."""
    found = compare(before, after)
    other = touched(before, after)
    kept = set(found.same)
    rows = None
    if other is not None:
        rows = [[one.path, one.share, one.certain] for one in other if one.path in kept]
    return {
        "before": before.step,
        "after": after.step,
        "added": found.added,
        "removed": found.removed,
        "changed": [asdict(one) for one in found.changed],
        "touched": rows,
        "same": len(kept) - len(rows or ()),
    }
