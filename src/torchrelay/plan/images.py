"""Tensors that may share memory: which of them do, and the images that they are of, with each
touched byte once, ties kept.

Tensors that are the same view of the same memory have one image, with their elements packed without
gaps. Where different views overlap, they have one image of bytes: their common extent, with zeros
in the gaps that none of them touches. Memory that no tensor reaches is left out. Storages that
overlap count as one: numpy and others hand torch the same memory several times.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property, partial
from math import prod
from operator import itemgetter
from typing import NamedTuple

import msgspec
import numpy as np
import torch

from torchrelay.errors import RelayError, UnsupportedLeafError
from torchrelay.geometry.runs import Column
from torchrelay.geometry.strides import Layout, contiguous_strides, extent, overlapping, packed
from torchrelay.plan.region import Region
from torchrelay.plan.sharded import ShardedKind
from torchrelay.record import manifest as m
from torchrelay.record.kinds import KindTable
from torchrelay.record.schema import ImageKind, LeafKind
from torchrelay.state.backing import with_memory
from torchrelay.state.leaves import describe
from torchrelay.state.paths import LeafPaths, Path, naming
from torchrelay.state.tensors import (
    CARRIERS,
    NAMES,
    OPAQUE,
    byte_offset,
    flags_of,
    flat_bytes,
    resolved,
)

_STORED = {NAMES[dtype]: NAMES[CARRIERS[dtype.itemsize]] for dtype in OPAQUE}
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

    @property
    def is_located(self) -> bool:
        """Whether its address says if it shares memory with others."""
        return self.key[1] >= 0 and self.key[0] in ("cpu", "cuda")

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
    """An image: the leaf that it is of first, its device, its memory, and where that begins in
    which storage, by number of first use."""

    leaf: int
    kind: ImageKind
    device: str
    region: Region
    storage: int
    low: int


class TensorOwner(NamedTuple):
    """The leaf that has a tensor. `alone`: the tensor is all of it. `sharded`: it is distributed
    in this way, and has this one part here."""

    leaf: int
    alone: bool
    sharded: ShardedKind | None


class OddLeaves:
    """Leaves that are described one by one, and the images of their tensors. First `take` each,
    then have them `finished`.

    Tensors are known by a ticket. At rest images are row-major, and tensors without bytes have
    none; in a stream a leaf without bytes has one, and a part of a leaf none.
    """

    def __init__(self, tree: m.Node, *, at_rest: bool = False) -> None:
        self.tensors: list[torch.Tensor] = []
        self.views: list[View] = []  # of each tensor, or of its values where it is a lazy view
        self.owners: list[TensorOwner] = []  # of each view
        self._tree, self._at_rest = tree, at_rest
        self._leaves: dict[int, m.Leaf] = {}  # with tickets for their tensors
        self._tensors: dict[int, int] = {}  # tickets of leaves that may be rows
        self._by_key: dict[Key, list[int]] = {}

    def take(self, index: int, leaf: object, sharded: ShardedKind | None) -> None:
        """Describe a leaf. `UnsupportedLeafError` names one that cannot be."""
        try:
            found = describe(leaf, (), self._add)
        except RelayError:
            describe(leaf, self._path_of(index), self._add)  # with its path this time
            raise
        first, alone = len(self.owners), isinstance(found, m.TensorLeaf)
        self._leaves[index] = found
        if alone or sharded is not None:
            self._tensors[index] = first
        self.owners += [TensorOwner(index, alone, sharded)] * (len(self.views) - first)

    def _path_of(self, leaf: int) -> Path:
        return LeafPaths(self._tree)[leaf]

    def _add(self, tensor: torch.Tensor, *, apart: bool = False) -> int:
        """Take a strided tensor in; returns its ticket. `apart`: it gets an image of its own, also
        where its memory is that of others."""
        if tensor.dim() > m.MAX_DIMS:
            raise UnsupportedLeafError(f"{tensor.dim()} dimensions, the cap is {m.MAX_DIMS}")
        ticket = len(self.views)
        self.tensors.append(tensor)
        shape, strides, size = tuple(tensor.shape), tensor.stride(), tensor.element_size()
        dtype, flags = NAMES[tensor.dtype], flags_of(tensor)
        nbytes, device = extent(shape, strides) * size, tensor.device
        low = origin = 0
        if nbytes == 0 or tensor.is_meta:
            nbytes, apart = 0, True
            if tensor.is_meta:
                flags |= m.META
            elif not (tensor.is_cpu or self._at_rest):
                flags |= m.ON_DEVICE
        else:
            tensor = resolved(with_memory(tensor))
            strides = tensor.stride()
            if tensor.is_contiguous():
                strides = contiguous_strides(shape)  # torch lets those of size-1 dimensions be any
            nbytes = extent(shape, strides) * size
            low = tensor.data_ptr()
            origin = low - byte_offset(tensor)
        key = (device.type, -1 - ticket if apart else device.index or 0, origin)
        self._by_key.setdefault(key, []).append(ticket)
        self.views.append(View(tensor, shape, strides, size, low, low + nbytes, dtype, flags, key))
        return ticket

    @property
    def origins(self) -> list[int]:
        """Where in memory the storages start that tensors here share with what is alike."""
        return [origin for _, number, origin in self._by_key if number >= 0]

    @property
    def spans(self) -> tuple[Column, Column]:
        """Where the memory begins and ends that tensors here may share with others."""
        views = [view for view in self.views if view.is_located]
        lows, highs = [view.low for view in views], [view.high for view in views]
        return np.array(lows, np.uint64), np.array(highs, np.uint64)

    def _has_image(self, ticket: int) -> bool:
        view, owner = self.views[ticket], self.owners[ticket]
        if view.low < view.high:
            return True
        is_leaf = owner.alone or owner.sharded is not None
        return is_leaf and not self._at_rest and not view.flags & m.META

    def _storages(self) -> list[list[int]]:
        """The tensors over each storage, in order of first use. Storages that overlap are one."""
        storages = [some for some in self._by_key.values() if self._has_image(some[0])]
        spans = [(-1 - number, -number) for number in range(len(storages))]  # none of them overlap
        for number, tickets in enumerate(storages):
            views = [self.views[ticket] for ticket in tickets]
            if views[0].is_located:
                spans[number] = min(view.low for view in views), max(view.high for view in views)
        return sorted(
            sorted(ticket for number in group for ticket in storages[number])
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

    def _memory(self, tickets: Sequence[int]) -> tuple[int, torch.Tensor]:
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

    @cached_property
    def _resolved(self) -> tuple[list[Image], list[ImagePlace]]:
        """The images in order of first use, and by ticket where each tensor lies."""
        images: list[Image] = []
        places = [NOWHERE] * len(self.views)
        groups = [
            (tickets, layout, storage)
            for storage, some in enumerate(self._storages())
            for tickets, layout in self._groups(some)
        ]
        for tickets, layout, storage in sorted(groups, key=itemgetter(0)):
            first, leaf = self.views[tickets[0]], self.owners[tickets[0]].leaf
            with naming(partial(self._path_of, leaf)):
                kind, region, found = self._image(tickets, layout, len(images))
            for ticket, place in zip(tickets, found, strict=True):
                places[ticket] = place
            images.append(Image(leaf, kind, first.key[0], region, storage, first.low))
        return images, places

    @property
    def images(self) -> list[Image]:
        """The images in order of first use."""
        return self._resolved[0]

    def _image(
        self, tickets: list[int], layout: Layout | None, number: int
    ) -> tuple[ImageKind, Region, list[ImagePlace]]:
        """What tensors over the same bytes are of, and where each of them lies there."""
        first, owners = self.views[tickets[0]], [self.owners[ticket] for ticket in tickets]
        whole = layout is not None and layout.numel == prod(first.shape)
        if layout is None or (self._at_rest and not whole):
            low, memory = self._memory(tickets)
            views = [self.views[ticket] for ticket in tickets]
            at = [ImagePlace(number, v.low - low, v.kept_strides, whole=False) for v in views]
            region = Region.row_major(memory)
            return ImageKind("uint8", (region.nbytes,)), region, at
        region = Region(first.tensor, 0)
        if first.low < first.high:
            region = Region.of(first.tensor, first.shape, first.strides, layout.order)
        strides = None if layout.strides == contiguous_strides(first.shape) else layout.strides
        ways = [owner.sharded for owner in owners if owner.sharded is not None]
        found = ImageKind(stored_dtype(first.dtype), first.shape, strides)
        if ways:
            alike = len(ways) == len(owners) and all(_is_part(first, ways[0], way) for way in ways)
            whole = whole and (alike or first.low == first.high)
            found = ImageKind.of_boxes(ways[0].dtype, ways[0].shape, [ways[0].box], strides)
        elif strides is not None and not self._at_rest:
            # Parts of odd leaves have their strides with them, unless those are row-major.
            whole = whole and all(owner.alone for owner in owners)
        if not whole:
            found = ImageKind("uint8", (region.nbytes,))
        place = ImagePlace(number, 0, None if whole else strides, whole)
        return found, region, [place] * len(tickets)

    def finished(
        self, kinds: KindTable, numbers: Sequence[int]
    ) -> tuple[list[tuple[int, int, int, int]], dict[int, m.Leaf]]:
        """Tensors as rows of leaf, kind, image and offset, and all other leaves as records.
        `numbers` has the number of each image in the state's record."""
        _, places = self._resolved
        rows: list[tuple[int, int, int, int]] = []
        others: dict[int, m.Leaf] = {}

        def part(found: m.TensorLeaf) -> m.TensorLeaf:
            view, place = self.views[found.storage], places[found.storage]
            if place.image < 0:
                return m.TensorLeaf(view.dtype, view.shape, view.kept_strides, -1, 0, view.flags)
            at, flags = (numbers[place.image], place.offset), view.flags
            return m.TensorLeaf(view.dtype, view.shape, place.strides, *at, flags)

        for leaf, found in self._leaves.items():
            ticket = self._tensors.get(leaf, -1)
            place = places[ticket] if ticket >= 0 else NOWHERE
            kind = self._kind_of(ticket, place, kinds) if place.image >= 0 else None
            if kind is None:
                others[leaf] = m.with_parts(found, part)
            else:
                rows.append((leaf, kind, numbers[place.image], place.offset))
        return rows, others

    def _kind_of(self, ticket: int, place: ImagePlace, kinds: KindTable) -> int | None:
        """The kind of a tensor that is a leaf; None for a distributed one that has not an image of
        its own: it cannot be a row."""
        view, sharded = self.views[ticket], self.owners[ticket].sharded
        if sharded is not None:
            return sharded.number_in(kinds) if place.whole else None
        flags = view.flags & ~m.ON_DEVICE
        return kinds.leaves.number(LeafKind(view.dtype, view.shape, place.strides, flags))


class ImagePlace(NamedTuple):
    """Where a tensor lies: all of an image (`whole`), or a view of one of bytes."""

    image: int
    offset: int
    strides: tuple[int, ...] | None
    whole: bool


NOWHERE = ImagePlace(-1, 0, None, whole=False)  # of a tensor that has no bytes


def _is_part(view: View, kind: ShardedKind, other: ShardedKind) -> bool:
    """Whether a tensor is what distributed ones of two kinds are said to have here."""
    mine = (view.dtype, kind.shape, (kind.box[0], view.shape))
    return mine == (kind.dtype, kind.shape, kind.box) == (other.dtype, other.shape, other.box)


def stored_dtype(dtype: str) -> str:
    """The dtype of an image of elements: those that only torch knows are kept as whole numbers."""
    return _STORED.get(dtype, dtype)


# Where a view starts in an extent, its item size, shape and strides.
Geometry = tuple[int, int, tuple[int, ...], tuple[int, ...]]


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
