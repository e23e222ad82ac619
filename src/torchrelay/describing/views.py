"""Tensors as views of memory: which of them share bytes, and the bytes that they share."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import gcd
from typing import NamedTuple

import msgspec
import numpy as np
import torch

from torchrelay.errors import UnsupportedLeafError
from torchrelay.geometry.strides import contiguous_strides, overlapping, packed
from torchrelay.state.tensors import byte_offset, flat_bytes, raw, raw_of

Storage = tuple[str, int, int]  # kind and number of the device of a storage, and its first byte


class View(msgspec.Struct, frozen=True, gc=False):
    """One tensor's geometry; `low` and `high` are addresses. (A struct: there is one a tensor, and
    a named tuple costs several times as much to make.)"""

    tensor: torch.Tensor
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    itemsize: int
    low: int
    high: int
    dtype: str
    flags: int
    storage: Storage

    @property
    def is_located(self) -> bool:
        """Whether its address says if it shares memory with others."""
        kind, number, _ = self.storage
        return number >= 0 and kind in ("cpu", "cuda")

    @property
    def dims(self) -> Iterator[tuple[int, int]]:
        """The size and stride of each dimension."""
        return zip(self.shape, self.strides, strict=True)

    @property
    def geometry(self) -> tuple[int, int, tuple[int, ...], tuple[int, ...]]:
        """Equal for views that have the same elements."""
        return self.low, self.itemsize, self.shape, self.strides

    @property
    def kept_strides(self) -> tuple[int, ...] | None:
        """Its strides, unless they are row-major."""
        return None if self.strides == contiguous_strides(self.shape) else self.strides

    @property
    def fills_its_span(self) -> bool:
        """Whether its elements are all bytes from the first to the last, each once."""
        layout = packed(self.shape, self.strides)
        return layout is not None and layout.numel * self.itemsize == self.high - self.low


def sharing(views: Sequence[View]) -> Iterator[list[int]]:
    """Group the views of one storage that have bytes in common, directly or through others.

    Views that lie between each other's elements share none. Of these four, `a`, `c` and `d` are
    one group, and `b` is another:

        byte   0 1 2 3 4 5 6 7
        a      x   x   x
        b        x   x
        c              x x x
        d                x
    """
    for group in overlapping([(view.low, view.high) for view in views]):
        some = [views[number] for number in group]
        low, high = min(view.low for view in some), max(view.high for view in some)
        is_one = all(view.geometry == some[0].geometry for view in some)
        if is_one or any((v.low, v.high) == (low, high) and v.fills_its_span for v in some):
            yield group
        else:
            yield from ([group[n] for n in numbers] for numbers in _meeting(some, low, high))


class _ByteRuns(NamedTuple):
    """The bytes of a view: runs of `run` bytes, the first at `offset`, further ones by `steps`."""

    offset: int
    run: int
    sizes: list[int]
    steps: list[int]

    @classmethod
    def of(cls, view: View, low: int) -> _ByteRuns:
        run = view.itemsize
        outer: list[tuple[int, int]] = []
        dims = sorted((step * view.itemsize, size) for size, step in view.dims)
        for step, size in dims:
            if step == run and not outer:
                run *= size
            elif step and size > 1:
                outer.append((size, step))
        return cls(view.low - low, run, [size for size, _ in outer], [step for _, step in outer])


def _meeting(views: Sequence[View], low: int, high: int) -> Iterator[list[int]]:
    """Group views that have bytes in common by marking in a map who has which byte."""
    found = [_ByteRuns.of(view, low) for view in views]
    unit = 0  # bytes that always go together: the map has one number for them
    for runs in found:
        unit = gcd(unit, runs.offset, runs.run, *runs.steps)
    owners = np.full((high - low) // unit, -1, np.int32)
    groups = np.arange(len(views))
    for number, runs in enumerate(found):
        here = np.lib.stride_tricks.as_strided(
            owners[runs.offset // unit :],
            (*runs.sizes, runs.run // unit),
            (*(step // unit * owners.itemsize for step in runs.steps), owners.itemsize),
        )
        if here.max() >= 0:
            met = groups[np.unique(here[here >= 0])]
            groups[np.isin(groups, met)] = number
        here[...] = number
    for group in np.unique(groups):
        yield np.flatnonzero(groups == group).tolist()


def shared_bytes(views: Sequence[View]) -> tuple[int, torch.Tensor]:
    """Where the common extent of views that share memory begins, and its bytes: as they lie there
    if one view has all of them, else zeros with the elements of the views. No other byte of their
    storage gets there."""
    first = min(views, key=lambda view: view.low)
    largest = max(views, key=lambda view: view.itemsize)
    low = first.low - (first.low - largest.low) % largest.itemsize  # so that each stays aligned
    high = max(view.high for view in views)
    for view in views:
        if (view.low - low) % view.itemsize:
            raise UnsupportedLeafError(
                f"elements of a tensor of {view.dtype} and shape {view.shape} begin amid those "
                "of another over the same memory: give a clone of it"
            )
    for view in views:
        if (view.low, view.high) == (low, high) and view.fills_its_span:
            storage, offset = view.tensor.untyped_storage(), byte_offset(view.tensor)
            return low, flat_bytes(storage, offset, high - low)
    memory = torch.zeros(high - low, dtype=torch.uint8, device=first.tensor.device)
    for view in views:
        once = [1 if step == 0 else size for size, step in view.dims]
        elements = raw_of(view.tensor)[tuple([slice(size) for size in once])]
        storage = memory.untyped_storage()
        raw(storage, view.low - low, view.itemsize, once, view.strides).copy_(elements)
    return low, memory
