"""A state in memory, cut into boxes, as a `OpenedState`: what a test makes up to be looked at."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from torchrelay.inspection.opened_state import Contents
from torchrelay.planning.stored import Shard, StoredTensor
from torchrelay.progress import ProgressCallback
from torchrelay.record.schema import VolumeRecord
from torchrelay.state.tensors import NAMES

BoxOf = tuple[tuple[int, ...], tuple[int, ...]]


class HeldSource:
    """Each box of each tensor has a volume of its own. `largest` is the longest read so far."""

    def __init__(
        self,
        tensors: Mapping[str, torch.Tensor],
        boxes: Mapping[str, Sequence[BoxOf]] | None = None,
        step: int | None = None,
    ) -> None:
        self.name = "memory"
        self.largest = 0
        self._volumes: list[bytes] = []
        stored = []
        for name, tensor in tensors.items():
            shape = tuple(tensor.shape)
            cut = (boxes or {}).get(name, [((0,) * len(shape), shape)])
            shards = []
            for offsets, sizes in cut:
                part = tensor
                for dim, (start, length) in enumerate(zip(offsets, sizes, strict=True)):
                    part = part.narrow(dim, start, length)
                shards.append(Shard(offsets, sizes, len(self._volumes), 0))
                flat = part.contiguous().reshape(-1).view(torch.uint8)
                self._volumes.append(flat.numpy().tobytes())
            stored.append(StoredTensor(name, NAMES[tensor.dtype], shape, tuple(shards)))
        volumes = (VolumeRecord(f"box {n}", len(data)) for n, data in enumerate(self._volumes))
        self.contents = Contents(step, 1, tuple(stored), tuple(volumes))

    def read_into(self, volume: int, start: int, view: memoryview) -> None:
        self.largest = max(self.largest, view.nbytes)
        data = self._volumes[volume][start : start + view.nbytes]
        assert len(data) == view.nbytes
        np.asarray(view)[:] = np.frombuffer(data, "uint8")

    def verify(self, progress: ProgressCallback) -> str:
        return ""

    def close(self) -> None:
        pass
