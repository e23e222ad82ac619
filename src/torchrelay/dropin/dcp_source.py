"""A stock DCP directory as a state to be looked at; nothing that it holds is run.

Its tensors lie in archives of `torch.save`. The archive of one box is read and checked at a time,
so memory is bounded by the largest box, which is what one rank had of one tensor.
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import NamedTuple

import torch

from torchrelay.dropin._dcp_directory.files import StockDirectory
from torchrelay.dropin._dcp_directory.metadata import Chunk, StockTensor
from torchrelay.errors import CheckpointError
from torchrelay.inspection.numbers import memory_of
from torchrelay.inspection.seam import Contents, PlainValue, VolumeFacts
from torchrelay.inspection.step_source import shown
from torchrelay.plan.stored import Shard, StoredTensor
from torchrelay.progress import Progress, ProgressCallback
from torchrelay.state.tensors import NAMES

_RANKED = re.compile(r"__(\d+)_\d+\.distcp")


class _Piece(NamedTuple):
    """A volume: the elements of one box, which lie in an archive."""

    name: str
    item: StockTensor
    chunk: Chunk


class DcpSource:
    """Implements `OpenedState` on a directory whose metadata was checked whole."""

    def __init__(self, path: str) -> None:
        self.name = path
        self._directory = StockDirectory(Path(path))
        self._pieces: list[_Piece] = []
        self._held: tuple[int, torch.Tensor] | None = None  # the box that was read last
        tensors: list[StoredTensor] = []
        values: list[PlainValue] = []
        try:
            for name, item in self._directory.items.items():
                if isinstance(item, StockTensor):
                    tensors.append(self._stored(name, item))
                else:
                    values += _values(name, self._directory.value(name))
        except OSError as fault:
            raise CheckpointError(f"could not be read: {fault}", file=path) from fault
        volumes = tuple(map(self._volume, self._pieces))
        ranks = len({volume.rank for volume in volumes}) or 1
        self.contents = Contents(None, ranks, tuple(tensors), volumes, tuple(values))

    def _stored(self, name: str, item: StockTensor) -> StoredTensor:
        shards = []
        for chunk in item.chunks:
            shards.append(Shard(chunk.offsets, chunk.sizes, len(self._pieces), 0))
            self._pieces.append(_Piece(name, item, chunk))
        return StoredTensor(name, NAMES[item.dtype], item.shape, tuple(shards))

    @staticmethod
    def _volume(piece: _Piece) -> VolumeFacts:
        file = piece.chunk.piece.file
        match = _RANKED.fullmatch(file)
        nbytes = math.prod(piece.chunk.sizes) * piece.item.dtype.itemsize
        return VolumeFacts(file, nbytes, int(match[1]) if match else None)

    def read_into(self, volume: int, start: int, view: memoryview) -> None:
        if self._held is None or self._held[0] != volume:
            self._held = None  # two boxes at once are more than the bound
            part = self._directory.chunk(*self._pieces[volume])
            self._held = (volume, part.contiguous().reshape(-1).view(torch.uint8))
        data = self._held[1][start : start + view.nbytes]
        view[:] = memory_of(data.numpy())

    def verify(self, progress: ProgressCallback) -> str:
        total = sum(piece.chunk.piece.length for piece in self._pieces)
        done = 0
        for piece in self._pieces:
            self._directory.chunk(*piece)
            done += piece.chunk.piece.length
            progress(Progress(done, total))
        return "the format has CRC-32 checksums in place of digests; they were checked"

    def close(self) -> None:
        self._held = None
        self._directory.__exit__()


def _values(path: str, value: object) -> list[PlainValue]:
    """The plain values of an object: its items, if it is a container."""
    if isinstance(value, dict) and value:
        items = [(str(key), item) for key, item in value.items()]
    elif isinstance(value, (list, tuple)) and value:
        items = [(str(place), item) for place, item in enumerate(value)]
    else:
        return [PlainValue(path, shown(value))]
    return [found for key, item in items for found in _values(f"{path}.{key}", item)]
