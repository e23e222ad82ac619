"""Copying runs of bytes between flat buffers and strided memory.

A `Region` is the memory of one leaf walked in the order of its image: bytes [a, b) of the image
can be read from it or written to it, whatever its strides and device are. Nothing outside the
leaf's own elements is ever touched.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence

import torch

from torchrelay.geometry.strides import linear_boxes
from torchrelay.state.tensors import byte_offset, copy_all, raw


class Region:
    """Elements of a storage, in a fixed order, as a run of bytes.

    `order` lists the dimensions that own memory from slowest to fastest; the others are walked at
    index 0 alone. Holds `keep` alive, since small contiguous CPU regions are known by address only.
    """

    __slots__ = ("_address", "_itemsize", "_run", "_view", "keep", "nbytes")

    def __init__(
        self,
        tensor: torch.Tensor,
        shape: Sequence[int],
        strides: Sequence[int],
        order: Sequence[int],
    ) -> None:
        self.keep = tensor
        size = tensor.element_size()
        numel = 1
        dense = True
        for dim in reversed(order):
            dense = dense and strides[dim] == numel
            numel *= shape[dim]
        self.nbytes = numel * size
        self._address = 0
        self._run = False  # whether the bytes are one run of a device
        self._view: torch.Tensor | None = None
        self._itemsize = min(size, 8)
        if dense and tensor.device.type == "cpu":
            # data_ptr() reads through conj and neg bits, which is what is wanted.
            self._address = tensor.data_ptr()
            return
        if dense:
            self._run, self._itemsize = True, 1
        else:
            storage, offset = tensor.untyped_storage(), byte_offset(tensor)
            dims = [shape[dim] for dim in order]
            steps = [strides[dim] for dim in order]
            self._view = raw(storage, offset, size, dims, steps)

    @classmethod
    def dense(cls, keep: torch.Tensor, address: int, nbytes: int) -> Region:
        """A run of host memory that is known by its address; or with address 0, all of a contiguous
        tensor of a device."""
        region = cls.__new__(cls)
        region.keep, region.nbytes = keep, nbytes
        region._address, region._view, region._itemsize = address, None, 1
        region._run = not address
        return region

    @classmethod
    def row_major(cls, tensor: torch.Tensor) -> Region:
        """All elements of a tensor in row-major order. Its conj and neg bits do not count."""
        if tensor.is_cpu and tensor.is_contiguous():
            return cls.dense(tensor, tensor.data_ptr(), tensor.nbytes)
        if tensor.is_cuda and tensor.is_contiguous():
            return cls.dense(tensor, 0, tensor.nbytes)
        shape = tuple(tensor.shape)
        order = [dim for dim, size in enumerate(shape) if size > 1]
        return cls(tensor, shape, tuple(tensor.stride()), order)

    def run(self, start: int, stop: int) -> torch.Tensor | None:
        """Bytes [start, stop) where they lie on a device, if they are one run there."""
        if not self._run or self.keep.is_cpu:
            return None
        view = self._seen
        return view if stop - start == self.nbytes else view[start:stop]

    @property
    def device_address(self) -> int:
        """Where the bytes lie, if they are one run of a GPU's memory; else 0."""
        return self.keep.data_ptr() if self._run and self.keep.is_cuda else 0

    @property
    def _seen(self) -> torch.Tensor:
        """The elements of a region without an address. A single run makes its view at first use:
        many are copied by their address alone."""
        if self._view is None:
            storage, offset = self.keep.untyped_storage(), byte_offset(self.keep)
            self._view = raw(storage, offset, 1, (self.nbytes,), (1,))
        return self._view

    @property
    def address(self) -> int:
        """Where the bytes lie, if they are one run of host memory; else 0."""
        return self._address

    def read(self, start: int, stop: int, out: torch.Tensor, *, wait: bool = True) -> None:
        """Copy bytes [start, stop) of the region to the host buffer `out`. Without `wait`, a GPU
        is asked to, where that buffer is pinned."""
        if self._address:
            ctypes.memmove(out.data_ptr(), self._address + start, stop - start)
            return
        for box, flat in self.boxes(start, stop, out):
            flat.copy_(box, non_blocking=not wait)

    def write(self, start: int, stop: int, data: torch.Tensor) -> None:
        """Copy the buffer `data` to bytes [start, stop) of the region."""
        if self._address:
            host = data[: stop - start].cpu()
            ctypes.memmove(self._address + start, host.data_ptr(), stop - start)
            return
        for box, flat in self.boxes(start, stop, data):
            box.copy_(flat)

    def boxes(
        self, start: int, stop: int, buffer: torch.Tensor
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Parts of a region that is known by its view (no `address`), with their bytes in `buffer`
        as the same elements."""
        view, size = self._seen, self._itemsize
        items = buffer[: stop - start].view(view.dtype)
        first = start // size
        pairs = []
        for at, index in linear_boxes(view.shape, first, stop // size):
            box = view[index]
            flat = items[at - first : at - first + box.numel()].view(box.shape)
            pairs.append((box, flat))
        return pairs


_ALONE = 1 << 20  # bytes from which a copy of its own is as fast as one of many


def copy_boxes(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Copy each second to its first, all of them integers; small ones of a kind by one call."""
    together: dict[tuple[torch.device, torch.dtype], list[tuple[torch.Tensor, torch.Tensor]]] = {}
    for to, source in pairs:
        if to.nbytes >= _ALONE or to.device != source.device:
            to.copy_(source)
        else:
            together.setdefault((to.device, to.dtype), []).append((to, source))
    for group in together.values():
        copy_all(*map(list, zip(*group, strict=True)))
