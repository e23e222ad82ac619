"""The memory that images lie in, one piece each: a buffer until the commit, tensors of the caller,
or new memory that the caller is going to keep."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from torchrelay.describing.pieces import HOST, Pieces, device_number, device_of
from torchrelay.geometry.boxes import Numbers
from torchrelay.geometry.chunks import Chunks
from torchrelay.geometry.runs import Column
from torchrelay.geometry.strides import contiguous_strides
from torchrelay.landing.leaves import strides_of
from torchrelay.landing.workspace import Workspace
from torchrelay.record import manifest as m
from torchrelay.record.rows import Marks
from torchrelay.record.schema import ImageKind
from torchrelay.state import tensors as t

_NOWHERE = -1


class ImageMemory:
    """Images by number, each in one run of `memory`: columns with the `address` of each, the bytes
    of `space` from there to the end of its memory, its `device`, and the tensor to `keep`.

    Images 0 (12 bytes) and 2 (8 bytes) share a staging buffer at 0x5000; image 1 is nowhere:

        image   keep   address   space   device
        0       0      0x5000    24      HOST
        1       -1     0         0       HOST
        2       0      0x5010    8       HOST
    """

    def __init__(self, chunks: Chunks) -> None:
        self._chunks, count = chunks, len(chunks.image_bytes)
        self.memory: list[torch.Tensor] = []
        self.keep: Numbers = np.full(count, _NOWHERE, np.int64)
        self.address: Column = np.zeros(count, np.uint64)
        self.space: Column = np.zeros(count, np.uint64)
        self.device: Numbers = np.full(count, HOST, np.int64)

    def add(
        self,
        images: Any,
        memory: Sequence[torch.Tensor],
        numbers: Any = 0,
        offsets: Any = 0,
        sizes: Any = None,
        addresses: Sequence[int] | Column | None = None,
        devices: Numbers | None = None,
    ) -> None:
        """Have images in new memory: each in the tensor with its number there, from its offset on.
        `sizes`, `addresses` and `devices` are those of the tensors, if they are known."""
        found = [*map(torch.Tensor.data_ptr, memory)] if addresses is None else addresses
        bases, count = np.array(found, np.uint64), len(self.memory)
        nbytes = [one.nbytes for one in memory] if sizes is None else sizes
        if devices is None:
            devices = np.array([device_number(one.device) for one in memory], np.int64)
        self.memory += memory
        self.keep[images] = count + numbers
        self.address[images] = bases[numbers] + offsets
        self.space[images] = np.array(nbytes, np.uint64)[numbers] - offsets
        self.device[images] = devices[numbers]

    def stage(self, images: Numbers, workspace: Workspace, device: int = HOST) -> None:
        """Take one buffer for images that ascend. `MismatchError` where there is not so much."""
        if len(images):
            padded = self._chunks.padded[images]
            ends = np.cumsum(padded)
            buffer = workspace.stage(int(ends[-1]), device_of(device))
            numbers: Numbers = np.array([device], np.int64)
            self.add(images, [buffer], offsets=ends - padded, devices=numbers)

    @property
    def marks(self) -> Marks:
        """Whether each image is here."""
        found: Marks = self.keep != _NOWHERE
        return found

    def pieces(self) -> Pieces:
        """Where the images lie, at their positions in the stream.

        Images that follow each other there do so in a host buffer: these become few runs, with the
        padding between them, which no device is sent.
        """
        images = np.flatnonzero(self.marks & (self._chunks.image_bytes > 0))
        sizes = self._chunks.image_bytes[images].astype(np.uint64)
        on_host = self.device[images] == HOST
        padded = np.minimum(self._chunks.padded[images], self.space[images])
        return Pieces(
            self._chunks.places[images],
            self.address[images],
            np.where(on_host, padded, sizes),
            self.device[images],
            images,
            self.keep[images],
            self.memory,
        )

    def memory_of(self, image: int) -> tuple[torch.UntypedStorage, int]:
        """Where an image lies: a storage, and the byte there."""
        memory = self.memory[int(self.keep[image])]
        offset = int(self.address[image]) - memory.data_ptr()
        return memory.untyped_storage(), t.byte_offset(memory) + offset

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
