"""Bytes that go to tensors as they are, in columns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from torchrelay.geometry.boxes import Numbers
from torchrelay.geometry.runs import Column, Runs
from torchrelay.record.rows import Marks

Indices = np.ndarray[Any, np.dtype[np.intp]]


class Straight(NamedTuple):
    """Bytes that go to plain tensors as they are, in columns and in the order of the stream: where
    they are there, to which address and how many; image offered, leaf of the destination, and
    its GPU, or -1. Some bytes may go to several tensors."""

    at: Column
    address: Column
    nbytes: Column
    image: Indices
    leaf: Indices
    gpu: Numbers

    @property
    def on_host(self) -> Marks:
        """Whether each goes to host memory."""
        marks: Marks = self.gpu < 0
        return marks

    @property
    def runs(self) -> Runs:
        """Where the bytes go that each go to one tensor."""
        return Runs(self.at, self.address, self.nbytes)

    def some(self, rows: Any) -> Straight:
        if rows.dtype == bool and rows.all():  # mostly
            return self
        return Straight._make(column[rows] for column in self)

    def in_order(self) -> Straight:
        """In the order of the stream."""
        if not (self.at[1:] < self.at[:-1]).any():
            return self
        return self.some(np.argsort(self.at, kind="stable"))

    def joined(self, more: Sequence[tuple[int, int, int, int, int, int]]) -> Straight:
        """With more rows; what goes to one address twice does so once."""
        if not more:
            return self
        columns = zip(self, zip(*more, strict=True), strict=True)
        both = Straight._make(np.append(old, np.array(new, old.dtype)) for old, new in columns)
        _, once = np.unique(np.stack(both[:3], axis=1), axis=0, return_index=True)
        return both.some(np.sort(once)).in_order()

    @property
    def several(self) -> Indices:
        """Images with bytes that go to several tensors."""
        ends = np.maximum.accumulate(self.at + self.nbytes)
        found: Indices = self.image[1:][self.at[1:] < ends[:-1]]
        return found


def gpu_of(tensor: torch.Tensor) -> int:
    return tensor.get_device()


def device_of(number: int) -> torch.device:
    return torch.device("cuda", number)
