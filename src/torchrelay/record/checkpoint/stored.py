"""Tensors of a recorded state: each is whole, and cut into boxes that lie in volumes.

A volume is a file of a checkpoint, or the memory of a live rank laid out in the same way.

A job of many ranks has millions of boxes, and few ways to cut a tensor: layers are alike. So each
way is recorded once, as a `Tiling`, and of each box only its file and where it starts in it, in
columns. They stay in columns: a `Shard` is made when somebody asks for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from math import prod
from typing import Any

import msgspec
import numpy as np

from torchrelay.errors import ManifestError
from torchrelay.geometry.boxes import Box, Numbers
from torchrelay.record.dtypes import itemsize
from torchrelay.record.numbers import pack_narrow, unpack_narrow

_FEW = 32  # boxes that are looked at one by one
_encode = msgspec.msgpack.Encoder().encode


class _Stored(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Small records stand as arrays: field order is part of the format."""


class Shard(_Stored, frozen=True):
    """A box of a tensor: its elements, row-major, from byte `start` of a file on."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: int
    start: int


class StoredTensor(_Stored, frozen=True):
    """A tensor and the boxes that it is cut into."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    shards: Sequence[Shard]


class Tiling(msgspec.Struct, array_like=True, frozen=True, dict=True):
    """Tensors of one dtype and shape that are cut alike, into `count` boxes.

    `offsets` and `sizes` have a number for each dimension of each box. Both are empty where the one
    box is all of the tensor.
    """

    dtype: str
    shape: tuple[int, ...]
    count: int = 1
    offsets: bytes = b""
    sizes: bytes = b""

    @classmethod
    def of(cls, dtype: str, shape: tuple[int, ...], boxes: Sequence[Box]) -> Tiling:
        """`ManifestError` for boxes of other dimensions, and numbers below 0."""
        if len(boxes) == 1 and boxes[0] == ((0,) * len(shape), shape):
            return cls(dtype, shape)
        for offsets, sizes in boxes:
            if not len(offsets) == len(sizes) == len(shape):
                raise ManifestError("a shard of other dimensions than its tensor")
        return cls.of_columns(dtype, shape, *(_column([box[n] for box in boxes]) for n in (0, 1)))

    @classmethod
    def of_columns(
        cls, dtype: str, shape: tuple[int, ...], offsets: Numbers, sizes: Numbers
    ) -> Tiling:
        """Boxes by their rows."""
        if len(sizes) == 1 and tuple(sizes[0].tolist()) == shape and not offsets.any():
            return cls(dtype, shape)
        return cls(dtype, shape, len(sizes), pack_narrow(offsets), pack_narrow(sizes))

    @property
    def is_whole(self) -> bool:
        """Whether its one box is all of the tensor."""
        return self.count == 1 and not self.offsets and not self.sizes

    @cached_property
    def columns(self) -> tuple[Numbers, Numbers]:
        """Offsets and sizes, a row for each box."""
        dims = len(self.shape)
        if self.is_whole:
            whole = np.array(self.shape, np.int64).reshape(1, dims)
            return np.zeros_like(whole), whole
        return self._column(self.offsets, dims), self._column(self.sizes, dims)

    def _column(self, data: bytes, dims: int) -> Numbers:
        return unpack_narrow(data, self.count * dims).reshape(self.count, dims)

    @cached_property
    def boxes(self) -> list[Box]:
        if self.is_whole:
            return [((0,) * len(self.shape), self.shape)]
        rows = (map(tuple, column.tolist()) for column in self.columns)
        return list(zip(*rows, strict=True))

    @cached_property
    def nbytes(self) -> Numbers:
        """Bytes of each box."""
        if self.is_whole:
            return np.array([prod(self.shape) * itemsize(self.dtype)], np.int64)
        found: Numbers = self.columns[1].prod(1) * itemsize(self.dtype)
        return found

    @cached_property
    def _met(self) -> dict[Box, list[int]]:
        return {}

    def near(self, box: Box) -> Sequence[int]:
        """The boxes that may have elements of this one, which is of a destination at hand: where
        there are many, most have none."""
        if self.count <= _FEW:
            return range(self.count)
        found = self._met.get(box)
        if found is None:
            offsets, sizes = self.columns
            first = np.array(box[0], np.int64)
            last = first + np.array(box[1], np.int64)
            meet = ((offsets < last) & (offsets + sizes > first)).all(1)
            found = self._met[box] = np.flatnonzero(meet).tolist()
        return found


