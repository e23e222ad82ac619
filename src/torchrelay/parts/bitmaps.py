"""Which elements of a volume changed from one published step to another: a bit for each. No torch.

The lowest bit of a byte is the first element. A volume holds tensors of several dtypes, so it is
tiled by fields, each of elements of one size; the bits of each begin with a byte of their own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import gcd
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from torchrelay.errors import RemoteProtocolError, UsageError
from torchrelay.parts.fields import Field

Bits = NDArray[np.uint8]
Mask = NDArray[np.bool_]
Positions = NDArray[np.int64]

_BLOCK = 1 << 16  # elements compared at once: the result stays in a core's cache
_ONES = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1).sum(axis=1, dtype=np.uint8)

# Numbers are moved and compared as integers: a NaN is equal to itself, and zeros have signs.
_DTYPES: dict[int, np.dtype[Any]] = {
    1: np.dtype(np.uint8),
    2: np.dtype(np.uint16),
    4: np.dtype(np.uint32),
    8: np.dtype(np.uint64),
    16: np.dtype("V16"),
}


def element_dtype(itemsize: int) -> np.dtype[Any]:
    """A dtype that moves elements of a size; `RemoteProtocolError` for a size that no dtype has."""
    found = _DTYPES.get(itemsize)
    if found is None:
        raise RemoteProtocolError(f"no dtype has elements of {itemsize} bytes")
    return found


def changed(old: NDArray[np.uint8], new: NDArray[np.uint8], itemsize: int) -> Bits:
    """The bits of the elements whose bytes differ. Both have as many bytes."""
    if old.nbytes != new.nbytes or new.nbytes % itemsize:
        raise UsageError(f"{old.nbytes} and {new.nbytes} bytes of elements of {itemsize}")
    bits = np.empty(-(-new.nbytes // itemsize // 8), np.uint8)
    # Elements of 16 bytes are a row of two integers.
    kind, row = (np.uint64, (-1, 2)) if itemsize == 16 else (element_dtype(itemsize), (-1,))
    before, after = (one.view(kind).reshape(row) for one in (old, new))
    # One buffer for all blocks: fresh memory would cost more than the comparison.
    buffer = np.empty((min(_BLOCK, len(after)), *after.shape[1:]), np.bool_)
    for at in range(0, len(after), _BLOCK):
        block = slice(at, at + _BLOCK)
        differ = np.not_equal(before[block], after[block], out=buffer[: len(after) - at])
        if itemsize == 16:
            differ = differ.any(axis=1)
        bits[at // 8 : (at + _BLOCK) // 8] = np.packbits(differ, bitorder="little")
    return bits


def tiled(placed: Iterable[Field], nbytes: int) -> list[Field]:
    """Fields that tile a volume, for the fields of its tensors. Neighbours of one size are one
    field; bytes between tensors are elements of one byte, as are tensors that overlap others."""
    tiles: list[Field] = []

    def add(field: Field) -> None:
        last = tiles[-1] if tiles else None
        if last is not None and last.itemsize == field.itemsize:
            tiles[-1] = last._replace(stop=field.stop)
        elif field.start < field.stop:
            tiles.append(field)

    end = 0
    for field in sorted(placed):
        low, high, size = max(field.start, end), min(field.stop, nbytes), field.itemsize
        if low >= high:
            continue
        whole = low == field.start and (high - low) % size == 0
        add(Field(end, low, 1))
        add(Field(low, high, size if whole else 1))
        end = high
    add(Field(end, nbytes, 1))
    return tiles


class VolumeBitmap:
    """The changed elements of a volume. `fields` tile the volume; two bitmaps can be united if
    their fields are the same."""

    def __init__(self, fields: Sequence[Field], bits: Sequence[Bits]) -> None:
        self.fields, self.bits = tuple(fields), list(bits)
        self._starts = np.array([field.start for field in fields], np.int64)

    @classmethod
    def none(cls, fields: Sequence[Field]) -> VolumeBitmap:
        """A bitmap in which no element has changed."""
        return cls(fields, [np.zeros(bits_bytes(field), np.uint8) for field in fields])

    @property
    def nbytes(self) -> int:
        """The memory that it takes."""
        return sum(bits.nbytes for bits in self.bits)

    @property
    def count(self) -> int:
        """How many elements have changed."""
        return sum(map(_ones, self.bits))

    @property
    def elements(self) -> int:
        """How many elements the volume has."""
        return sum((field.stop - field.start) // field.itemsize for field in self.fields)

    def gather(
        self, start: int, nbytes: int, itemsize: int, *, stride: int = 0, count: int = 1
    ) -> ChangedElements | None:
        """Which elements of a run changed, in its order: `count` rows of `nbytes` bytes, `stride`
        bytes apart. None where the run is not made of whole elements of one field of that size:
        nothing is known of it then."""
        if count < 1 or nbytes < 1:
            return ChangedElements(np.zeros(0, np.uint8), 0)
        index = int(np.searchsorted(self._starts, start, side="right")) - 1
        if index < 0 or stride < 0:
            return None
        field = self.fields[index]
        numbers = (start - field.start, nbytes, stride if count > 1 else 0)
        stop = start + (count - 1) * stride + nbytes
        if field.itemsize != itemsize or stop > field.stop or any(n % itemsize for n in numbers):
            return None
        first, each, step = (number // itemsize for number in numbers)
        return gather(self.bits[index], first, each, step, count)


def bits_bytes(field: Field) -> int:
    """The bytes of a field's bits."""
    return -(-(field.stop - field.start) // field.itemsize // 8)


@dataclass(frozen=True, eq=False)
class ChangedElements:
    """Which of `elements` changed, as bits. Bits behind the last element are not set."""

    bits: Bits
    elements: int

    @property
    def count(self) -> int:
        """How many have changed."""
        return _ones(self.bits)

    def positions(self) -> Positions:
        """Where they are. Only bytes that have a bit are looked into."""
        some = np.flatnonzero(self.bits != 0)
        inside = np.flatnonzero(np.unpackbits(self.bits[some], bitorder="little").view(np.bool_))
        found: Positions = some[inside >> 3]
        found <<= 3
        found += inside & 7
        return found

    @property
    def mask(self) -> Mask:
        """The same, with a bool for each element."""
        return _unpacked(self.bits, 0, self.elements)

    @classmethod
    def of(cls, mask: Mask) -> ChangedElements:
        return cls(np.packbits(mask, bitorder="little"), len(mask))

    @classmethod
    def joined(cls, several: Sequence[ChangedElements]) -> ChangedElements:
        """Join the changes of several runs, one after the other."""
        if len(several) == 1:
            return several[0]
        elements = sum(one.elements for one in several)
        if all(one.elements % 8 == 0 for one in several[:-1]):
            return cls(np.concatenate([one.bits for one in several]), elements)
        return cls.of(np.concatenate([one.mask for one in several]))


def gather(bits: Bits, first: int, each: int, step: int = 0, count: int = 1) -> ChangedElements:
    """The bits of `count` rows of `each` elements, `step` elements apart. All of them lie in
    `bits`."""
    if count == 1 or step == each:
        return _from(bits, first, each * count)
    if first % 8 == each % 8 == step % 8 == 0:  # whole bytes
        rows = as_strided(bits[first // 8 :], (count, each // 8), (step // 8, 1), writeable=False)
        return ChangedElements(rows.reshape(-1), each * count)
    found = np.empty((count, each), np.bool_)
    turns = 8 // gcd(step, 8)  # rows so far apart begin at the same bit of a byte
    for turn in range(min(turns, count)):
        byte, skip = divmod(first + turn * step, 8)
        shape = (-(-(count - turn) // turns), -(-(skip + each) // 8))
        rows = as_strided(bits[byte:], shape, (turns * step // 8, 1), writeable=False)
        found[turn::turns] = np.unpackbits(rows, axis=1, bitorder="little")[:, skip : skip + each]
    return ChangedElements.of(found.reshape(-1))


def _from(bits: Bits, first: int, count: int) -> ChangedElements:
    """Take the bits of elements that follow each other."""
    if first % 8:
        return ChangedElements.of(_unpacked(bits, first, count))
    found = bits[first // 8 : -(-(first + count) // 8)]
    if count % 8:  # others follow in the last byte
        found = found.copy()
        found[-1] &= (1 << count % 8) - 1
    return ChangedElements(found, count)


def _unpacked(bits: Bits, first: int, count: int) -> Mask:
    low, skip = first // 8, first % 8
    part = bits[low : -(-(first + count) // 8)]
    return np.unpackbits(part, bitorder="little")[skip : skip + count].view(np.bool_)


def _ones(bits: Bits) -> int:
    """How many bits are set."""
    if not hasattr(np, "bitwise_count"):  # numpy 1
        return int(_ONES[bits].sum(dtype=np.int64))
    body = len(bits) // 8 * 8
    counts = [np.bitwise_count(part) for part in (bits[:body].view(np.uint64), bits[body:])]
    return sum(int(part.sum(dtype=np.int64)) for part in counts)


def union(bitmaps: Sequence[VolumeBitmap]) -> VolumeBitmap | None:
    """The elements that changed in at least one of several steps; None where the layout of the
    volume changed in between, or without any bitmap."""
    if not bitmaps or any(one.fields != bitmaps[0].fields for one in bitmaps):
        return None
    if len(bitmaps) == 1:
        return bitmaps[0]
    merged = [bits.copy() for bits in bitmaps[0].bits]
    for other in bitmaps[1:]:
        for bits, more in zip(merged, other.bits, strict=True):
            np.bitwise_or(bits, more, out=bits)
    return VolumeBitmap(bitmaps[0].fields, merged)
