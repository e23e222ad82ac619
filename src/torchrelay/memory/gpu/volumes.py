"""Volumes of a step that lie in memory of a GPU one behind the other: their digests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch

from torchrelay.geometry import DIGEST_BYTES
from torchrelay.geometry.runs import Runs
from torchrelay.memory.gpu import kernels
from torchrelay.memory.gpu.chunk_table import ChunkTable
from torchrelay.memory.gpu.side import side_stream


class PlacedVolume(Protocol):
    """Where a volume begins, how long it is, and how it is cut into chunks."""

    @property
    def start(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def chunk_bytes(self) -> int: ...


def table_of_volumes(address: int, volumes: Sequence[PlacedVolume]) -> ChunkTable:
    """The chunks of volumes, in ascending order of their starts."""
    starts, stops, end = [], [], 0
    for one in volumes:
        end = one.start + one.nbytes
        starts.append(np.arange(one.start, end, one.chunk_bytes, dtype=np.uint64))
        stops.append(np.minimum(starts[-1] + np.uint64(one.chunk_bytes), np.uint64(end)))
    memory = Runs([0], [address], [end])
    return ChunkTable.of(memory, np.concatenate(starts), np.concatenate(stops))


def split_by_volume(digests: bytes, volumes: Sequence[PlacedVolume]) -> list[bytes]:
    """The digests of all chunks, apart for each volume."""
    found, at = [], 0
    for one in volumes:
        nbytes = DIGEST_BYTES * -(-one.nbytes // one.chunk_bytes)
        found.append(digests[at : at + nbytes])
        at += nbytes
    return found


def digests_of_volumes(address: int, volumes: Sequence[PlacedVolume], device: int) -> list[bytes]:
    """XXH3-128 of each volume's chunks, in ascending order of the volumes' starts."""
    with torch.cuda.device(device), side_stream():
        found = kernels.digests(table_of_volumes(address, volumes), device).cpu()
    return split_by_volume(found.numpy().tobytes(), volumes)
