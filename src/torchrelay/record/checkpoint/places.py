"""Whether the boxes that a record names are those of their tensors, and lie in its files."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Protocol

import numpy as np

from torchrelay.errors import ManifestError
from torchrelay.geometry.boxes import Comparisons, Numbers, is_grid
from torchrelay.record.checkpoint.stored import Tensors, Tiling
from torchrelay.record.dtypes import itemsize
from torchrelay.record.manifest import MAX_DIMS

ALIGN = 8  # of a tensor's first byte in its file, or its item size if that is less
LARGE = 1 << 62  # numbers below it can be added without a thought
_FEW = 8  # boxes that are looked at one by one


class PlacedBox(Protocol):
    """A box of a tensor, and the file and the byte of it where its elements begin."""

    @property
    def offsets(self) -> tuple[int, ...]: ...
    @property
    def sizes(self) -> tuple[int, ...]: ...
    @property
    def file(self) -> int: ...
    @property
    def start(self) -> int: ...


def check_tensors(tensors: Tensors, files: Sequence[int], *, whole: bool = True) -> None:
    """Raise `ManifestError` unless the boxes of each tensor lie inside of it and of files of these
    sizes; and have each element once, if they are to be `whole`."""
    if len(set(tensors.names)) < len(tensors.names):
        raise ManifestError("a tensor stands there twice")
    comparisons = Comparisons()
    for number, tiling in enumerate(tensors.tilings):
        try:
            _check_tiling(tiling, comparisons if whole else None)
        except ManifestError as fault:
            fault.path = _first_of(tensors, number)
            raise
    _check_places(tensors, np.array(files, np.int64))


def _first_of(tensors: Tensors, number: int) -> str | None:
    """The name of the first tensor of a tiling."""
    found = np.flatnonzero(tensors.which == number)
    return tensors.names[int(found[0])][:80] if len(found) else None


def _check_tiling(tiling: Tiling, comparisons: Comparisons | None) -> None:
    shape, size = tiling.shape, itemsize(tiling.dtype)
    if len(shape) > MAX_DIMS or any(not 0 < length < LARGE for length in shape):
        raise ManifestError(f"a tensor of shape {shape[:8]}")
    if prod(shape) * size >= LARGE:
        raise ManifestError(f"a tensor of {prod(shape) * size} bytes")
    if tiling.is_whole:
        return
    if not tiling.count and comparisons is None and not tiling.offsets + tiling.sizes:
        return
    if tiling.count < 1 or not shape:
        raise ManifestError(f"a tensor of shape {shape[:8]} in {tiling.count} shards")
    offsets, sizes = tiling.columns
    # Larger than the shape they cannot be added to without a thought.
    lengths = np.array(shape, np.int64)
    inside = (offsets >= 0) & (sizes >= 0) & (sizes <= lengths) & (offsets <= lengths - sizes)
    if not inside.all():
        raise ManifestError(f"a shard reaches out of its tensor of shape {shape[:8]}")
    if comparisons is None:
        return
    if tiling.count > _FEW and sizes.all() and is_grid(offsets, sizes, shape):
        return
    covered = sum(prod(sizes) for _, sizes in tiling.boxes)
    if covered != prod(shape) or comparisons.overlap(tiling.boxes):
        raise ManifestError(f"shards do not cover a tensor of shape {shape[:8]} once")


def _check_places(tensors: Tensors, sizes: Numbers) -> None:
    """Whether every box is in its file. All boxes of all tensors at once."""
    tilings, which, firsts = tensors.tilings, tensors.which, tensors.firsts
    files, starts = tensors.box_files, tensors.box_starts
    if not len(files):
        return
    nbytes = _by_box([tiling.nbytes for tiling in tilings], which, firsts)
    step = np.array([min(itemsize(tiling.dtype), ALIGN) for tiling in tilings], np.int64)
    steps = np.repeat(step[which], np.diff(firsts))
    there = (files >= 0) & (files < len(sizes))
    room = np.full(len(files), -1, np.int64)
    room[there] = sizes[files[there]]
    wrong = ~there | (starts < 0) | (starts > room - nbytes) | (starts % steps != 0)
    if wrong.any():
        at = int(np.flatnonzero(wrong)[0])
        name = tensors.names[int(np.searchsorted(firsts, at, "right")) - 1]
        raise ManifestError(
            f"{name[:80]!r}: {nbytes[at]} bytes from byte {starts[at]} on are not in file "
            f"{files[at]} of {len(sizes)}, or are elements at odd bytes of it"
        )


def _by_box(of: Sequence[Numbers], which: Numbers, firsts: Numbers) -> Numbers:
    """A number for each box of each tensor, where `of` has those of each tiling."""
    counts = np.array([len(one) for one in of], np.int64)
    begins = np.cumsum(counts) - counts
    moved = np.repeat(begins[which] - firsts[:-1], counts[which])
    found: Numbers = np.concatenate(of)[np.arange(firsts[-1]) + moved]
    return found
