"""A step as one standard safetensors file of whole tensors: its header, and where its bytes lie.

Nothing of the file is held but its header. A tensor that lies in one piece, or in pieces one
behind the other, is a list of runs of volumes. Any other is put together band by band: some of its
rows at a time, from the boxes that have a part of them. Pure.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from math import prod
from typing import NamedTuple

from torchrelay.patterns import matches
from torchrelay.plan.stored import Shard, StoredTensor
from torchrelay.record.dtypes import itemsize
from torchrelay.stores.safetensors import HeaderEntry, described, header

BAND_BYTES = 4 << 20


class Run(NamedTuple):
    """Bytes [start, stop) of a volume."""

    volume: int
    start: int
    stop: int


class Band(NamedTuple):
    """Rows [first, last) of a tensor whose boxes do not lie one behind the other."""

    tensor: StoredTensor
    first: int
    last: int

    def runs(self) -> Iterator[tuple[Run, Shard]]:
        """The run to read of each box that has some of the rows."""
        for box in self.tensor.shards:
            low = max(self.first, box.offsets[0])
            high = min(self.last, box.offsets[0] + box.sizes[0])
            if low < high and 0 not in box.sizes:
                row = prod(box.sizes[1:]) * itemsize(self.tensor.dtype)
                start = box.start + (low - box.offsets[0]) * row
                yield Run(box.file, start, start + (high - low) * row), box

    def put_together(self, parts: Iterable[tuple[Shard, bytes | memoryview]]) -> bytes:
        """The rows, of the bytes of each run."""
        import numpy as np  # 8 MB, which a keeper does without unless somebody asks for such a file

        element = np.dtype((np.void, itemsize(self.tensor.dtype)))
        rows = np.empty((self.last - self.first, *self.tensor.shape[1:]), element)
        for box, data in parts:
            low = max(self.first, box.offsets[0])
            piece = np.frombuffer(data, element).reshape(-1, *box.sizes[1:])
            inner = tuple(
                slice(o, o + s) for o, s in zip(box.offsets[1:], box.sizes[1:], strict=True)
            )
            place = (slice(low - self.first, low - self.first + len(piece)), *inner)
            rows[place] = piece
        return rows.tobytes()


class WholeFile:
    """The bytes of a file in order: the header, then runs and bands."""

    def __init__(self, tensors: Sequence[StoredTensor], metadata: dict[str, str]) -> None:
        # In descending order of item size each is aligned without holes.
        ordered = sorted(tensors, key=lambda tensor: -itemsize(tensor.dtype))
        entries = [
            HeaderEntry(
                tensor.name,
                *described(tensor.dtype, tensor.shape),
                prod(tensor.shape) * itemsize(tensor.dtype),
            )
            for tensor in ordered
        ]
        self.header = header(entries, metadata)
        self.nbytes = len(self.header) + sum(entry.nbytes for entry in entries)
        self._pieces: list[Run | Band] = []
        self._starts: list[int] = []
        self._end = len(self.header)
        for tensor in ordered:
            self._add(tensor)

    def _add(self, tensor: StoredTensor) -> None:
        boxes = sorted(tensor.shards, key=lambda box: box.offsets)
        if all(box.sizes[1:] == tensor.shape[1:] for box in boxes):
            for box in boxes:
                nbytes = prod(box.sizes) * itemsize(tensor.dtype)
                self._append(Run(box.file, box.start, box.start + nbytes), nbytes)
            return
        row = prod(tensor.shape[1:]) * itemsize(tensor.dtype)
        rows = max(1, BAND_BYTES // row)
        for first in range(0, tensor.shape[0], rows):
            band = Band(tensor, first, min(first + rows, tensor.shape[0]))
            self._append(band, (band.last - band.first) * row)

    def _append(self, piece: Run | Band, nbytes: int) -> None:
        if not nbytes:
            return
        last = self._pieces[-1] if self._pieces else None
        if (
            isinstance(piece, Run)
            and isinstance(last, Run)
            and (last.volume, last.stop) == (piece.volume, piece.start)
        ):
            self._pieces[-1] = Run(last.volume, last.start, piece.stop)
            self._end += nbytes
            return
        self._pieces.append(piece)
        self._starts.append(self._end)
        self._end += nbytes

    def within(self, start: int, stop: int) -> Iterator[bytes | Run | tuple[Band, int, int]]:
        """What makes up a range: bytes of the header, runs, and bytes [a, b) of bands."""
        if start < len(self.header):
            yield self.header[start:stop]
            start = len(self.header)
        place = bisect_right(self._starts, start) - 1
        while start < stop:
            piece, begin = self._pieces[place], self._starts[place]
            end = self._starts[place + 1] if place + 1 < len(self._starts) else self._end
            low, high = start - begin, min(stop, end) - begin
            if isinstance(piece, Run):
                yield Run(piece.volume, piece.start + low, piece.start + high)
            else:
                yield piece, low, high
            start, place = begin + high, place + 1


def chosen(tensors: Iterable[StoredTensor], patterns: Sequence[str]) -> list[StoredTensor]:
    """Tensors whose names match one of the patterns; all, where there is none."""
    if not patterns:
        return list(tensors)
    return [one for one in tensors if matches(one.name, patterns)]
