"""Images in memory of a landing's own: several of them in one piece, or each in one that the caller
is going to keep."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from torchrelay.geometry.boxes import Numbers
from torchrelay.geometry.chunks import Chunks
from torchrelay.geometry.runs import Column, Runs
from torchrelay.geometry.strides import contiguous_strides
from torchrelay.landing.leaves import strides_of
from torchrelay.landing.workspace import Workspace
from torchrelay.record import manifest as m
from torchrelay.record.rows import Marks
from torchrelay.record.schema import ImageKind
from torchrelay.state import tensors as t

_NOWHERE = -1


class HeldImages:
    """`memory` has pieces of memory, and `far` whether each is on a device. `numbers` has the piece
    that each image lies in, or -1, and `offsets` the byte there."""

    def __init__(self, chunks: Chunks) -> None:
        self._chunks = chunks
        self.memory: list[torch.Tensor] = []
        self.far: Marks = np.zeros(0, bool)
        self._sizes: Column = np.zeros(0, np.uint64)
        self._bases: Column = np.zeros(0, np.uint64)
        self.numbers: Numbers = np.full(len(chunks.image_bytes), _NOWHERE, np.int64)
        self.offsets: Column = np.zeros(len(chunks.image_bytes), np.uint64)

    def add(
        self,
        memory: Sequence[torch.Tensor],
        sizes: Sequence[int] | Numbers | Column,
        far: Sequence[bool] | Marks,
        images: Any,
        numbers: Any = 0,
        offsets: Any = 0,
        bases: Sequence[int] | Column | None = None,
    ) -> None:
        """Have images in new pieces of memory, with the bytes of each, from now on. `numbers` and
        `offsets` say where each image lies in them, `bases` where they begin, if that is known."""
        found = [*map(torch.Tensor.data_ptr, memory)] if bases is None else bases
        self._bases = np.append(self._bases, np.array(found, np.uint64))
        self.numbers[images], self.offsets[images] = len(self.memory) + numbers, offsets
        self.memory += memory
        self._sizes = np.append(self._sizes, np.array(sizes, np.uint64))
        self.far = np.append(self.far, far)

    def take(
        self, images: Numbers, workspace: Workspace, device: torch.device | None = None
    ) -> None:
        """Take one piece of memory for images that ascend. `MismatchError` where there is not so
        much."""
        if len(images):
            padded = self._chunks.padded[images]
            ends = np.cumsum(padded)
            piece = workspace.stage(int(ends[-1]), device or "cpu")
            far = [device is not None]
            self.add([piece], [int(ends[-1])], far, images, offsets=ends - padded)

    @property
    def marks(self) -> Marks:
        """Whether each image is held."""
        found: Marks = self.numbers != _NOWHERE
        return found

    def addresses(self, images: Numbers) -> Column:
        """Where images lie that are held."""
        found: Column = self._bases[self.numbers[images]] + self.offsets[images]
        return found

    def on_device(self, images: Numbers) -> Marks:
        """Whether images lie on a device that are held."""
        found: Marks = self.far[self.numbers[images]]
        return found

    def room(self, images: Numbers) -> Column:
        """Bytes from where images lie to the end of the memory there."""
        found: Column = self._sizes[self.numbers[images]] - self.offsets[images]
        return found

    def _images(self, *, far: bool) -> Numbers:
        kinds = np.append(self.far, not far)  # the last is for those that are not held
        return np.flatnonzero((kinds[self.numbers] == far) & (self._chunks.image_bytes > 0))

    def runs(self, *, far: bool) -> Runs:
        """Where images lie on devices, or in host memory, by their positions in the stream.

        Images that follow each other there do so in a piece of host memory: these are few runs.
        """
        images, chunks = self._images(far=far), self._chunks
        sizes = chunks.image_bytes[images].astype(np.uint64)
        if not far:  # with padding, which no device is sent
            sizes = np.minimum(chunks.padded[images], self.room(images))
        return Runs(chunks.places[images], self.addresses(images), sizes)

    def far_bytes(self) -> list[tuple[int, torch.Tensor]]:
        """Images that are held on devices, with their positions in the stream."""
        images = self._images(far=True).tolist()
        return [(self._chunks.start_of(image), self.bytes(image)) for image in images]

    def memory_of(self, image: int) -> tuple[torch.UntypedStorage, int]:
        """Where an image lies: a storage, and the byte there."""
        memory = self.memory[int(self.numbers[image])]
        return memory.untyped_storage(), t.byte_offset(memory) + int(self.offsets[image])

    def bytes(self, image: int) -> torch.Tensor:
        storage, offset = self.memory_of(image)
        return t.flat_bytes(storage, offset, self._chunks.size_of(image))

    def elements(self, image: int, kind: ImageKind) -> torch.Tensor:
        """An image as the tensor that it is, whose kind this is, or the box of one."""
        sizes = kind.boxes[0][1]
        strides = kind.strides or contiguous_strides(sizes)
        part = m.TensorLeaf(kind.dtype, sizes, None, image)
        return t.over_storage(*self.memory_of(image), part, strides)

    def part(self, part: m.TensorLeaf) -> torch.Tensor:
        """A tensor over an image."""
        storage, offset = self.memory_of(part.storage)
        return t.over_storage(storage, offset + part.offset, part, strides_of(part))
