"""The table by which the kernels of kernels.cu find the bytes of chunks. Pure.

Cells are hashed (`memory.digest`): each counts as a chunk here. A chunk of a stream lies in memory
in segments. For each the kernels want the address at which byte 0 of the chunk would lie if the
chunk were in one piece: byte `n` is then at `base + n`, in the segment that has it.

A stream of 12 bytes in chunks of 8 and 4, where bytes 0 to 5 lie at address
100 and bytes 8 to 11 at address 200:

    stream      0 1 2 3 4 5 | 6 7 | 8 9 10 11        bytes 6 and 7 are padding: zeros
    memory      100 ... 105 | -   | 200 ... 203

    chunks      first segment   bytes      segments   base                  ends at   goes to
    0           0               8          0          100                   6         0
    1           2               4          1          0, which is zeros     8         0
                                           2          200                   4         0

Chunk 1 begins with its segment, so its base is where byte 8 of the stream lies. Where the kernels
also copy, `goes to` is the base of the destination. A base may be below 0, modulo 2**64: if byte 8
of the stream lay at address 4 in chunk 0, its base would be 4 - 8.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from torchrelay.geometry.runs import Column, Runs, holding

Numbers = np.ndarray[Any, np.dtype[np.uint64]]


@dataclass(frozen=True)
class ChunkTable:
    """Chunks of a stream, where their bytes lie, and where they are copied to if `copies`."""

    numbers: Numbers  # rows of chunks, then rows of segments: one transfer to the device
    count: int  # of chunks
    copies: bool

    @property
    def chunks(self) -> Numbers:
        """Rows of first segment and bytes."""
        return self.numbers[: 2 * self.count].reshape(-1, 2)

    @property
    def segments(self) -> Numbers:
        """Rows of base address (0: zeros), end in the chunk, and base address to copy to (or 0)."""
        return self.numbers[2 * self.count :].reshape(-1, 3)

    @classmethod
    def of(cls, memory: Runs, starts: Column, stops: Column, to: Runs | None = None) -> ChunkTable:
        """Chunks [start, stop), in the order of the stream. Bytes outside of the memory are
        zeros. `to`: where the same bytes are copied to."""
        # A segment ends where a chunk does, and where memory at either end begins or ends.
        edges = [memory.starts, memory.stops]
        if to is not None:
            edges += [to.starts, to.stops]
        low, high, chunk = _segments(starts, stops, np.concatenate(edges))
        count = len(starts)
        made = cls(np.empty(2 * count + 3 * len(low), np.uint64), count, to is not None)
        made.chunks[:, 0] = np.searchsorted(chunk, np.arange(count))
        made.chunks[:, 1] = stops - starts
        begin = starts[chunk]
        made.segments[:, 0] = _bases(memory, low, begin)
        made.segments[:, 1] = high - begin
        made.segments[:, 2] = 0 if to is None else _bases(to, low, begin)
        return made


def _segments(starts: Column, stops: Column, edges: Column) -> tuple[Column, Column, Any]:
    """Begin and end of each segment in the stream, and its chunk: chunks, cut at the edges that lie
    inside of them."""
    edges = edges if len(starts) else starts
    within = np.searchsorted(starts, edges, side="right") - 1
    inside = (within >= 0) & (edges > starts[within]) & (edges < stops[within])
    low = np.unique(np.concatenate((starts, edges[inside])))
    chunk = np.searchsorted(starts, low, side="right") - 1
    high = np.minimum(np.append(low[1:], stops[-1:]), stops[chunk])
    some = low < high  # not the chunks that are empty
    return low[some], high[some], chunk[some]


def _bases(memory: Runs, low: Column, begin: Column) -> Column:
    """Where the chunks that begin there would begin, by where these bytes of them are; 0 where they
    are nowhere."""
    if not len(memory.starts):
        return np.zeros(len(low), np.uint64)
    run = holding(memory, low)
    found: Column = memory.addresses[run] + (begin - memory.starts[run])  # modulo 2**64
    found[run < 0] = 0
    return found
