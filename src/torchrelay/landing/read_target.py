"""The memory that the bytes of one holder go to: for a transport, all there is to know of a
landing."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from torchrelay.describing.pieces import Pieces
from torchrelay.describing.region import Stream
from torchrelay.geometry.chunks import Chunks
from torchrelay.geometry.runs import Copy
from torchrelay.record.manifest import parts
from torchrelay.record.rows import LeafRows
from torchrelay.record.schema import Record
from torchrelay.state.paths import LeafPaths
from torchrelay.state.tree import show

_NAMED = 8  # tensors in a message


@dataclass
class Writes:
    """Whether bytes go to the caller's own tensors as they come (`live`), and whether those have
    been written to, but not all of them (`torn`)."""

    live: bool = False
    torn: bool = False

    def begin(self) -> None:
        """Called before bytes are written as they come."""
        self.torn = self.torn or self.live


class ReadTarget:
    """The chunks that are read of one holder, and the pieces that they fill. Bytes come by `write`,
    or the transport writes them to `stream` itself, after it has called `begin`."""

    def __init__(self, chunks: Chunks, pieces: Pieces, writes: Writes, copy: Copy) -> None:
        self.chunks, self._writes, self._copy = chunks, writes, copy
        self.stream = Stream.of((), chunks.stream_bytes, pieces=pieces)

    @property
    def on_device(self) -> bool:
        """Whether any of it goes to a device."""
        return bool(len(self.stream.device.starts))

    def begin(self) -> None:
        """Bytes are about to be written to `stream`."""
        self._writes.begin()

    def write(self, index: int, data: torch.Tensor) -> None:
        """Take chunk `index`, whose bytes are in the buffer `data`, on the host or a device.

        Several threads may, each with another chunk.
        """
        begin = self.chunks.offsets[index]
        self.begin()
        self.stream.write(begin, begin + self.chunks.sizes[index], data, self._copy)


def chunks_of(record: Record) -> Chunks:
    """The chunks of a stream. A share of several ranks' records has none: it comes in parts."""
    cuts = record.volumes[0].cuts if record.volumes else None
    return Chunks(record.box_bytes, () if cuts is None else cuts.tolist())


def named(record: Record, chunks: Chunks, start: int, stop: int) -> str:
    """Bytes [start, stop) of the stream, by the tensors they are of, for a message."""
    first = max(int(np.searchsorted(chunks.places, start, side="right")) - 1, 0)
    images = range(first, max(first + 1, int(np.searchsorted(chunks.places, stop))))
    leaves = LeafRows(record)
    paths = LeafPaths(leaves.tree)
    found = [
        show(paths[index])
        for index, leaf in enumerate(leaves)
        if index in paths and any(part.storage in images for part in parts(leaf))
    ]
    more = f" and {len(found) - _NAMED} more" if len(found) > _NAMED else ""
    offset = start - chunks.start_of(first) if record.images else start
    return f"{', '.join(found[:_NAMED])}{more} from byte {offset} on"
