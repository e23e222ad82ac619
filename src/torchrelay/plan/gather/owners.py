"""Which rank is asked for which box of a distributed tensor. Pure.

Each box is taken from one of the ranks that have it, so that all of them have about as much to
send. Tensors that the same ranks have in the same boxes are decided about together.
"""

from __future__ import annotations

from collections.abc import Collection
from math import prod
from typing import Any, NamedTuple

import msgspec
import numpy as np

from torchrelay.errors import MismatchError
from torchrelay.geometry.boxes import Box, Comparisons, Numbers
from torchrelay.plan.gather.holders import NONE
from torchrelay.plan.gather.union import Union
from torchrelay.record.dtypes import itemsize

_encode = msgspec.msgpack.Encoder().encode


class OwnedBox(NamedTuple):
    """A box of several tensors, and the column of `Holders` that gives it, for each."""

    box: Box
    columns: Numbers


class Tiled(NamedTuple):
    """Tensors that are put together of the same boxes."""

    tensors: Numbers
    boxes: list[OwnedBox]


class Owners:
    """The rank that gives each box of some distributed tensors.

    `loads` has the bytes that each rank sends already, by its place; `lost` the places of ranks
    that give nothing. `MismatchError` names a tensor that the others do not have all of.
    """

    def __init__(
        self, union: Union, tensors: Numbers, loads: Numbers, lost: Collection[int] = ()
    ) -> None:
        self._union = union
        holders = union.holders
        self._there = ~np.isin(holders.rank_of, list(lost))
        self.tiled: list[Tiled] = []
        self._loads = loads.copy()
        open_: list[tuple[int, Numbers, OwnedBox, list[int]]] = []
        comparisons = Comparisons()
        for some in self._alike(tensors):
            first = holders.tensors[int(some[0])]
            boxes = []
            for box, columns in self._cover(int(some[0]), comparisons):
                owned = OwnedBox(box, np.full(len(some), columns[0], np.int64))
                boxes.append(owned)
                nbytes = prod(box[1]) * itemsize(first.dtype)
                if len(columns) == 1:
                    self._loads[holders.rank_of[columns[0]]] += nbytes * len(some)
                else:
                    open_.append((nbytes, some, owned, columns))
            self.tiled.append(Tiled(some, boxes))
        # Large boxes are given first, each to the rank that has least to send.
        for nbytes, some, owned, columns in sorted(open_, key=lambda one: -one[0]):
            ranks = holders.rank_of[columns]
            counts = _shared_out(len(some), nbytes, self._loads[ranks])
            owned.columns[:] = np.repeat(columns, counts)
            self._loads[ranks] += counts * nbytes

    def _alike(self, tensors: Numbers) -> list[Numbers]:
        """The tensors, those together that the same ranks have in the same boxes."""
        if not len(tensors):
            return []
        kinds = np.where(self._there, self._union.holders.kinds[tensors], NONE)
        if (kinds == kinds[0]).all():
            return [tensors]
        rows: Any = np.ascontiguousarray(kinds).view([("", kinds.dtype)] * kinds.shape[1])
        _, inverse, counts = np.unique(rows.ravel(), return_inverse=True, return_counts=True)
        order = np.argsort(inverse, kind="stable")
        return np.split(tensors[order], np.cumsum(counts)[:-1])

    def _cover(self, tensor: int, comparisons: Comparisons) -> list[tuple[Box, list[int]]]:
        """Boxes that cover a tensor once, and the columns that have each."""
        holders = self._union.holders
        shape = holders.tensors[tensor].shape
        if 0 in shape:
            return []
        found: dict[bytes, tuple[Box, list[int]]] = {}  # by encoding: numbers may hash alike
        for column in np.flatnonzero(self._there & (holders.kinds[tensor] != NONE)).tolist():
            box = holders.box_kinds[int(holders.kinds[tensor, column])].boxes[0]
            if 0 not in box[1]:
                found.setdefault(_encode(box), (box, []))[1].append(column)
        whole = found.get(_encode(((0,) * len(shape), shape)))
        if whole is not None:
            return [whole]
        boxes = list(found.values())
        elements = sum(prod(box[1]) for box, _ in boxes)
        if elements == prod(shape) and not comparisons.overlap([box for box, _ in boxes]):
            return boxes
        path = self._union.joined.path(holders.tensors[tensor].leaf)
        if elements >= prod(shape):
            raise MismatchError("ranks have overlapping parts of it", path=path)
        places = np.unique(holders.rank_of[self._there]).tolist()
        left = [str(self._union.joined.ranks[place]) for place in places]
        raise MismatchError(
            f"ranks {', '.join(left)} have {elements} of its {prod(shape)} elements: "
            "name every rank that has a part of it as a source",
            path=path,
        )


def _shared_out(count: int, nbytes: int, loads: Numbers) -> Numbers:
    """How many of `count` pieces each of several ranks gets, so that none has much more to send
    than the others."""
    low, high = int(loads.min()), int(loads.max()) + count * nbytes
    while low < high:  # the least load up to which all pieces find room
        middle = (low + high) // 2
        if int((np.maximum(middle - loads, 0) // nbytes).sum()) >= count:
            high = middle
        else:
            low = middle + 1
    found: Numbers = np.maximum(low - loads, 0) // nbytes
    for _ in range(int(found.sum()) - count):  # fewer than there are ranks
        found[int(np.argmax(np.where(found > 0, loads + found * nbytes, -1)))] -= 1
    return found
