"""A step as one standard safetensors file of whole tensors. Nothing of it is held but its header.

Readers of a file compare no digests, so they get copies: memory may be written to again while it is
on its way.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import accumulate
from math import prod
from typing import NamedTuple

from torchrelay.arguments import matches
from torchrelay.endpoint.server.step_reader import StepReader
from torchrelay.inspection.numbers import memory_of
from torchrelay.inspection.seam import Contents
from torchrelay.inspection.slabs import slabs
from torchrelay.plan.stored import StoredTensor
from torchrelay.record.dtypes import itemsize
from torchrelay.record.encoding import decode_at_rest
from torchrelay.stores.safetensors import header, tensors_of

COPY_BYTES = 1 << 20  # of this server's memory, at once
FILES_KEPT = 8  # headers
REMOTE_BYTES = 4 << 20  # of other servers' volumes, and of tensors that are put together


class Run(NamedTuple):
    """Bytes of a volume, in which tensors of the file lie one behind the other."""

    volume: int
    start: int
    nbytes: int


class WholeFile:
    """The file of a step's tensors whose names match one of the patterns; of all, without any."""

    def __init__(self, data: bytes, patterns: Sequence[str], snapshot: str) -> None:
        record = decode_at_rest(data)
        metadata = {"step": str(record.step), "snapshot": snapshot}
        tensors = [one for one in tensors_of(record) if not patterns or matches(one.name, patterns)]
        # In descending order of item size each is aligned without holes.
        tensors.sort(key=lambda tensor: -itemsize(tensor.dtype))
        self.contents = Contents(record.step, len(record.ranks), tensors, ())
        self._header = header(((one.name, one.dtype, one.shape) for one in tensors), metadata)
        self._parts: list[Run | StoredTensor] = []
        for tensor in tensors:
            self._add(tensor)
        sizes = [
            part.nbytes if isinstance(part, Run) else _nbytes(part, part.shape)
            for part in self._parts
        ]
        *self._starts, self.nbytes = accumulate(sizes, initial=len(self._header))

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

    def pieces(self, reader: StepReader, start: int, stop: int) -> Iterator[bytes | memoryview]:
        """The bytes of a range, in order. Each piece is valid until the next one."""
        if start < len(self._header):
            yield self._header[start:stop]
        at = max(start, len(self._header))
        first = max(0, bisect_right(self._starts, at) - 1)
        for part, begin in zip(self._parts[first:], self._starts[first:], strict=True):
            for piece in _bytes(reader, part, at - begin, stop - begin) if at < stop else ():
                yield piece
                at += len(piece)


whole_file = lru_cache(FILES_KEPT)(WholeFile)  # a reader may ask for many ranges of one


def _bytes(
    reader: StepReader, part: Run | StoredTensor, start: int, stop: int
) -> Iterator[memoryview]:
    """Bytes of a run or tensor, as far as it has them."""
    if isinstance(part, Run):
        stop = min(stop, part.nbytes)
        size = COPY_BYTES if reader.is_here(part.volume) else REMOTE_BYTES
        buffer = memoryview(bytearray(min(size, stop - start)))
        for at in range(start, stop, size):
            piece = buffer[: stop - at]
            reader.read_into(part.volume, part.start + at, piece)
            yield piece
        return
    for slab in slabs(reader, part, REMOTE_BYTES, start):
        piece = memory_of(slab)[: stop - start]
        yield piece
        start += len(piece)
        if start >= stop:
            return


def _nbytes(tensor: StoredTensor, shape: Sequence[int]) -> int:
    return prod(shape) * itemsize(tensor.dtype)
