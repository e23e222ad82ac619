"""Volumes of a step that lie in memory of a GPU one behind the other: their digests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch

from torchrelay.geometry.runs import Column, Runs
from torchrelay.memory.digest import joined_each
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
    """The cells of the chunks of volumes, in ascending order of their starts."""
    begin, end, _ = _cells_of(volumes)
    memory = Runs([0], [address], [volumes[-1].start + volumes[-1].nbytes])
    return ChunkTable.of(memory, begin, end)


def split_by_volume(cells: bytes, volumes: Sequence[PlacedVolume]) -> list[bytes]:
    """The digests of each volume's chunks, of those of the cells of all."""
    digests, at, found = joined_each(cells, _cells_of(volumes)[2]), 0, []
    for one in volumes:
        count = -(-one.nbytes // one.chunk_bytes)
        found.append(b"".join(digests[at : at + count]))
        at += count
    return found


def _cells_of(volumes: Sequence[PlacedVolume]) -> tuple[Column, Column, list[int]]:
    starts, sizes = [], []
    for one in volumes:
        end = one.start + one.nbytes
        starts.append(np.arange(one.start, end, one.chunk_bytes, dtype=np.int64))
        sizes.append(np.minimum(one.chunk_bytes, end - starts[-1]))
    return kernels.cells_of(np.concatenate(starts), np.concatenate(sizes))


def digests_of_volumes(address: int, volumes: Sequence[PlacedVolume], device: int) -> list[bytes]:
    """The digests of each volume's chunks, in ascending order of the volumes' starts."""
    with torch.cuda.device(device), side_stream():
        found = kernels.digests(table_of_volumes(address, volumes), device).cpu()
    return split_by_volume(found.numpy().tobytes(), volumes)
