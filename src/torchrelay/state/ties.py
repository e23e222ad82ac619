"""Destinations that share memory: each byte of it must be offered by one place alone."""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd
from typing import NamedTuple

import numpy as np

from torchrelay.errors import MismatchError
from torchrelay.state import manifest as m
from torchrelay.state import tensors as t
from torchrelay.state.containers import Path, show
from torchrelay.state.fitting import ArrayFit, Fit
from torchrelay.state.plan import Chunks
from torchrelay.state.spans import contiguous_strides, extent, overlapping, packed


class _Claim(NamedTuple):
    """Elements at an address, and where in the stream their bytes come from. Counts bytes."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    source: int
    source_strides: tuple[int, ...]
    itemsize: int
    flags: int  # conj and neg bits that the two sides do not share

    @property
    def end(self) -> int:
        return self.address + extent(self.shape, self.strides) - 1 + self.itemsize

    @property
    def shift(self) -> int:
        return self.source - self.address

    @property
    def straight(self) -> bool:
        """Whether memory and stream have the same geometry."""
        return self.strides == self.source_strides and not self.flags


def check_ties(fits: Sequence[tuple[Fit | ArrayFit, Path]], chunks: Chunks) -> None:
    """Raise `MismatchError` where a byte of the destinations would have to hold two values."""
    ranges: dict[object, tuple[list[int], list[tuple[int, int]]]] = {}
    for index, (pair, path) in enumerate(fits):
        mine = pair.destination
        device: object = "cpu"
        if not isinstance(mine, np.ndarray) and mine.is_contiguous():
            low = mine.data_ptr()
            high = low + mine.nbytes
            if not mine.is_cpu:
                device = mine.device
        else:
            claim = _claim(pair, chunks)
            low, high = claim.address, claim.end
            if not isinstance(mine, np.ndarray):
                device = "cpu" if mine.is_cpu else mine.device
            layout = packed(claim.shape, tuple(s // claim.itemsize for s in claim.strides))
            if layout is None or layout.numel != mine.size if isinstance(mine, np.ndarray) else mine.numel():
                _check([(claim, path)])
        indices, spans = ranges.setdefault(device, ([], []))
        indices.append(index)
        spans.append((low, high))
    for indices, spans in ranges.values():
        for group in overlapping(spans):
            if len(group) > 1:
                _check([(_claim(fits[indices[i]][0], chunks), fits[indices[i]][1]) for i in group])
