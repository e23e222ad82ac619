"""Volumes of a step that lie in memory of a GPU one behind the other: their digests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch

from torchrelay.geometry.runs import Runs
from torchrelay.memory.gpu import kernels
from torchrelay.memory.gpu.kernels import ChunkTable, Tables
from torchrelay.memory.gpu.side import side_stream


class PlacedVolume(Protocol):
    """Where a volume begins, how long it is, and how it is cut into chunks."""

    @property
    def start(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def chunk_bytes(self) -> int: ...


def digests_of_volumes(
    address: int, volumes: Sequence[PlacedVolume], device: int, tables: Tables
) -> list[bytes]:
    """XXH3-128 of each volume's chunks, in ascending order of the volumes' starts."""
    starts = [
        np.arange(one.start, one.start + one.nbytes, one.chunk_bytes, dtype=np.uint64)
        for one in volumes
    ]
    stops = [
        np.minimum(begin + np.uint64(one.chunk_bytes), np.uint64(one.start + one.nbytes))
        for begin, one in zip(starts, volumes, strict=True)
    ]
    end = max((one.start + one.nbytes for one in volumes), default=0)
    memory = Runs([0], [address], [end])
    table = ChunkTable.of(memory, np.concatenate(starts), np.concatenate(stops))
    with torch.cuda.device(device), side_stream():
        found = kernels.digests(table, device, tables).cpu().numpy()
    ends = np.cumsum([len(begin) for begin in starts])
    return [part.tobytes() for part in np.split(found, ends[:-1])]
