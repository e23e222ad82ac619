"""States as the page shows them, in JSON: the tree, histograms, changes. No torch."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import asdict
from math import prod
from typing import Any, Protocol

from torchrelay.inspection.comparison import compare, distance, touched
from torchrelay.inspection.facts import nbytes_of
from torchrelay.inspection.seam import Contents, StateReader
from torchrelay.inspection.statistics import histogram, statistics
from torchrelay.plan.stored import StoredTensor

SETTLED_BYTES = 64 << 20  # of tensors that are compared byte by byte


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


def _ranks(contents: Contents, tensor: StoredTensor) -> list[int]:
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
    if numbers is not None:
        low, high = float(numbers.min or 0.0), float(numbers.max or 0.0)
        counts = histogram(source, tensor, numbers)
        facts |= {**asdict(numbers), "low": low, "high": high, "counts": counts}
    return facts  # numbers that are not finite are null in JSON


def settle(found: dict[str, Any], one: StateReader, other: StateReader) -> None:
    """Compare the bytes of tensors where `changes` is not certain, up to a limit."""
    before = {tensor.name: tensor for tensor in one.contents.tensors}
    after = {tensor.name: tensor for tensor in other.contents.tensors}
    left = SETTLED_BYTES
    rows: list[list[Any]] = []
    for name, share, certain in found["touched"]:
        if not certain:
            left -= nbytes_of(before[name])
        if certain or left < 0:
            rows.append([name, share, certain])
        elif apart := distance((one, before[name]), (other, after[name])).differing:
            rows.append([name, apart / prod(before[name].shape), True])
        else:
            found["same"] += 1
    found["touched"] = rows


def changes(before: Contents, after: Contents) -> dict[str, Any]:
    """The differences between two states. `touched`: tensors that may have other bytes, which
    share at most, and whether that is certain. `same`: how many are certain to have the same."""
    found = compare(before, after)
    kept = set(found.same)
    rows = [[one.path, one.share, one.certain] for one in touched(before, after)]
    rows = [row for row in rows if row[0] in kept]
    return {
        "before": before.step,
        "after": after.step,
        "added": found.added,
        "removed": found.removed,
        "changed": [asdict(one) for one in found.changed],
        "touched": rows,
        "same": len(kept) - len(rows),
    }
