"""Tensors that may share memory: which of them do, and the storage images that they make up, with
each touched byte once, ties kept.

All tensors over one torch storage go into one image, and so do storages that overlap: numpy and
others hand torch the same memory several times. Parts that no tensor reaches are left out. A region
reached through one geometry only is packed without gaps; where different views overlap, their
common extent is kept as it is, with zeros in the gaps nobody touches.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch

from torchrelay.errors import UnsupportedLeafError
from torchrelay.geometry.chunks import aligned
from torchrelay.geometry.runs import Column
from torchrelay.geometry.strides import Layout, contiguous_strides, extent, overlapping, packed
from torchrelay.plan.region import Region
from torchrelay.record import manifest as m
from torchrelay.state.tensors import NAMES, byte_offset, flags_of, flat_bytes

# Device and first byte of a storage; that byte alone where it is in host memory.
Key = int | tuple[str, int, int]


class View(msgspec.Struct, frozen=True, gc=False):
    """One tensor's geometry; `low` and `high` are addresses, and `key` is its storage.

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
    key: Key

    @property
    def origin(self) -> int:
        """Where its storage starts."""
        return self.key if isinstance(self.key, int) else self.key[2]

    def reaches(self, low: int, high: int) -> bool:
        """Whether its storage has all of these bytes."""
        end = self.origin + self.tensor.untyped_storage().nbytes()
        return self.origin <= low and high <= end

    def within(self, low: int) -> Geometry:
        return self.low - low, self.itemsize, self.shape, self.strides

    @property
    def kept_strides(self) -> tuple[int, ...] | None:
        """Its strides, unless they are row-major."""
        return None if self.strides == contiguous_strides(self.shape) else self.strides