class Shards(Sequence[Shard]):
    """The boxes of one tensor. Equal to a tuple of the same."""

    __slots__ = ("_files", "_starts", "tiling")

    def __init__(self, tiling: Tiling, files: Numbers, starts: Numbers) -> None:
        self.tiling = tiling
        self._files, self._starts = files, starts

    def __len__(self) -> int:
        return self.tiling.count

    def __iter__(self) -> Iterator[Shard]:
        places = zip(self.tiling.boxes, self._files.tolist(), self._starts.tolist(), strict=True)
        return (Shard(*box, file, start) for box, file, start in places)

    def __eq__(self, other: object) -> bool:
        return tuple(self) == tuple(other) if isinstance(other, (tuple, Shards)) else False

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return tuple(self)[index]
        offsets, sizes = self.tiling.boxes[index]
        return Shard(offsets, sizes, int(self._files[index]), int(self._starts[index]))


class Tensors(msgspec.Struct, array_like=True, frozen=True, dict=True):
    """The tensors of a record, as a sequence of `StoredTensor`.

    `numbers` has the tiling of each tensor; `files` and `starts` have a number for each box, those
    of the first tensor first. Boxes of a tensor stand in the order of their offsets.
    """

    tilings: tuple[Tiling, ...] = ()
    names: tuple[str, ...] = ()
    numbers: bytes = b""
    files: bytes = b""
    starts: bytes = b""

    @classmethod
    def of(cls, tensors: Iterable[StoredTensor]) -> Tensors:
        """`ManifestError` for boxes of other dimensions than their tensor, and numbers below 0."""
        tilings: dict[bytes, Tiling] = {}  # by their boxes: others' numbers may hash alike
        numbers: dict[bytes, int] = {}
        names, which, files, starts = [], [], [], []
        for tensor in tensors:
            shards = tensor.shards
            if len(shards) > 1:
                shards = sorted(shards, key=_offsets)
            boxes = [(shard.offsets, shard.sizes) for shard in shards]
            key = _encode((tensor.dtype, tensor.shape, boxes))
            if key not in tilings:
                numbers[key] = len(tilings)
                tilings[key] = Tiling.of(tensor.dtype, tensor.shape, boxes)
            names.append(tensor.name)
            which.append(numbers[key])
            files += [shard.file for shard in shards]
            starts += [shard.start for shard in shards]
        return cls.in_columns(tilings.values(), names, *map(_column, (which, files, starts)))

    @classmethod
    def in_columns(
        cls,
        tilings: Iterable[Tiling],
        names: Iterable[str],
        numbers: Numbers,
        files: Numbers,
        starts: Numbers,
    ) -> Tensors:
        columns = map(pack_narrow, (numbers, files, starts))
        return cls(tuple(tilings), tuple(names), *columns)

    @cached_property
    def which(self) -> Numbers:
        """Of each tensor, its tiling. `ManifestError` where there is none."""
        found = unpack_narrow(self.numbers, len(self.names))
        if len(found) and not 0 <= found.min() <= found.max() < len(self.tilings):
            raise ManifestError("a tensor of no tiling")
        return found

    @cached_property
    def firsts(self) -> Numbers:
        """Of each tensor, its first box among those of all; and how many those are."""
        counts = np.array([tiling.count for tiling in self.tilings], np.int64)
        return np.concatenate([[0], np.cumsum(counts[self.which])])

    @cached_property
    def box_files(self) -> Numbers:
        """Of each box of all tensors, its file."""
        return unpack_narrow(self.files, int(self.firsts[-1]))

    @cached_property
    def box_starts(self) -> Numbers:
        """Of each box of all tensors, the byte of its file where it starts."""
        return unpack_narrow(self.starts, int(self.firsts[-1]))

    def __len__(self) -> int:
        return len(self.names)

    def __iter__(self) -> Iterator[StoredTensor]:
        return iter(self._all)

    def __getitem__(self, index: int) -> StoredTensor:
        return self._all[index]

    @cached_property
    def _all(self) -> tuple[StoredTensor, ...]:
        firsts, tilings = self.firsts.tolist(), self.tilings
        files, starts = self.box_files, self.box_starts
        # Most tensors of most states have one box, for which a view would cost more than it saves.
        heads = [np.append(column, 0)[self.firsts[:-1]].tolist() for column in (files, starts)]
        rows = zip(self.names, self.which.tolist(), firsts, *heads, strict=False)
        found = []
        for name, number, at, file, start in rows:
            tiling = tilings[number]
            shards: Sequence[Shard]
            if tiling.count == 1:
                offsets, sizes = tiling.boxes[0]
                shards = (Shard(offsets, sizes, file, start),)
            else:
                end = at + tiling.count
                shards = Shards(tiling, files[at:end], starts[at:end])
            found.append(StoredTensor(name, tiling.dtype, tiling.shape, shards))
        return tuple(found)


def _offsets(shard: Shard) -> tuple[int, ...]:
    return shard.offsets


def _column(numbers: Any) -> Numbers:
    return np.array(numbers, np.int64)
