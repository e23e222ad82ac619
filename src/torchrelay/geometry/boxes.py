"""Boxes of a tensor, by offsets and sizes: which elements two of them share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from torchrelay.errors import ManifestError

Box = tuple[tuple[int, ...], tuple[int, ...]]
Numbers = np.ndarray[Any, np.dtype[np.int64]]

MAX_COMPARISONS = 1 << 20  # of edges, beyond those that a grid of its boxes takes
_GRID = 64  # boxes side by side that a box may be compared with at no charge
_MANY = 256  # boxes that are not compared all with all


class Comparisons:
    """Comparisons of boxes, with a limit on the number that one record may cost."""

    def __init__(self) -> None:
        self._left = MAX_COMPARISONS

    def overlap(self, boxes: Sequence[Box]) -> bool:
        """Whether any two boxes, which lie inside of one tensor, share an element.

        `ManifestError` where the boxes are set in such a way that it takes too long to tell.
        """
        boxes = [box for box in boxes if 0 not in box[1]]
        if len(boxes) < 2:
            return False
        dims = range(len(boxes[0][0]))
        if not dims:
            return True
        low, high = np.array(boxes, np.int64)[:, 0], np.array(boxes, np.int64).sum(1)
        if len(boxes) <= _MANY:
            meet = ((low[:, None] < high[None]) & (low[None] < high[:, None])).all(2)
            return int(meet.sum()) > len(boxes)  # each meets itself
        # Along the dimension with the most cuts, few boxes lie side by side. Numbers of a peer are
        # better sorted than hashed.
        dim = max(dims, key=lambda d: len(np.unique(low[:, d])))
        order = np.argsort(low[:, dim], kind="stable")
        low, high = low[order], high[order]
        beside = np.zeros(0, np.int64)
        for number in range(len(boxes)):
            beside = beside[high[beside, dim] > low[number, dim]]
            self._left -= max(len(beside) - _GRID, 0) * len(dims)
            if self._left < 0:
                raise ManifestError("shards that are cut in too many ways")
            separate = (low[beside] >= high[number]) | (high[beside] <= low[number])
            if not separate.any(1).all():
                return True
            beside = np.append(beside, number)
        return False


def is_grid(offsets: Numbers, sizes: Numbers, shape: Sequence[int]) -> bool:
    """Whether boxes inside of a shape, a row each, are the cells of a grid over all of it, each of
    them once. False says nothing: they may still cover it."""
    cells, place = 1, np.zeros(len(offsets), np.int64)
    for dim, length in enumerate(shape):
        starts, cell = np.unique(offsets[:, dim], return_inverse=True)
        ends = np.append(starts[1:], length)
        if starts[0] or (offsets[:, dim] + sizes[:, dim] != ends[cell]).any():
            return False
        cells *= len(starts)
        if cells > len(offsets):
            return False
        place = place * len(starts) + cell
    return cells == len(offsets) == len(np.unique(place))


def shared(one: Box, other: Box) -> Box | None:
    """The box of the elements that two boxes have in common, if there are any."""
    offsets = tuple(map(max, one[0], other[0]))
    sizes = tuple(
        [min(a + n, b + m) - start for a, n, b, m, start in zip(*one, *other, offsets, strict=True)]
    )
    return None if any(size < 1 for size in sizes) else (offsets, sizes)


def within(inner: Box, outer: Box) -> tuple[int, ...]:
    """The offsets of a box from those of a box around it."""
    return tuple([a - b for a, b in zip(inner[0], outer[0], strict=True)])


def around(boxes: Sequence[Box]) -> Box:
    """The smallest box with all of these in it."""
    low = tuple(map(min, zip(*(offsets for offsets, _ in boxes), strict=True)))
    ends = [tuple(map(sum, zip(*box, strict=True))) for box in boxes]
    high = map(max, zip(*ends, strict=True))
    return low, tuple([end - start for start, end in zip(low, high, strict=True)])


def without(whole: Box, holes: Sequence[Box]) -> list[Box]:
    """Disjoint boxes with the elements of a box that are in none of the `holes`."""
    left = [whole]
    for hole in holes:
        left = [part for box in left for part in _outside(box, hole)]
    return left


def _outside(box: Box, hole: Box) -> list[Box]:
    """The rest of a box around a hole: a slab before and after it in each dimension."""
    inner = shared(box, hole)
    if inner is None:
        return [box]
    found: list[Box] = []
    offsets, sizes = list(box[0]), list(box[1])
    for dim, (start, size) in enumerate(zip(*inner, strict=True)):
        end = offsets[dim] + sizes[dim]
        for low, high in ((offsets[dim], start), (start + size, end)):
            if low < high:
                slab = [*offsets], [*sizes]
                slab[0][dim], slab[1][dim] = low, high - low
                found.append((tuple(slab[0]), tuple(slab[1])))
        offsets[dim], sizes[dim] = start, size
    return found


def run_of(box: Box, shape: Sequence[int]) -> int | None:
    """Where the elements of a box begin in a row-major array of this shape, if they lie together
    there."""
    at, step, cut = 0, 1, False
    for offset, size, length in zip(*map(reversed, (*box, shape)), strict=True):
        if cut and size != 1:
            return None
        cut = cut or size != length
        at, step = at + offset * step, step * length
    return at
