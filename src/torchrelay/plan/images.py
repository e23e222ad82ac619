"""Tensors that may share memory: which of them do, and the images that they are of, with each
touched byte once, ties kept.

Tensors that are the same view of the same memory have one image, with their elements packed without
gaps. Where different views overlap, they have one image of bytes: their common extent, with zeros
in the gaps that none of them touches. Memory that no tensor reaches is left out. Storages that
overlap count as one: numpy and others hand torch the same memory several times.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from math import prod
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch

from torchrelay.errors import UnsupportedLeafError
from torchrelay.geometry.chunks import aligned
from torchrelay.geometry.runs import Column
from torchrelay.geometry.strides import Layout, contiguous_strides, extent, overlapping, packed
from torchrelay.plan.region import Region
from torchrelay.plan.sharded import ShardedKind
from torchrelay.record import manifest as m
from torchrelay.record.checks.leaves import QUANTIZED
from torchrelay.record.schema import ImageKind
from torchrelay.state.tensors import CARRIERS, NAMES, OPAQUE, byte_offset, flags_of, flat_bytes

_STORED = {
    NAMES[dtype]: NAMES[CARRIERS[dtype.itemsize]]
    for dtype in NAMES
    if dtype in OPAQUE or NAMES[dtype] in QUANTIZED
}
Key = tuple[str, int, int]  # kind and number of the device of a storage, and its first byte


class View(msgspec.Struct, frozen=True, gc=False):
    """One tensor's geometry; `low` and `high` are addresses, and `key` is its storage. (A struct:
    there is one a tensor, and a named tuple costs several times as much to make.)"""

    tensor: torch.Tensor
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    itemsize: int
    low: int
    high: int
    dtype: str
    flags: int
    key: Key

    @property
    def origin(self) -> int:
        """Where its storage starts."""
        return self.key[2]

    def reaches(self, low: int, high: int) -> bool:
        """Whether its storage has all of these bytes."""
        end = self.origin + self.tensor.untyped_storage().nbytes()
        return self.origin <= low and high <= end

    def bytes(self, low: int, high: int) -> torch.Tensor:
        return flat_bytes(self.tensor.untyped_storage(), low - self.origin, high - low)

    def within(self, low: int) -> Geometry:
        return self.low - low, self.itemsize, self.shape, self.strides

    @property
    def kept_strides(self) -> tuple[int, ...] | None:
        """Its strides, unless they are row-major."""
        return None if self.strides == contiguous_strides(self.shape) else self.strides


class Image(NamedTuple):
    """The memory of an image, its storage by number of first use, and its place there. `ticket` is
    the first tensor that is of it."""

    ticket: int
    kind: ImageKind
    device: str
    region: Region
    storage: int
    at: int


# The role of a tensor in the state: a part of an odd leaf, a leaf, or the local part of a
# distributed one, whose kind has this number or a higher one.
PART, LEAF, SHARDED = -2, -1, 0


class Images:
    """Collects tensors as `views`, by ticket, then says how their bytes are laid out.

    Plain tensors that reach into no other do not come here.
    """

    def __init__(self) -> None:
        self.views: list[View] = []
        self.places: list[ImagePlace] = []
        self._by_key: dict[Key, list[int]] = {}
        self._seen: list[int] = []  # those whose addresses say whether they share memory

    def add(self, tensor: torch.Tensor, *, apart: bool = False) -> int:
        """Take a strided tensor in; returns its ticket. `apart`: it gets an image of its own, also
        where its memory is that of others."""
        if tensor.dim() > m.MAX_DIMS:
            raise UnsupportedLeafError(f"{tensor.dim()} dimensions, the cap is {m.MAX_DIMS}")
        ticket = len(self.views)
        shape, strides, size = tuple(tensor.shape), tensor.stride(), tensor.element_size()
        dtype, flags = NAMES[tensor.dtype], flags_of(tensor)
        nbytes = extent(shape, strides) * size
        if nbytes == 0 or tensor.is_meta:
            flags |= m.META if tensor.is_meta else 0 if tensor.is_cpu else m.ON_DEVICE
            self.views.append(View(tensor, shape, strides, size, 0, 0, dtype, flags, ("", 0, 0)))
            return ticket
        if tensor.is_contiguous():
            strides = contiguous_strides(shape)  # torch lets those of size-1 dimensions be anything
        low = tensor.data_ptr()
        origin = low - byte_offset(tensor)
        number = -1 - ticket if apart else tensor.device.index or 0
        key = (tensor.device.type, number, origin)
        if not apart and (tensor.is_cpu or tensor.is_cuda):
            self._seen.append(ticket)
        self._by_key.setdefault(key, []).append(ticket)
        self.views.append(View(tensor, shape, strides, size, low, low + nbytes, dtype, flags, key))
        return ticket

    def __len__(self) -> int:
        return len(self.views)

    @property
    def origins(self) -> list[int]:
        """Where in memory the storages start that tensors here share with what is alike."""
        return [origin for _, number, origin in self._by_key if number >= 0]

    @property
    def spans(self) -> tuple[Column, Column]:
        """Where the memory begins and ends that tensors here may share with others."""
        views = [self.views[ticket] for ticket in self._seen]
        lows, highs = [view.low for view in views], [view.high for view in views]
        return np.array(lows, np.uint64), np.array(highs, np.uint64)

    @cached_property
    def _storages(self) -> list[list[int]]:
        """The tensors over each storage, in order of first use. Storages that overlap are one."""
        keys = list(self._by_key)
        spans = [(-1 - number, -number) for number in range(len(keys))]  # none of them overlap
        for number, (device, index, _) in enumerate(keys):
            if index >= 0 and device in ("cpu", "cuda"):
                views = [self.views[ticket] for ticket in self._by_key[keys[number]]]
                spans[number] = min(view.low for view in views), max(view.high for view in views)
        return sorted(
            sorted(ticket for number in group for ticket in self._by_key[keys[number]])
            for group in overlapping(spans)
        )

    def _groups(self, tickets: list[int]) -> Iterator[tuple[list[int], Layout | None]]:
        """Tensors of one storage that reach into each other, by their tickets. All are the same
        view, packed like a layout, or different ones where there is none."""
        spans = [(self.views[ticket].low, self.views[ticket].high) for ticket in tickets]
        for found in overlapping(spans):
            group = sorted(tickets[index] for index in found)
            first = self.views[group[0]]
            alike = all(self.views[ticket].within(0) == first.within(0) for ticket in group[1:])
            yield group, packed(first.shape, first.strides) if alike else None

    def memory(self, tickets: Sequence[int]) -> tuple[int, torch.Tensor]:
        """Where the common extent of tensors begins, and its bytes, with zeros in place of those
        that none of them touches."""
        views = [self.views[ticket] for ticket in tickets]
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
            memory = whole.bytes(low, high)
        else:  # no storage has it all
            memory = torch.zeros(high - low, dtype=torch.uint8, device=first.tensor.device)
            for view in views:
                memory[view.low - low : view.high - low] = view.bytes(view.low, view.high)
        mask = touched([view.within(low) for view in views], high - low)
        return low, memory if mask is None else memory * mask.to(memory.device)

    def resolve(
        self,
        roles: Sequence[int],
        sharded: Sequence[ShardedKind],
        path_of: Callable[[int], str],
        *,
        at_rest: bool = False,
    ) -> list[Image]:
        """The images, by storage in order of first use. After this, `places` has them by ticket.

        `roles` has what each tensor is to the state, `sharded` the kinds of distributed ones, and
        `path_of` names a tensor in an error.
        """
        self.places = [NOWHERE] * len(self.views)
        images: list[Image] = []
        for storage, tickets in enumerate(self._storages):
            end = 0
            for group, layout in self._groups(tickets):
                at = aligned(end)
                kinds = {roles[ticket] for ticket in group}
                try:
                    image = self._image(group, layout, len(images), kinds, sharded, at_rest)
                except UnsupportedLeafError as fault:
                    fault.path = fault.path or path_of(group[0])
                    raise
                images.append(Image(group[0], *image, storage, at))
                end = at + image[2].nbytes
        return images

    def _image(
        self,
        tickets: list[int],
        layout: Layout | None,
        number: int,
        roles: set[int],
        sharded: Sequence[ShardedKind],
        at_rest: bool,
    ) -> tuple[ImageKind, str, Region]:
        first = self.views[tickets[0]]
        device = first.key[0]
        whole = layout is not None and layout.numel == prod(first.shape)
        if layout is None or (at_rest and not whole):
            low, memory = self.memory(tickets)
            for ticket in tickets:
                view = self.views[ticket]
                self.places[ticket] = ImagePlace(
                    number, view.low - low, view.kept_strides, whole=False
                )
            region = Region.row_major(memory)
            return ImageKind("uint8", (region.nbytes,)), device, region
        region = Region.of(first.tensor, first.shape, first.strides, layout.order)
        strides = None if layout.strides == contiguous_strides(first.shape) else layout.strides
        if whole and min(roles) >= SHARDED:
            kind = sharded[min(roles)]
            whole = all(_is_local_part(first, kind, sharded[role]) for role in roles)
            found = ImageKind.of_boxes(kind.dtype, kind.shape, [kind.box], strides)
        else:
            # Parts of odd leaves have their strides with them, unless those are row-major.
            as_it_is = strides is None or at_rest or PART not in roles
            whole = whole and max(roles) < SHARDED and as_it_is
            found = ImageKind(stored_dtype(first.dtype), first.shape, strides)
        if not whole:
            found = ImageKind("uint8", (region.nbytes,))
        place = ImagePlace(number, 0, None if whole else strides, whole)
        for ticket in tickets:
            self.places[ticket] = place
        return found, device, region

    def leaf(self, ticket: int, numbers: Sequence[int]) -> m.TensorLeaf:
        """The record of a tensor. `numbers` has the number of each image in the state's record."""
        view, place = self.views[ticket], self.places[ticket]
        if place.image < 0:
            return m.TensorLeaf(view.dtype, view.shape, view.kept_strides, -1, 0, view.flags)
        image = numbers[place.image]
        return m.TensorLeaf(view.dtype, view.shape, place.strides, image, place.offset, view.flags)


class ImagePlace(NamedTuple):
    """Where a tensor lies: all of an image (`whole`), or a view of one of bytes."""

    image: int
    offset: int
    strides: tuple[int, ...] | None
    whole: bool


NOWHERE = ImagePlace(-1, 0, None, whole=False)  # of a tensor that has no bytes


def _is_local_part(view: View, kind: ShardedKind, other: ShardedKind) -> bool:
    """Whether a tensor is what distributed ones of two kinds are said to have here."""
    if view.flags & (m.CONJ | m.NEG):
        return False
    mine = (view.dtype, kind.shape, (kind.box[0], view.shape))
    return mine == (kind.dtype, kind.shape, kind.box) == (other.dtype, other.shape, other.box)


def stored_dtype(dtype: str) -> str:
    """The dtype of an image of elements: those that only torch knows are kept as whole numbers."""
    return _STORED.get(dtype, dtype)


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
    for offset, itemsize, shape, strides in views:
        steps = (*(stride * itemsize for stride in strides), 1)
        np.lib.stride_tricks.as_strided(marks[offset:], (*shape, itemsize), steps)[...] = 1
    return None if marks.all() else torch.from_numpy(marks)
