"""From tensors that may share memory to storage images: each touched byte once, ties kept.

All tensors over one torch storage go into one image. Parts of the storage that no tensor reaches
are left out. A region reached through one geometry only is packed without gaps; where different
views overlap, their common extent is kept as it is, with zeros in the gaps nobody touches.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

import numpy as np
import torch

from torchrelay.state import manifest as m
from torchrelay.state.memory import Region
from torchrelay.state.spans import contiguous_strides, extent, overlapping, packed
from torchrelay.state.tensors import NAMES, flags_of, flat_bytes


class _View(NamedTuple):
    """One tensor's geometry in its storage; `low` and `high` are byte positions."""

    tensor: torch.Tensor
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    itemsize: int
    low: int
    high: int
    dtype: str
    flags: int

    @property
    def geometry(self) -> tuple[int, int, tuple[int, ...], tuple[int, ...]]:
        return self.low, self.itemsize, self.shape, self.strides


class Placed(NamedTuple):
    """A region and where it starts in its image."""

    at: int
    region: Region


class Image(NamedTuple):
    """The image of one storage: its size, where it comes from and the memory behind it."""

    nbytes: int
    device: str
    placed: Sequence[Placed]


class Images:
    """Collects tensors, then says how their bytes are laid out.

    States of tens of thousands of small tensors are common, so the plain case (a contiguous host
    tensor alone in its storage) asks torch as little as possible.
    """

    def __init__(self) -> None:
        self._views: list[_View] = []
        self._storages: dict[tuple[str, int, int], list[int]] = {}
        self._where: list[tuple[int, int, tuple[int, ...] | None]] = []
        self._facts: dict[
            tuple[torch.dtype, torch.Size], tuple[str, tuple[int, ...], tuple[int, ...], int, int]
        ] = {}

    def add(self, tensor: torch.Tensor) -> int:
        """Take a strided tensor in; returns its ticket."""
        ticket = len(self._views)
        facts = self._facts.get((tensor.dtype, tensor.shape))
        if facts is None:
            facts = self._learn(tensor)
        dtype, shape, strides, size, nbytes = facts
        flags = flags_of(tensor)
        if not tensor.is_contiguous():
            strides = tensor.stride()
            nbytes = extent(shape, strides) * size
        if nbytes == 0 or tensor.is_meta:
            strides = tensor.stride()
            flags |= m.META if tensor.is_meta else 0
            self._views.append(_View(tensor, shape, strides, size, 0, 0, dtype, flags))
            return ticket
        low = tensor.storage_offset() * size
        origin = tensor.data_ptr() - low
        if tensor.is_cpu:
            key = ("cpu", 0, origin)
        else:
            key = (tensor.device.type, tensor.device.index or 0, origin)
        self._storages.setdefault(key, []).append(ticket)
        self._views.append(_View(tensor, shape, strides, size, low, low + nbytes, dtype, flags))
        return ticket

    def _learn(
        self, tensor: torch.Tensor
    ) -> tuple[str, tuple[int, ...], tuple[int, ...], int, int]:
        """What all contiguous tensors of one dtype and shape have in common."""
        shape = tuple(tensor.shape)
        size = tensor.element_size()
        facts = (NAMES[tensor.dtype], shape, contiguous_strides(shape), size, prod(shape) * size)
        self._facts[(tensor.dtype, tensor.shape)] = facts
        return facts

    def resolve(self) -> list[Image]:
        """The images, in order of first use. After this `leaf` can be asked."""
        self._where = [(-1, 0, None)] * len(self._views)
        images: list[Image] = []
        for (device, _, origin), tickets in self._storages.items():
            if len(tickets) == 1 and device == "cpu":
                view = self._views[tickets[0]]
                if view.tensor.is_contiguous():
                    self._where[tickets[0]] = (len(images), 0, None)
                    region = Region.run(view.tensor, origin + view.low, view.high - view.low)
                    images.append(Image(region.nbytes, device, (Placed(0, region),)))
                    continue
            placed: list[Placed] = []
            end = 0
            for group in overlapping([self._views[t][4:6] for t in tickets]):
                at = m.aligned(end)
                end = at + self._place([tickets[i] for i in group], at, len(images), placed)
            images.append(Image(end, device, placed))
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
        nbytes = max(self._views[t].high for t in tickets) - low
        for ticket in tickets:
            view = self._views[ticket]
            strides = None if view.strides == contiguous_strides(view.shape) else view.strides
            self._where[ticket] = (image, at + view.low - low, strides)
        memory = flat_bytes(first.tensor.untyped_storage(), low, nbytes)
        touched = _touched([self._views[t] for t in tickets], low, nbytes)
        if touched is not None:
            memory = memory * touched.to(memory.device)
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


def _touched(views: list[_View], low: int, nbytes: int) -> torch.Tensor | None:
    """Which bytes of an extent the views touch, as 0 and 1; None if all."""
    for view in views:
        layout = packed(view.shape, view.strides)
        if layout is not None and layout.numel * view.itemsize == nbytes:
            return None
    touched = np.zeros(nbytes, dtype=np.uint8)
    for view in views:
        mark_touched(touched, view.low - low, view.itemsize, view.shape, view.strides)
    return None if touched.all() else torch.from_numpy(touched)


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