class Group(NamedTuple):
    """Tensors of one storage that reach into each other, by their tickets. All are the same view,
    packed like `layout`, or different ones where there is none."""

    tickets: list[int]
    layout: Layout | None


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
        self._views: list[View] = []
        self._where: list[tuple[int, int, tuple[int, ...] | None]] = []
        self._by_key: dict[Key, list[int]] = {}
        self._seen: list[int] = []  # those whose addresses say whether they share memory

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
            self._views.append(View(tensor, shape, strides, size, 0, 0, dtype, flags, False, 0))
            return ticket
        dense = tensor.is_contiguous()
        if dense:
            strides = contiguous_strides(shape)  # torch lets those of size-1 dimensions be anything
        low = tensor.data_ptr()
        origin = low - byte_offset(tensor)
        host = tensor.is_cpu
        key = origin if host else (tensor.device.type, tensor.device.index or 0, origin)
        if apart:
            key = (tensor.device.type, -1 - ticket, origin)
        elif host or tensor.is_cuda:
            self._seen.append(ticket)
        self._by_key.setdefault(key, []).append(ticket)
        run = dense and host
        self._views.append(
            View(tensor, shape, strides, size, low, low + nbytes, dtype, flags, run, key)
        )
        return ticket

    def __len__(self) -> int:
        return len(self._views)

    @property
    def origins(self) -> list[int]:
        """Where in memory the storages start that tensors here share with what is alike."""
        return [
            key if isinstance(key, int) else key[2]
            for key in self._by_key
            if isinstance(key, int) or key[1] >= 0
        ]

    @property
    def spans(self) -> tuple[Column, Column]:
        """Where the memory begins and ends that tensors here may share with others."""
        views = [self._views[ticket] for ticket in self._seen]
        lows, highs = [view.low for view in views], [view.high for view in views]
        return np.array(lows, np.uint64), np.array(highs, np.uint64)

    @cached_property
    def _storages(self) -> dict[Key, list[int]]:
        """By storage, the tensors over it. Storages that tensors show to be the same are one."""
        lows, highs = self.spans
        if not reaching(lows, highs).any():
            return self._by_key
        home = {key: key for key in self._by_key}
        for group in overlapping(list(zip(lows.tolist(), highs.tolist(), strict=True))):
            first, *rest = {_home(home, self._views[self._seen[n]].key) for n in group}
            home.update(dict.fromkeys(rest, first))
        found: dict[Key, list[int]] = {}
        for key, tickets in self._by_key.items():
            found.setdefault(_home(home, key), []).extend(tickets)
        return found

    @property
    def firsts(self) -> list[int]:
        """The first ticket in each image."""
        return [min(tickets) for tickets in self._storages.values()]

    @property
    def tensors(self) -> list[torch.Tensor]:
        """What was taken in, by ticket."""
        return [view.tensor for view in self._views]

    def view(self, ticket: int) -> View:
        return self._views[ticket]

    def groups(self) -> Iterator[Group]:
        """The tensors that have bytes, by the memory that they share."""
        for tickets in self._storages.values():
            yield from self._groups(tickets)

    def _groups(self, tickets: list[int]) -> Iterator[Group]:
        spans = [(self._views[ticket].low, self._views[ticket].high) for ticket in tickets]
        for found in overlapping(spans):
            group = sorted(tickets[index] for index in found)
            first = self._views[group[0]]
            alike = all(self._views[ticket].within(0) == first.within(0) for ticket in group[1:])
            yield Group(group, packed(first.shape, first.strides) if alike else None)

    def memory(self, tickets: Sequence[int]) -> tuple[int, torch.Tensor]:
        """Where the common extent of tensors begins, and its bytes, with zeros in place of those
        that none of them touches."""
        views = [self._views[ticket] for ticket in tickets]
        first = min(views, key=lambda view: view.low)
        largest = max(views, key=lambda view: view.itemsize)
        low = first.low - (first.low - largest.low) % largest.itemsize  # so that each stays aligned
        high = max(view.high for view in views)
        for view in views:
            if (view.low - low) % view.itemsize:
                raise UnsupportedLeafError(
                    f"elements of a tensor of {view.dtype} and shape {view.shape} begin amid those "
                    "of another over the same memory: give a clone of it"
                )
        whole = next((view for view in views if view.reaches(low, high)), None)
        if whole is not None:
            memory = _bytes_of(whole, low, high)
        else:  # no storage has it all
            memory = torch.zeros(high - low, dtype=torch.uint8, device=first.tensor.device)
            for view in views:
                memory[view.low - low : view.high - low] = _bytes_of(view, view.low, view.high)
        mask = touched([view.within(low) for view in views], high - low)
        return low, memory if mask is None else memory * mask.to(memory.device)

    @cached_property
    def resolved(self) -> list[Image]:
        """The images, in order of first use. After this `leaf` can be asked."""
        self._where = [(-1, 0, None)] * len(self._views)
        images: list[Image] = []
        for key, tickets in self._storages.items():
            view = self._views[tickets[0]]
            if view.run and len(tickets) == 1 and isinstance(key, int):
                self._where[tickets[0]] = (len(images), 0, None)
                images.append(Image(view.high - view.low, "cpu", view.low, view.tensor))
                continue
            placed: list[Placed] = []
            end = 0
            for group in self._groups(tickets):
                at = aligned(end)
                placed.append(Placed(at, self._place(group, at, len(images))))
                end = at + placed[-1].region.nbytes
            region = placed[0].region
            address = region.address if len(placed) == 1 else 0
            device = "cpu" if isinstance(key, int) else key[0]
            images.append(Image(end, device, address, region.keep, placed))
        return images

    def _place(self, group: Group, at: int, image: int) -> Region:
        """Lay a group out at `at` of an image."""
        tickets, layout = group
        if layout is not None:
            first = self._views[tickets[0]]
            strides = None if layout.strides == contiguous_strides(first.shape) else layout.strides
            for ticket in tickets:
                self._where[ticket] = (image, at, strides)
            return Region(first.tensor, first.shape, first.strides, layout.order)
        low, memory = self.memory(tickets)
        for ticket in tickets:
            view = self._views[ticket]
            self._where[ticket] = (image, at + view.low - low, view.kept_strides)
        return Region(memory, (memory.numel(),), (1,), (0,))

    def leaf(self, ticket: int, position: list[int]) -> m.TensorLeaf:
        """The record of a tensor; `position` maps images to their place in the stream."""
        view = self._views[ticket]
        image, offset, strides = self._where[ticket]
        if image < 0:
            return m.TensorLeaf(view.dtype, view.shape, view.kept_strides, -1, 0, view.flags)
        return m.TensorLeaf(view.dtype, view.shape, strides, position[image], offset, view.flags)


def _bytes_of(view: View, low: int, high: int) -> torch.Tensor:
    return flat_bytes(view.tensor.untyped_storage(), low - view.origin, high - low)


def _home(homes: dict[Key, Key], key: Key) -> Key:
    while homes[key] != key:
        key = homes[key]
    return key


# Where a view starts in an extent, its item size, shape and strides.
Geometry = tuple[int, int, tuple[int, ...], tuple[int, ...]]


def reaching(lows: Column, highs: Column) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Which runs of memory reach into another one."""
    found = np.zeros(len(lows), bool)
    order = np.argsort(lows, kind="stable")  # mostly they are in order
    meet = lows[order][1:] < np.maximum.accumulate(highs[order])[:-1]
    found[order[1:]] = meet
    found[order[:-1]] |= meet
    return found


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
