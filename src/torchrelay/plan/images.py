"""From tensors that may share memory to storage images: each touched byte once, ties kept.

All tensors over one torch storage go into one image. Parts of the storage that no tensor reaches
are left out. A region reached through one geometry only is packed without gaps; where different
views overlap, their common extent is kept as it is, with zeros in the gaps nobody touches.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np
import torch

from torchrelay.errors import UnsupportedLeafError
from torchrelay.geometry.chunks import aligned
from torchrelay.geometry.strides import contiguous_strides, extent, overlapping, packed
from torchrelay.plan.region import Region
from torchrelay.record import manifest as m
from torchrelay.state.tensors import NAMES, byte_offset, flags_of, flat_bytes


class _View(msgspec.Struct, frozen=True, gc=False):
    """One tensor's geometry in its storage; `low` and `high` are byte positions.

    `run`: a contiguous tensor in host memory. (A struct: there is one a tensor, and a named tuple
    costs several times as much to make.)
    """

    tensor: torch.Tensor
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    itemsize: int
    low: int
    high: int
    dtype: str
    flags: int
    run: bool

    @property
    def geometry(self) -> tuple[int, int, tuple[int, ...], tuple[int, ...]]:
        return self.low, self.itemsize, self.shape, self.strides

    def within(self, low: int) -> Geometry:
        return self.low - low, self.itemsize, self.shape, self.strides


class Placed(NamedTuple):
    """A region and where it starts in its image."""

    at: int
    region: Region


class Image(msgspec.Struct, frozen=True, gc=False):
    """The image of one storage: its size, where it comes from and the memory behind it.

    Most are one run of host memory, known by `address` (else 0) and owned by `keep`. The others
    are made up of `placed` regions.
    """

    nbytes: int
    device: str
    address: int
    keep: torch.Tensor
    placed: Sequence[Placed] = ()


class Images:
    """Collects tensors, then says how their bytes are laid out.

    Plain tensors that reach into no other do not come here: `pieces` deals with those.
    """

    def __init__(self) -> None:
        self._views: list[_View] = []
        self._where: list[tuple[int, int, tuple[int, ...] | None]] = []
        # By device and first byte of a storage (that byte alone: host memory), the first tensor
        # over it, and all of them where there are more.
        self._first: dict[int | tuple[str, int, int], int] = {}
        self._shared: dict[int | tuple[str, int, int], list[int]] = {}

    def add(self, tensor: torch.Tensor, *, apart: bool = False) -> int:
        """Take a strided tensor in; returns its ticket. `apart`: it gets an image of its own, also
        where its memory is that of others."""
        if tensor.dim() > m.MAX_DIMS:
            raise UnsupportedLeafError(f"{tensor.dim()} dimensions, the cap is {m.MAX_DIMS}")
        ticket = len(self._views)
        shape, strides, size = tuple(tensor.shape), tensor.stride(), tensor.element_size()
        dtype, flags = NAMES[tensor.dtype], flags_of(tensor)
        nbytes = extent(shape, strides) * size
        if nbytes == 0 or tensor.is_meta:
            flags |= m.META if tensor.is_meta else 0 if tensor.is_cpu else m.ON_DEVICE
            self._views.append(_View(tensor, shape, strides, size, 0, 0, dtype, flags, False))
            return ticket
        dense = tensor.is_contiguous()
        if dense:
            strides = contiguous_strides(shape)  # torch lets those of size-1 dimensions be anything
        low = byte_offset(tensor)
        origin = tensor.data_ptr() - low
        host = tensor.is_cpu
        key = origin if host else (tensor.device.type, tensor.device.index or 0, origin)
        if apart:
            key = (tensor.device.type, -1 - ticket, origin)
        if self._first.setdefault(key, ticket) != ticket:
            self._share(key, ticket)
        self._views.append(
            _View(tensor, shape, strides, size, low, low + nbytes, dtype, flags, dense and host)
        )
        return ticket

    def _share(self, key: int | tuple[str, int, int], ticket: int) -> None:
        self._shared.setdefault(key, [self._first[key]]).append(ticket)

    def __len__(self) -> int:
        return len(self._views)

    @property
    def origins(self) -> list[int]:
        """Where in memory the storages start that tensors here share with what is alike."""
        return [
            key if isinstance(key, int) else key[2]
            for key in self._first
            if isinstance(key, int) or key[1] >= 0
        ]

    @property
    def firsts(self) -> list[int]:
        """The first ticket in each image."""
        return list(self._first.values())

    @property
    def tensors(self) -> list[torch.Tensor]:
        """What was taken in, by ticket."""
        return [view.tensor for view in self._views]

    def resolve(self) -> list[Image]:
        """The images, in order of first use. After this `leaf` can be asked."""
        self._where = [(-1, 0, None)] * len(self._views)
        images: list[Image] = []
        for key, first in self._first.items():
            view = self._views[first]
            if view.run and key not in self._shared and isinstance(key, int):
                self._where[first] = (len(images), 0, None)
                images.append(Image(view.high - view.low, "cpu", key + view.low, view.tensor))
                continue
            tickets = self._shared.get(key, [first])
            placed: list[Placed] = []
            end = 0
            for group in overlapping([(self._views[t].low, self._views[t].high) for t in tickets]):
                at = aligned(end)
                end = at + self._place([tickets[i] for i in group], at, len(images), placed)
            region = placed[0].region
            address = region.address if len(placed) == 1 else 0
            device = "cpu" if isinstance(key, int) else key[0]
            images.append(Image(end, device, address, region.keep, placed))
        return images

    def _place(self, tickets: list[int], at: int, image: int, placed: list[Placed]) -> int:
        """Lay out tensors that reach into each other at `at` of an image; returns their bytes."""
        first = self._views[tickets[0]]
        layout = packed(first.shape, first.strides)
        if layout is not None and (
            len(tickets) == 1 or all(self._views[t].geometry == first.geometry for t in tickets)
        ):
            region = Region(first.tensor, first.shape, first.strides, layout.order)
            strides = None if layout.strides == contiguous_strides(first.shape) else layout.strides
            for ticket in tickets:
                self._where[ticket] = (image, at, strides)
            placed.append(Placed(at, region))
            return region.nbytes
        low = min(self._views[t].low for t in tickets)
        low -= low % max(self._views[t].itemsize for t in tickets)  # so that each stays aligned
        last = max((self._views[t] for t in tickets), key=lambda view: view.high)
        nbytes = last.high - low
        for ticket in tickets:
            view = self._views[ticket]
            strides = None if view.strides == contiguous_strides(view.shape) else view.strides
            self._where[ticket] = (image, at + view.low - low, strides)
        # Storages that start at one address may differ in length: the last view's reaches it all.
        memory = flat_bytes(last.tensor.untyped_storage(), low, nbytes)
        mask = touched([self._views[t].within(low) for t in tickets], nbytes)
        if mask is not None:
            memory = memory * mask.to(memory.device)
        placed.append(Placed(at, Region(memory, (nbytes,), (1,), (0,))))
        return nbytes

    def leaf(self, ticket: int, position: list[int]) -> m.TensorLeaf:
        """The record of a tensor; `position` maps images to their place in the stream."""
        view = self._views[ticket]
        image, offset, strides = self._where[ticket]
        if image < 0:
            kept = None if view.strides == contiguous_strides(view.shape) else view.strides
            return m.TensorLeaf(view.dtype, view.shape, kept, -1, 0, view.flags)
        return m.TensorLeaf(view.dtype, view.shape, strides, position[image], offset, view.flags)


# Where a view starts in an extent, its item size, shape and strides.
Geometry = tuple[int, int, tuple[int, ...], tuple[int, ...]]


def touched(views: Sequence[Geometry], nbytes: int) -> torch.Tensor | None:
    """Which bytes of an extent the views touch, as 0 and 1; None if all."""
    for _, itemsize, shape, strides in views:
        layout = packed(shape, strides)
        if layout is not None and layout.numel * itemsize == nbytes:
            return None
    marks = np.zeros(nbytes, dtype=np.uint8)
    for view in views:
        mark_touched(marks, *view)
    return None if marks.all() else torch.from_numpy(marks)


def mark_touched(
    touched: np.ndarray[tuple[int], np.dtype[np.uint8]],
    offset: int,
    itemsize: int,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
) -> None:
    """Set the bytes that a view at byte `offset` touches to 1."""
    view = np.lib.stride_tricks.as_strided(
        touched[offset:],
        shape=(*shape, itemsize),
        strides=(*(stride * itemsize for stride in strides), 1),
    )
    view[...] = 1
