"""Images that are held back until a landing commits, in host memory or on a device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch

from torchrelay.errors import MismatchError
from torchrelay.geometry.chunks import Chunks
from torchrelay.geometry.runs import Column, Moves, Runs
from torchrelay.landing.destination import Indices, Marks, Straight
from torchrelay.landing.leaves import strides_of, without_bytes
from torchrelay.landing.places import ImageMemory
from torchrelay.landing.workspace import Workspace
from torchrelay.record import manifest as m
from torchrelay.record.schema import Record
from torchrelay.state import tensors as t


class Slab(NamedTuple):
    """Images that are held in one piece of memory, in order."""

    slab: torch.Tensor
    images: Indices
    places: Column  # in the slab
    padded: Column  # bytes of each, and what alignment adds

    def place(self, image: int) -> int | None:
        """Where in the slab an image is, if it is there."""
        row = int(np.searchsorted(self.images, image))
        there = row < len(self.images) and self.images[row] == image
        return int(self.places[row]) if there else None

    def memory(self, starts: Column, sizes: Column) -> Runs:
        """Where the images lie, by their positions in the stream."""
        addresses = self.places + np.uint64(self.slab.data_ptr())
        return Runs(starts[self.images], addresses, sizes)

    def moves(self, plain: Straight, starts: Column) -> Moves:
        """From the images to plain tensors whose images are all held here."""
        row = np.searchsorted(self.images, plain.image)
        skip = plain.at - starts[plain.image]
        sources = self.places[row] + skip + np.uint64(self.slab.data_ptr())
        return Moves(plain.at, sources, plain.address, plain.nbytes)


class HeldImages:
    """Memory for some of the images of a record. `homes` has those that the caller is going to
    keep, each in memory of its own. Others are put on devices, and then the host holds the rest."""

    def __init__(
        self,
        record: Record,
        chunks: Chunks,
        workspace: Workspace,
        homes: dict[int, torch.Tensor],
    ) -> None:
        self._sizes = record.box_bytes.astype(np.uint64)
        self._chunks, self._workspace = chunks, workspace
        self.homes = homes
        self.far = {image: home for image, home in homes.items() if not home.is_cpu}
        self.slabs: list[Slab] = []  # of devices

    def _taken(self, images: Indices, device: torch.device | str = "cpu") -> Slab:
        padded = self._chunks.padded[images]
        ends = np.cumsum(padded)
        slab = self._workspace.stage(int(ends[-1]) if len(ends) else 0, device)
        return Slab(slab, images, ends - padded, padded)

    def put_on(self, device: torch.device, images: set[int]) -> bool:
        """Take memory of the device for these images; whether it has so much."""
        try:
            self.slabs.append(self._taken(np.sort(np.array(list(images), np.intp)), device))
        except MismatchError:
            return False
        return True

    def on_devices(self) -> set[int]:
        """The images that are on devices already."""
        return set(self.far).union(*(held.images.tolist() for held in self.slabs))

    def hold(self, held: Marks) -> None:
        """Take host memory for the images that are marked."""
        self._near = self._taken(np.flatnonzero(held))
        self.order = self._near.images
        # Images that follow each other in the stream do so in the slab: these are few runs.
        self.host = self._near.memory(self._chunks.places, self._near.padded)
        near = {image: home for image, home in self.homes.items() if home.is_cpu}
        if near:
            self.host = Runs.merged(self.host, self._runs(near))

    def _runs(self, homes: Mapping[int, torch.Tensor]) -> Runs:
        start = self._chunks.start_of
        return Runs.of([(start(n), home.data_ptr(), home.nbytes) for n, home in homes.items()])

    def device_memory(self) -> Runs:
        """Where images lie that are held on devices, by their positions in the stream."""
        slabs = [one.memory(self._chunks.places, self._sizes[one.images]) for one in self.slabs]
        return Runs.merged(self._runs(self.far), *slabs)

    @cached_property
    def at(self) -> dict[int, int]:
        """Where in host memory each image is that is held there."""
        return dict(zip(self.order.tolist(), self._near.places.tolist(), strict=True))

    def memory(self) -> Iterator[ImageMemory]:
        """All of the memory, by image."""
        for held in (self._near, *self.slabs):
            for image, at in zip(held.images.tolist(), held.places.tolist(), strict=True):
                yield ImageMemory(image, held.slab.untyped_storage(), at)
        for image, home in self.homes.items():
            yield ImageMemory(image, home.untyped_storage(), 0)

    def memory_of(self, image: int) -> ImageMemory | None:
        if image in self.homes:
            return ImageMemory(image, self.homes[image].untyped_storage(), 0)
        for held in (self._near, *self.slabs):
            if (at := held.place(image)) is not None:
                return ImageMemory(image, held.slab.untyped_storage(), at)
        return None

    def far_bytes(self, image: int) -> torch.Tensor | None:
        """An image on a device, if it goes there or is held there."""
        for held in self.slabs:
            if (at := held.place(image)) is not None:
                return held.slab[at : at + int(self._sizes[image])]
        return self.far.get(image)

    def bytes(self, image: int) -> torch.Tensor:
        far = self.far_bytes(image)
        if far is not None:
            return far
        at = self.at[image]
        return self._near.slab[at : at + int(self._sizes[image])]

    def part(self, part: m.TensorLeaf) -> torch.Tensor:
        """A tensor over an image in host memory."""
        if part.storage < 0:
            return without_bytes(part)
        storage, at = self._near.slab.untyped_storage(), self.at[part.storage]
        return t.over_storage(storage, at + part.offset, part, strides_of(part))


def only_device(tensors: list[torch.Tensor]) -> torch.device | None:
    """The one GPU that tensors are on, if it is one."""
    numbers = set(map(torch.Tensor.get_device, tensors))
    return torch.device("cuda", numbers.pop()) if len(numbers) == 1 else None
