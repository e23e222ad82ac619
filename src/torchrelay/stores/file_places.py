"""Whether the boxes that a commit record names are those of their tensors, and lie in its files."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Protocol

import numpy as np

from torchrelay.errors import ManifestError
from torchrelay.geometry.boxes import Comparisons, Numbers, is_grid
from torchrelay.record.validation import itemsize

ALIGN = 8  # of a tensor's first byte in its file, or its item size if that is less
_FEW = 8  # boxes that are looked at one by one
_LARGE = 1 << 62  # numbers below it can be added without a thought


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


class FilePlaces:
    """The files of a record, for checks of what lies in them."""

    def __init__(self, files: Sequence[tuple[str, int]]) -> None:
        self._files = files  # names and sizes
        self._sizes: Numbers | None = None
        if all(nbytes < _LARGE for _, nbytes in files):
            self._sizes = np.array([nbytes for _, nbytes in files], np.int64)
        self._comparisons = Comparisons()

    def check_range(self, file: int, start: int, nbytes: int) -> None:
        """Raise `ManifestError` unless these bytes are in that file."""
        if not 0 <= file < len(self._files):
            raise ManifestError(f"file {file} of {len(self._files)}")
        name, size = self._files[file]
        if start < 0 or nbytes < 0 or start + nbytes > size:
            raise ManifestError(f"{name}: bytes {start} to {start + nbytes} are not in it")

    def check_tensor(
        self, name: str, dtype: str, shape: tuple[int, ...], shards: Sequence[PlacedBox]
    ) -> int:
        """The tensor's bytes. `ManifestError` unless its boxes have each element once."""
        if len(shape) > 64 or any(not 0 < length < _LARGE for length in shape):
            raise ManifestError(f"tensor {name[:80]!r} of shape {shape}")
        size = itemsize(dtype)
        if len(shards) <= _FEW or not self._is_grid(size, shape, shards):
            self._check_boxes(name, size, shape, shards)
        return prod(shape) * size

    def _is_grid(self, size: int, shape: tuple[int, ...], shards: Sequence[PlacedBox]) -> bool:
        """Whether it is cut into a grid, each cell of it where it can be. False says nothing."""
        dims = len(shape)
        if self._sizes is None or prod(shape) * size >= _LARGE or not dims:
            return False
        if any(len(shard.offsets) != dims or len(shard.sizes) != dims for shard in shards):
            return False
        offsets = np.array([shard.offsets for shard in shards], np.int64)
        sizes = np.array([shard.sizes for shard in shards], np.int64)
        files = np.array([shard.file for shard in shards], np.int64)
        starts = np.array([shard.start for shard in shards], np.int64)
        whole = np.array(shape, np.int64)
        inside = (offsets >= 0) & (sizes > 0) & (sizes <= whole) & (offsets <= whole - sizes)
        if not inside.all() or (files < 0).any() or (files >= len(self._files)).any():
            return False
        last = self._sizes[files] - sizes.prod(1) * size
        if (starts < 0).any() or (starts > last).any() or (starts % min(size, ALIGN)).any():
            return False
        return is_grid(offsets, sizes, shape)

    def _check_boxes(
        self, name: str, size: int, shape: tuple[int, ...], shards: Sequence[PlacedBox]
    ) -> None:
        for shard in shards:
            if not len(shard.offsets) == len(shard.sizes) == len(shape):
                raise ManifestError(f"{name[:80]!r}: a shard of other dimensions")
            for offset, length, whole in zip(shard.offsets, shard.sizes, shape, strict=True):
                if offset < 0 or length < 0 or offset + length > whole:
                    raise ManifestError(f"{name[:80]!r}: a shard reaches out of it")
            self.check_range(shard.file, shard.start, prod(shard.sizes) * size)
            if shard.start % min(size, ALIGN):
                raise ManifestError(f"{name[:80]!r}: elements at odd bytes of its file")
        boxes = [(shard.offsets, shard.sizes) for shard in shards]
        covered = sum(prod(sizes) for _, sizes in boxes)
        if covered != prod(shape) or self._comparisons.overlap(boxes):
            raise ManifestError(f"{name[:80]!r}: its shards do not cover it once")
