"""Images that are held back until a landing commits, in host memory or on a device."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch

from torchrelay.errors import MismatchError
from torchrelay.geometry.chunks import Chunks
from torchrelay.geometry.runs import Column, Moves, Runs
from torchrelay.landing.destination import Indices, Marks, Straight
from torchrelay.landing.leaves import strides_of
from torchrelay.landing.places import ImageMemory
from torchrelay.landing.workspace import Workspace
from torchrelay.record import manifest as m
from torchrelay.record.schema import Record
from torchrelay.state import tensors as t


class DeviceSlab(NamedTuple):
    """Images that are held in one piece of a device's memory, in order."""

    slab: torch.Tensor
    device: torch.device
    images: Indices
    places: Column  # in the slab
    sizes: Column

    def image(self, image: int) -> torch.Tensor | None:
        row = int(np.searchsorted(self.images, image))
        if row == len(self.images) or self.images[row] != image:
            return None
        at = int(self.places[row])
        return self.slab[at : at + int(self.sizes[row])]

    def memory(self, starts: Column) -> Runs:
        """Where the images lie, by their positions in the stream."""
        addresses = self.places + np.uint64(self.slab.data_ptr())
        return Runs(starts[self.images], addresses, self.sizes)

    def moves(self, plain: Straight, starts: Column) -> Moves:
        """From the images to plain tensors whose images are all held here."""
        row = np.searchsorted(self.images, plain.image)
        skip = plain.at - starts[plain.image]
        sources = self.places[row] + skip + np.uint64(self.slab.data_ptr())
        return Moves(plain.at, sources, plain.address, plain.nbytes)


class HeldImages:
    """Memory for some of the images of a record. `far` has those that are made on a device to
    stay there; `hold` is called once it is known which ones the host holds."""

    def __init__(self, record: Record, chunks: Chunks, workspace: Workspace) -> None:
        self._sizes = record.box_bytes.astype(np.uint64)
        self._chunks = chunks
        self._workspace = workspace
        self.far: dict[int, torch.Tensor] = {}
        self.slabs: list[DeviceSlab] = []

    def put_on(self, device: torch.device, images: set[int]) -> bool:
        """Take memory of the device for these images; whether it has so much."""
        order: Indices = np.sort(np.array(list(images), np.intp))
        ends = np.cumsum(self._chunks.rooms[order])
        try:
            slab = self._workspace.stage(int(ends[-1]) if len(ends) else 0, device)
        except MismatchError:
            return False
        places = ends - self._chunks.rooms[order]
        self.slabs.append(DeviceSlab(slab, device, order, places, self._sizes[order]))
        return True

    def on_devices(self) -> set[int]:
        """The images that are on devices already."""
        return set(self.far).union(*(held.images.tolist() for held in self.slabs))

    def hold(self, held: Marks) -> None:
        """Take host memory for the images that are marked."""
        self.order = np.flatnonzero(held)
        sizes = self._chunks.rooms[self.order]
        ends = np.cumsum(sizes)
        self._slab = self._workspace.stage(int(ends[-1]) if len(ends) else 0)
        self._places = ends - sizes
        # Images that follow each other in the stream do so in the slab: these are few runs.
        self.host = Runs(
            self._chunks.places[self.order],
            self._places + np.uint64(self._slab.data_ptr()),
            sizes,
        )

    @cached_property
    def at(self) -> dict[int, int]:
        """Where in host memory each image is that is held there."""
        return dict(zip(self.order.tolist(), self._places.tolist(), strict=True))

    def memory(self) -> Iterator[ImageMemory]:
        """The images, but for those that are made to stay."""
        for image, at in self.at.items():
            yield ImageMemory(image, self._slab.untyped_storage(), at)
        for held in self.slabs:
            for image, at in zip(held.images.tolist(), held.places.tolist(), strict=True):
                yield ImageMemory(image, held.slab.untyped_storage(), at)

    def memory_of(self, image: int) -> ImageMemory | None:
        if image in self.at:
            return ImageMemory(image, self._slab.untyped_storage(), self.at[image])
        for held in self.slabs:
            row = int(np.searchsorted(held.images, image))
            if row < len(held.images) and held.images[row] == image:
                return ImageMemory(image, held.slab.untyped_storage(), int(held.places[row]))
        return None

    def far_bytes(self, image: int) -> torch.Tensor | None:
        """An image on a device, if it goes there or is held there."""
        for held in self.slabs:
            if (found := held.image(image)) is not None:
                return found
        return self.far.get(image)

    def bytes(self, image: int) -> torch.Tensor:
        far = self.far_bytes(image)
        if far is not None:
            return far
        at = self.at[image]
        return self._slab[at : at + int(self._sizes[image])]

    def part(self, part: m.TensorLeaf) -> torch.Tensor:
        """A tensor over an image in host memory."""
        if part.storage < 0:
            return t.without_storage(part, strides_of(part), "cpu")
        offset = self.at[part.storage] + part.offset
        return t.over_storage(self._slab.untyped_storage(), offset, part, strides_of(part))


def only_device(tensors: list[torch.Tensor]) -> torch.device | None:
    """The one GPU that tensors are on, if it is one."""
    numbers = set(map(torch.Tensor.get_device, tensors))
    return torch.device("cuda", numbers.pop()) if len(numbers) == 1 else None
