"""Tensors of this process, read as the volumes of a state are."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from torchrelay.describing.region import Region, Stream
from torchrelay.inspection.opened_state import Contents


class TensorReader:
    """Implements `StateReader`: each tensor is a volume with its elements, row-major. Tensors of a
    GPU, and those that are not in one run, are copied as they are read. Any number of threads may
    read."""

    contents = Contents(None, 1, (), ())

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._streams = [Stream.of([(0, Region.row_major(x))], x.nbytes) for x in tensors]
        self._tensors = tensors  # keeps their memory

    def read_into(self, volume: int, start: int, view: memoryview) -> None:
        """See `StateReader`."""
        # Elements that are not in one run are copied whole.
        size, stop = self._tensors[volume].element_size(), start + len(view)
        low, high = start // size * size, -(-stop // size) * size
        if (low, high) == (start, stop):
            self._streams[volume].read(low, high, torch.frombuffer(view, dtype=torch.uint8))
            return
        whole = torch.empty(high - low, dtype=torch.uint8, device="cpu")
        self._streams[volume].read(low, high, whole)
        view[:] = whole.numpy()[start - low : stop - low].data
