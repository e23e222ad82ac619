"""Images of a state that are held in device memory until all of them are known to hold."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from torchrelay.geometry.runs import Column, Moves, Runs
from torchrelay.landing.destination import Indices, Straight


class DeviceSlab(NamedTuple):
    """Images that are held in one piece of a device's memory, in order."""

    slab: torch.Tensor
    device: torch.device
    storages: Indices
    places: Column  # in the slab
    sizes: Column

    def image(self, storage: int) -> torch.Tensor | None:
        row = int(np.searchsorted(self.storages, storage))
        if row == len(self.storages) or self.storages[row] != storage:
            return None
        at = int(self.places[row])
        return self.slab[at : at + int(self.sizes[row])]

    def memory(self, starts: Column) -> Runs:
        """Where the images lie, by their positions in the stream."""
        addresses = self.places + np.uint64(self.slab.data_ptr())
        return Runs(starts[self.storages], addresses, self.sizes)

    def moves(self, plain: Straight, starts: Column) -> Moves:
        """From the images to plain tensors whose storages are all held here."""
        row = np.searchsorted(self.storages, plain.storage)
        skip = plain.at - starts[plain.storage]
        sources = self.places[row] + skip + np.uint64(self.slab.data_ptr())
        return Moves(plain.at, sources, plain.address, plain.nbytes)


def only_device(tensors: list[torch.Tensor]) -> torch.device | None:
    """The one GPU that tensors are on, if it is one."""
    numbers = set(map(torch.Tensor.get_device, tensors))
    return torch.device("cuda", numbers.pop()) if len(numbers) == 1 else None
