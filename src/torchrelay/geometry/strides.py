"""Geometry of strided memory, in plain integers: what a view touches and how to walk it.

Strides and extents here count elements unless a name says bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import NamedTuple

from torchrelay.geometry.memo import remembered


class Layout(NamedTuple):
    """How a view with given shape and strides is packed without gaps.

    `order` lists the dimensions that own memory (size > 1, stride > 0) from slowest to fastest.
    `strides` are those of the packed view: same order, no gaps, 0 where the view was expanded; a
    view without gaps keeps its own.
    `numel` counts distinct elements.
    """

    order: tuple[int, ...]
    strides: tuple[int, ...]
    numel: int


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Row-major strides, as torch gives them (a size-0 dimension counts as 1)."""
    strides = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


@remembered(4096)
def extent(shape: tuple[int, ...], strides: tuple[int, ...]) -> int:
    """Elements from the first touched one to the last, both included."""
    if 0 in shape:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))


@remembered(4096)
def packed(shape: tuple[int, ...], strides: tuple[int, ...]) -> Layout | None:
    """The gapless layout of a view, or None where elements of the view overlap each other.

    Expanded dimensions (stride 0) do not count as overlap: their one element is kept once and the
    packed stride stays 0.
    """
    if 0 in shape:
        return Layout((), strides, 0)
    dims = [d for d, (size, stride) in enumerate(zip(shape, strides, strict=True)) if size > 1]
    order = sorted((d for d in dims if strides[d] > 0), key=lambda d: strides[d], reverse=True)
    reach = 1  # one past the last element reached by the faster dimensions
    for dim in reversed(order):
        if strides[dim] < reach:
            return None
        reach += (shape[dim] - 1) * strides[dim]
    numel = prod(shape[d] for d in order)
    if reach == numel:
        return Layout(tuple(order), strides, numel)
    # Size-1 dimensions get the stride torch would give them in row-major order.
    dense = list(contiguous_strides(shape))
    step = 1
    for dim in reversed(order):
        dense[dim] = step
        step *= shape[dim]
    for dim in dims:
        if strides[dim] == 0:
            dense[dim] = 0
    return Layout(tuple(order), tuple(dense), numel)


def linear_boxes(
    shape: Sequence[int], start: int, stop: int
) -> Iterator[tuple[int, tuple[slice, ...]]]:
    """Cut the row-major elements [start, stop) of an array into boxes.

    Yields (linear position of the box's first element, index of the box). Each box is contiguous in
    row-major order, so it can be filled from a flat run of elements. At most two boxes a dimension
    and one in the middle.
    """
    if start >= stop:
        return
    if not shape:
        yield 0, ()
        return
    row = prod(shape[1:])
    first, last = start // row, (stop - 1) // row
    if first == last and len(shape) > 1 and stop - start < row:
        for at, box in linear_boxes(shape[1:], start - first * row, stop - first * row):
            yield first * row + at, (slice(first, first + 1), *box)
        return
    head = -start % row
    if head:
        yield from linear_boxes(shape, start, start + head)
    lower, upper = (start + head) // row, stop // row
    if lower < upper:
        yield lower * row, (slice(lower, upper), *(slice(None) for _ in shape[1:]))
    if stop > max(upper * row, start + head):
        yield from linear_boxes(shape, upper * row, stop)


def overlapping(
    intervals: Sequence[tuple[int, int]],
) -> Iterator[list[int]]:
    """Group indices of half-open intervals that reach into each other, in order of position."""
    group: list[int] = []
    end = 0
    for index in sorted(range(len(intervals)), key=intervals.__getitem__):
        low, high = intervals[index]
        if group and low >= end:
            yield group
            group = []
        end = max(end, high) if group else high
        group.append(index)
    if group:
        yield group
