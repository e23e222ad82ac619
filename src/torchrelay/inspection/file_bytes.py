"""Whole tensors of a state as the bytes of a safetensors file, a few MiB at a time.

Every such file is made here, whether it is written to a disk or sent to a client: all that is held
of it is its header and the piece that is on its way.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate
from math import prod
from typing import NamedTuple

from torchrelay.inspection.numbers import memory_of
from torchrelay.inspection.opened_state import StateReader
from torchrelay.inspection.slabs import slabs
from torchrelay.planning.stored import StoredTensor
from torchrelay.record.dtypes import itemsize

PIECE_BYTES = 4 << 20


class Run(NamedTuple):
    """Bytes of a volume, in which tensors of the file lie one behind the other."""

    volume: int
    start: int
    nbytes: int


class FileBytes:
    """The bytes of a file: a header, and behind it these tensors, each row-major."""

    def __init__(self, header: bytes, tensors: Iterable[StoredTensor]) -> None:
        self._header = header
        self._parts: list[Run | StoredTensor] = []
        for tensor in tensors:
            self._add(tensor)
        *self._starts, self.nbytes = accumulate(map(_size, self._parts), initial=len(header))

    def _add(self, tensor: StoredTensor) -> None:
        boxes = sorted(tensor.shards, key=lambda box: box.offsets)
        if any(box.sizes[1:] != tensor.shape[1:] for box in boxes):
            self._parts.append(tensor)  # read slab by slab
            return
        for box in boxes:
            run, last = Run(box.file, box.start, _nbytes(tensor, box.sizes)), None
            if self._parts and isinstance(self._parts[-1], Run):
                last = self._parts[-1]
            if last and (last.volume, last.start + last.nbytes) == run[:2]:
                self._parts[-1] = last._replace(nbytes=last.nbytes + run.nbytes)
            elif run.nbytes:
                self._parts.append(run)

    def ranges(self, nbytes: int) -> Iterator[tuple[int, int]]:
        """The file in ranges of about `nbytes`, for threads. A cut in a run is at a multiple of
        `nbytes` of its volume, so that no chunk there is read for two of the ranges."""
        at = 0
        for part, begin in zip(self._parts, self._starts, strict=True):
            low = -part.start % nbytes if isinstance(part, Run) else 0
            for cut in range(begin + low, begin + _size(part), nbytes):
                if cut - at >= nbytes // 2:
                    yield at, cut
                    at = cut
        if at < self.nbytes:
            yield at, self.nbytes

    def pieces(
        self,
        reader: StateReader,
        start: int,
        stop: int,
        piece_bytes: Callable[[int], int] = lambda volume: PIECE_BYTES,
    ) -> Iterator[bytes | memoryview]:
        """The bytes of a range, in order. Each piece is valid until the next one. `piece_bytes`:
        how many are read at once of a volume; pieces begin at multiples of it there, so that no
        chunk is read for two of them."""
        if start < len(self._header):
            yield self._header[start:stop]
        at = max(start, len(self._header))
        first = max(0, bisect_right(self._starts, at) - 1)
        for part, begin in zip(self._parts[first:], self._starts[first:], strict=True):
            for piece in _bytes(reader, part, at - begin, stop - begin, piece_bytes):
                yield piece
                at += len(piece)
            if at >= stop:
                return


def _bytes(
    reader: StateReader,
    part: Run | StoredTensor,
    start: int,
    stop: int,
    piece_bytes: Callable[[int], int],
) -> Iterator[memoryview]:
    """Bytes of a run or tensor, as far as it has them."""
    if start >= stop:
        return
    if isinstance(part, Run):
        stop = min(stop, part.nbytes)
        size = piece_bytes(part.volume)
        buffer = memoryview(bytearray(max(0, min(size, stop - start))))
        while start < stop:
            position = part.start + start
            piece = buffer[: min(size - position % size, stop - start)]
            reader.read_into(part.volume, position, piece)
            yield piece
            start += len(piece)
        return
    for slab in slabs(reader, part, PIECE_BYTES, start):
        piece = memory_of(slab)[: stop - start]
        yield piece
        start += len(piece)
        if start >= stop:
            return


def _size(part: Run | StoredTensor) -> int:
    return part.nbytes if isinstance(part, Run) else _nbytes(part, part.shape)


def _nbytes(tensor: StoredTensor, shape: Sequence[int]) -> int:
    return prod(shape) * itemsize(tensor.dtype)
