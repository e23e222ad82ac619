"""Strided runs of bytes: what a reader needs of a volume. Pure.

A box of a stored tensor is rows of equal length at equal distances, so a few runs describe what a
tensor-parallel rank needs of a shard. The bytes of runs, one after the other, are *packed*. Both
ends work out from the runs alone where each byte of a volume is in the packed bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from math import prod
from typing import Any, NamedTuple

import msgspec
import numpy as np

from torchrelay.errors import RemoteProtocolError
from torchrelay.geometry.boxes import Numbers
from torchrelay.geometry.strides import contiguous_strides
from torchrelay.record.schema import pack_column, unpack_column

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
# A box of a row-major array: the byte at which that begins, its itemsize and shape; offsets, sizes.
PartBox = tuple[int, int, Sequence[int], Sequence[int], Sequence[int]]

PART_BYTES = 2 << 20  # of a part chunk: for as many bytes a reader has a limited time
MAX_RUNS = 1 << 16  # in one request
MAX_VOLUMES = 4096  # in one request
MAX_NAME = 1024  # characters of a volume's name
ITEMSIZES = (1, 2, 4, 8, 16)


class StridedRun(NamedTuple):
    """`rows` rows of `nbytes` each, the first at byte `start` of a volume and `stride` bytes from
    one to the next. `at`: where they begin in the packed bytes."""

    start: int
    nbytes: int
    stride: int
    rows: int
    at: int

    def of_volume(self, volume: Bytes, origin: int = 0) -> Bytes:
        """The rows in the bytes of a volume from `origin` on."""
        return _rows(volume, self.start - origin, self.nbytes, self.stride, self.rows)

    def of_packed(self, packed: Bytes, origin: int = 0) -> Bytes:
        """The same rows in packed bytes from `origin` on."""
        return _rows(packed, self.at - origin, self.nbytes, self.nbytes, self.rows)


@dataclass(frozen=True, eq=False)
class PartRuns:
    """Runs of one volume in columns. `itemsizes`: bytes of an element of the tensor there. Runs are
    in their order."""

    starts: Numbers
    nbytes: Numbers
    strides: Numbers
    counts: Numbers
    itemsizes: Numbers

    @property
    def columns(self) -> tuple[Numbers, ...]:
        return self.starts, self.nbytes, self.strides, self.counts, self.itemsizes

    def __len__(self) -> int:
        return len(self.starts)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PartRuns) and all(map(np.array_equal, self.columns, other.columns))

    __hash__ = None  # type: ignore[assignment]

    def some(self, first: int, last: int) -> PartRuns:
        return PartRuns(*(column[first:last] for column in self.columns))

    def after(self, begin: int) -> PartRuns:
        """The rest of the packed bytes from `begin` on, where a part chunk begins."""
        first = int(np.searchsorted(self.places, begin, "right")) - 1
        low, high = (
            begin - int(self.places[first]),
            int(self.places[first + 1] - self.places[first]),
        )
        cut = [one for run in self._listed([first]) for one in _cut(run, low, high)]
        rows = np.array([[*run[:4], self.itemsizes[first]] for run in cut], np.int64)
        rest = self.some(first + 1, len(self))
        pairs = zip(rows.reshape(-1, 5).T, rest.columns, strict=True)
        return PartRuns(*map(np.concatenate, pairs))

    @cached_property
    def ends(self) -> Numbers:
        """The byte of the volume behind each run."""
        found: Numbers = self.starts + (self.counts - 1) * self.strides + self.nbytes
        return found

    @cached_property
    def places(self) -> Numbers:
        """Where each run begins in the packed bytes, and where the last one ends."""
        found: Numbers = np.concatenate([[0], np.cumsum(self.nbytes * self.counts)])
        return found

    @property
    def total(self) -> int:
        """How many bytes all runs have."""
        return int(self.places[-1])

    # Which parts of runs lie in a range.

    def packed_between(self, begin: int, end: int) -> Iterator[StridedRun]:
        """The runs in bytes [begin, end) of the packed bytes, in their order."""
        first = max(int(np.searchsorted(self.places, begin, "right")) - 1, 0)
        last = int(np.searchsorted(self.places, end, "left"))
        for run in self._listed(range(first, min(last, len(self)))):
            low = max(begin - run.at, 0)
            high = min(end - run.at, run.nbytes * run.rows)
            yield from _cut(run, low, high)

    @cached_property
    def _by_start(self) -> tuple[Numbers, Numbers, Numbers]:
        """The runs in the order of their starts, those starts, and the furthest end up to each."""
        order: Numbers = np.argsort(self.starts, kind="stable")
        return order, self.starts[order], np.maximum.accumulate(self.ends[order])

    def volume_between(self, begin: int, end: int) -> Iterator[StridedRun]:
        """The runs in bytes [begin, end) of the volume."""
        order, starts, furthest = self._by_start
        first = int(np.searchsorted(furthest, begin, "right"))
        last = int(np.searchsorted(starts, end, "left"))
        for run in self._listed(order[first:last].tolist()):
            yield from _within(run, begin, end)

    def _listed(self, chosen: Sequence[int]) -> Iterator[StridedRun]:
        some = list(chosen)
        columns = (self.starts, self.nbytes, self.strides, self.counts, self.places)
        return map(StridedRun, *(column[some].tolist() for column in columns))

    # Bytes.

    def pack(self, volume: Bytes, begin: int, end: int, out: Bytes) -> None:
        """Copy bytes [begin, end) of the packed bytes out of a volume."""
        for run in self.packed_between(begin, end):
            run.of_packed(out, begin)[...] = run.of_volume(volume)

    @cached_property
    def parts(self) -> list[tuple[int, int, int]]:
        """The part chunks: `(begin, end, itemsize)` of the packed bytes. Each has one itemsize."""
        turns = np.flatnonzero(np.diff(self.itemsizes)) + 1
        firsts = [0, *turns.tolist(), len(self)] if len(self) else []
        found = []
        for first, last in pairwise(firsts):
            begin, end = int(self.places[first]), int(self.places[last])
            itemsize = int(self.itemsizes[first])
            for at in range(begin, end, PART_BYTES):
                found.append((at, min(at + PART_BYTES, end), itemsize))
        return found

    # As a request has them.

    def encoded(self) -> list[bytes]:
        return [pack_column(column) for column in self.columns]

    @classmethod
    def decoded(cls, columns: Sequence[bytes], nbytes: int) -> PartRuns:
        """Runs of a volume of `nbytes`; `RemoteProtocolError` unless all of them lie in it, and
        have together no more bytes than it."""
        if len(columns) != 5 or any(len(one) > 1 + 8 * MAX_RUNS for one in columns):
            raise RemoteProtocolError("runs have five columns of limited length")
        try:
            runs = cls(*map(unpack_column, columns))
        except ValueError as fault:
            raise RemoteProtocolError(f"runs are malformed: {fault}") from None
        runs.check(nbytes)
        return runs

    def check(self, nbytes: int) -> None:
        """`RemoteProtocolError` unless the runs fit into a volume of `nbytes`."""
        if len({len(column) for column in self.columns}) > 1 or not 0 < len(self) <= MAX_RUNS:
            raise RemoteProtocolError(
                f"a volume has 1 to {MAX_RUNS} runs, in columns of one length"
            )
        # Every number is bounded first, so that no product of two of them overflows.
        for column in self.columns:
            if int(column.min()) < 0 or int(column.max()) > nbytes:
                raise RemoteProtocolError(f"a run lies outside of {nbytes} bytes")
        if int(self.counts.min()) < 1 or int(self.nbytes.min()) < 1:
            raise RemoteProtocolError("a run is empty")
        if not np.isin(self.itemsizes, ITEMSIZES).all():
            raise RemoteProtocolError("an element has 1, 2, 4, 8 or 16 bytes")
        # A part chunk has one itemsize: runs that change it each time would have the server make a
        # chunk, with a digest, of each.
        if (self.itemsizes[1:] < self.itemsizes[:-1]).any():
            raise RemoteProtocolError("runs are in the order of their itemsizes")
        if (self.nbytes % self.itemsizes).any() or (self.strides % self.itemsizes).any():
            raise RemoteProtocolError("a run cuts through an element")
        if ((self.counts > 1) & (self.strides < self.nbytes)).any():
            raise RemoteProtocolError("the rows of a run overlap each other")
        # In floating point: a product of two numbers up to 2**50 does not fit into 64 bits.
        reach = (self.counts - 1).astype(np.float64) * self.strides
        if float(reach.max()) > nbytes or int(self.ends.max()) > nbytes:
            raise RemoteProtocolError(f"a run lies outside of {nbytes} bytes")
        if float((self.nbytes.astype(np.float64) * self.counts).sum()) > nbytes:
            raise RemoteProtocolError("the runs of a volume have more bytes than the volume")


class VolumeParts(msgspec.Struct, array_like=True):
    """The wanted runs of a volume. `base`: the snapshot whose bytes the reader has already."""

    name: str
    base: str | None
    columns: list[bytes]


class PartsRequest(msgspec.Struct, array_like=True):
    """The body of `POST /parts`: parts of the volumes of a snapshot, in this order."""

    snapshot: str
    volumes: list[VolumeParts]


_request = msgspec.msgpack.Decoder(PartsRequest)


def decode_request(body: bytes) -> PartsRequest:
    """`RemoteProtocolError` for a malformed request. The columns are not decoded here."""
    try:
        found = _request.decode(body)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        raise RemoteProtocolError("the body does not ask for parts") from None
    names = [volume.name for volume in found.volumes]
    if not 0 < len(names) <= MAX_VOLUMES or len(set(names)) < len(names):
        raise RemoteProtocolError(f"a request names 1 to {MAX_VOLUMES} volumes, each once")
    if any(len(name) > MAX_NAME for name in names):
        raise RemoteProtocolError(f"a volume's name has at most {MAX_NAME} characters")
    return found


def runs_of(boxes: Iterable[PartBox], nbytes: int) -> PartRuns:
    """The runs of boxes in a volume of `nbytes`, in the order in which they are packed: by itemsize
    and start, so that a part chunk has as many bytes as it may. Runs that touch are one."""
    rows = {row for box in boxes for row in _rows_of(*box)}
    found = _joined(np.array(sorted(rows), np.int64).reshape(-1, 5))
    if found.total <= nbytes:
        return found
    # Boxes that overlap each other: the whole of what they span is less.
    low, high = int(found.starts.min()), int(found.ends.max())
    return PartRuns(*(np.array([x]) for x in (low, high - low, high - low, 1, 1)))


def _rows_of(
    start: int, itemsize: int, shape: Sequence[int], offsets: Sequence[int], sizes: Sequence[int]
) -> Iterator[tuple[int, int, int, int, int]]:
    if not prod(sizes):
        return
    strides = [itemsize * stride for stride in contiguous_strides(tuple(shape))]
    start += sum(offset * stride for offset, stride in zip(offsets, strides, strict=True))
    # Dimensions from the inside, as long as the elements lie next to each other.
    dim, nbytes = len(sizes), itemsize
    while dim and (sizes[dim - 1] == 1 or strides[dim - 1] == nbytes):
        dim -= 1
        nbytes *= sizes[dim]
    outer = [(sizes[d], strides[d]) for d in range(dim) if sizes[d] > 1]
    count, stride = outer.pop() if outer else (1, nbytes)
    while outer and outer[-1][1] == count * stride:
        count *= outer.pop()[0]
    for index in np.ndindex(*(size for size, _ in outer)):
        skip = sum(i * step for i, (_, step) in zip(index, outer, strict=True))
        yield itemsize, start + skip, nbytes, stride, count


def _joined(rows: np.ndarray[Any, np.dtype[np.int64]]) -> PartRuns:
    itemsizes, starts, nbytes, strides, counts = rows.T
    ends = starts + nbytes
    dense = counts == 1
    follows = np.zeros(len(rows), np.bool_)
    follows[1:] = (
        dense[1:] & dense[:-1] & (starts[1:] == ends[:-1]) & (itemsizes[1:] == itemsizes[:-1])
    )
    first = np.flatnonzero(~follows)
    sizes = np.add.reduceat(nbytes, first) if len(first) else nbytes
    chosen = [column[first] for column in (starts, strides, counts, itemsizes)]
    stride = np.where(chosen[2] == 1, sizes, chosen[1])
    return PartRuns(chosen[0], sizes, stride, chosen[2], chosen[3])


def _rows(memory: Bytes, start: int, nbytes: int, stride: int, count: int) -> Bytes:
    """Rows of bytes in memory; the caller has checked that they lie in it."""
    if count == 1:
        return memory[start : start + nbytes]
    reach = memory[start : start + (count - 1) * stride + nbytes]
    return np.lib.stride_tricks.as_strided(reach, (count, nbytes), (stride, 1))


def _cut(run: StridedRun, low: int, high: int) -> Iterator[StridedRun]:
    """Bytes [low, high) of a run's packed bytes: the rest of a row, whole rows, part of a row."""
    start, nbytes, stride, _, at = run
    if low >= high:
        return
    (first, skip), (last, rest) = divmod(low, nbytes), divmod(high, nbytes)
    begin = start + first * stride + skip
    if first == last:
        yield StridedRun(begin, high - low, high - low, 1, at + low)
        return
    if skip:
        yield StridedRun(begin, nbytes - skip, nbytes - skip, 1, at + low)
        first += 1
    if first < last:
        yield StridedRun(start + first * stride, nbytes, stride, last - first, at + first * nbytes)
    if rest:
        yield StridedRun(start + last * stride, rest, rest, 1, at + last * nbytes)


def _within(run: StridedRun, begin: int, end: int) -> Iterator[StridedRun]:
    """The rows of a run in bytes [begin, end) of the volume."""
    start, nbytes, stride, count, _ = run
    if start >= begin and start + (count - 1) * stride + nbytes <= end:
        yield run
        return

    def packed(position: int) -> int:
        """How many of the run's bytes lie before a byte of the volume."""
        row, skip = divmod(max(position - start, 0), stride)
        return min(row, count) * nbytes + (min(skip, nbytes) if row < count else 0)

    yield from _cut(run, packed(begin), packed(end))
