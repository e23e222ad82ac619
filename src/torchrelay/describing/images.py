"""Leaves that are described one by one, and the images of their tensors: each byte that a tensor
has is in one image, ties are kept, and no other byte is in any.

Tensors that are the same view of the same memory have one image, with their elements packed without
gaps. Different views that share bytes have one image of bytes: their common extent. Storages that
overlap count as one: numpy and others hand torch the same memory several times.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import prod
from operator import itemgetter
from typing import NamedTuple

import numpy as np
import torch

from torchrelay.describing.region import Region
from torchrelay.describing.sharded import ShardedKind
from torchrelay.describing.views import Storage, View, shared_bytes, sharing
from torchrelay.errors import RelayError, UnsupportedLeafError
from torchrelay.geometry.runs import Column
from torchrelay.geometry.strides import Layout, contiguous_strides, extent, overlapping, packed
from torchrelay.record import manifest as m
from torchrelay.record.kinds import KindTable
from torchrelay.record.schema import ImageKind, LeafKind
from torchrelay.state.backing import with_memory
from torchrelay.state.leaves import describe
from torchrelay.state.paths import LeafPaths, Path, naming
from torchrelay.state.tensors import CARRIERS, NAMES, OPAQUE, byte_offset, flags_of, resolved

_STORED = {NAMES[dtype]: NAMES[CARRIERS[dtype.itemsize]] for dtype in OPAQUE}


def stored_dtype(dtype: str) -> str:
    """The dtype of an image of elements: those that only torch knows are kept as whole numbers."""
    return _STORED.get(dtype, dtype)


class LiveImage(NamedTuple):
    """An image: the leaf that it is of first, its device, its memory, and where that begins in
    which storage, by number of first use."""

    leaf: int
    kind: ImageKind
    device: str
    region: Region
    storage: int
    low: int


class ViewInImage(NamedTuple):
    """A tensor is all of an image (`whole`), or a view of one of bytes."""

    image: int
    offset: int
    strides: tuple[int, ...] | None
    whole: bool


_NO_IMAGE = ViewInImage(-1, 0, None, whole=False)  # of a tensor that has no bytes


class TensorOwner(NamedTuple):
    """The leaf that has a tensor. `is_all`: the tensor is all of it. `sharded`: it is distributed
    in this way, and has this one part here."""

    leaf: int
    is_all: bool
    sharded: ShardedKind | None


class GeneralLeaves:
    """Leaves that are described one by one. First `take` each, then make the `LeafImages`.

    Their tensors have numbers, in the order in which they were found. At rest images are row-major,
    and tensors without bytes have none; in a stream a leaf without bytes has one, and a part of a
    leaf none.
    """

    def __init__(self, tree: m.Node, *, at_rest: bool = False) -> None:
        self.at_rest = at_rest
        self.leaves: dict[int, m.Leaf] = {}  # with the numbers of their tensors for storages
        self.row_tensors: dict[int, int] = {}  # by leaf that may be a row, the number of its tensor
        self.tensors: list[torch.Tensor] = []
        self.views: list[View] = []  # of each tensor, or of its values where it is a lazy view
        self.owners: list[TensorOwner] = []  # of each tensor
        self._tree = tree
        self._by_storage: dict[Storage, list[int]] = {}

    def take(self, index: int, leaf: object, sharded: ShardedKind | None) -> None:
        """Describe a leaf. `UnsupportedLeafError` names one that cannot be."""
        try:
            found = describe(leaf, (), self._add)
        except RelayError:
            describe(leaf, self.path_of(index), self._add)  # with its path this time
            raise
        first, is_all = len(self.owners), isinstance(found, m.TensorLeaf)
        self.leaves[index] = found
        if is_all or sharded is not None:
            self.row_tensors[index] = first
        self.owners += [TensorOwner(index, is_all, sharded)] * (len(self.views) - first)

    def path_of(self, leaf: int) -> Path:
        return LeafPaths(self._tree)[leaf]

    def _add(self, tensor: torch.Tensor, *, separate: bool = False) -> int:
        """Take a strided tensor in; returns its number. `separate`: it gets an image of its own,
        also where its memory is that of others."""
        if tensor.dim() > m.MAX_DIMS:
            raise UnsupportedLeafError(f"{tensor.dim()} dimensions, the cap is {m.MAX_DIMS}")
        number = len(self.views)
        dtype, flags, device = NAMES[tensor.dtype], flags_of(tensor), tensor.device
        shape, strides, size = tuple(tensor.shape), tensor.stride(), tensor.element_size()
        self.tensors.append(tensor)
        low = high = origin = 0
        if tensor.is_meta or not tensor.numel():
            separate = True
            if tensor.is_meta:
                flags |= m.META
            elif not (tensor.is_cpu or self.at_rest):
                flags |= m.ON_DEVICE
        else:
            tensor = resolved(with_memory(tensor))
            # torch lets strides of size-1 dimensions be any
            strides = contiguous_strides(shape) if tensor.is_contiguous() else tensor.stride()
            low = tensor.data_ptr()
            high, origin = low + extent(shape, strides) * size, low - byte_offset(tensor)
        storage = (device.type, -1 - number if separate else device.index or 0, origin)
        self._by_storage.setdefault(storage, []).append(number)
        self.views.append(View(tensor, shape, strides, size, low, high, dtype, flags, storage))
        return number

    @property
    def origins(self) -> list[int]:
        """Where in memory the storages start that tensors here may share with others."""
        return [origin for _, number, origin in self._by_storage if number >= 0]

    @property
    def spans(self) -> tuple[Column, Column]:
        """Where the memory begins and ends that tensors here may share with others."""
        views = [view for view in self.views if view.is_located]
        lows, highs = [view.low for view in views], [view.high for view in views]
        return np.array(lows, np.uint64), np.array(highs, np.uint64)

    def storages(self) -> list[list[int]]:
        """The tensors over each storage, in order of first use. Storages that overlap are one."""
        storages = [some for some in self._by_storage.values() if self._has_image(some[0])]
        spans = [(-1 - number, -number) for number in range(len(storages))]  # none of them overlap
        for number, tensors in enumerate(storages):
            views = [self.views[tensor] for tensor in tensors]
            if views[0].is_located:
                spans[number] = min(view.low for view in views), max(view.high for view in views)
        return sorted(
            sorted(tensor for number in group for tensor in storages[number])
            for group in overlapping(spans)
        )

    def _has_image(self, number: int) -> bool:
        view, owner = self.views[number], self.owners[number]
        if view.low < view.high:
            return True
        is_leaf = owner.is_all or owner.sharded is not None
        return is_leaf and not self.at_rest and not view.flags & m.META


class LeafImages:
    """The `images` of leaves that are described one by one, in order of first use."""

    def __init__(self, found: GeneralLeaves) -> None:
        self.images: list[LiveImage] = []
        self._found = found
        self._tensors = [_NO_IMAGE] * len(found.views)
        groups = [
            (sorted(tensors[n] for n in group), storage)
            for storage, tensors in enumerate(found.storages())
            for group in sharing([found.views[tensor] for tensor in tensors])
        ]
        for tensors, storage in sorted(groups, key=itemgetter(0)):
            first, leaf = found.views[tensors[0]], found.owners[tensors[0]].leaf
            with naming(partial(found.path_of, leaf)):
                kind, region = self._image(tensors)
            device = first.storage[0]
            self.images.append(LiveImage(leaf, kind, device, region, storage, first.low))

    def _image(self, tensors: list[int]) -> tuple[ImageKind, Region]:
        """The image of tensors that share memory; notes where in it each of them is."""
        number, views = len(self.images), [self._found.views[tensor] for tensor in tensors]
        first = views[0]
        layout = packed(first.shape, first.strides)
        if layout is not None and all(view.geometry == first.geometry for view in views):
            kind, region, lies = self._image_of_elements(tensors, layout)
            for tensor in tensors:
                self._tensors[tensor] = lies
            return kind, region
        low, memory = shared_bytes(views)
        for tensor, view in zip(tensors, views, strict=True):
            offset = view.low - low
            self._tensors[tensor] = ViewInImage(number, offset, view.kept_strides, whole=False)
        region = Region.row_major(memory)
        return ImageKind("uint8", (region.nbytes,)), region

    def _image_of_elements(
        self, tensors: list[int], layout: Layout
    ) -> tuple[ImageKind, Region, ViewInImage]:
        """The image of tensors that are all the same view, its elements in the order of memory."""
        found = self._found
        first, owners = found.views[tensors[0]], [found.owners[tensor] for tensor in tensors]
        whole = layout.numel == prod(first.shape)
        region = Region(first.tensor, 0)
        if first.low < first.high:
            region = Region.of(first.tensor, first.shape, first.strides, layout.order)
        strides = None if layout.strides == contiguous_strides(first.shape) else layout.strides
        ways = [owner.sharded for owner in owners if owner.sharded is not None]
        kind = ImageKind(stored_dtype(first.dtype), first.shape, strides)
        if ways:
            same = len(ways) == len(owners) and all(_is_part(first, ways[0], way) for way in ways)
            whole = whole and (same or first.low == first.high)
            kind = ImageKind.of_boxes(ways[0].dtype, ways[0].shape, [ways[0].box], strides)
        elif strides is not None and not found.at_rest:
            # Parts of other leaves have their strides with them, unless those are row-major.
            whole = whole and all(owner.is_all for owner in owners)
        if not whole:
            kind = ImageKind("uint8", (region.nbytes,))
            region = region.as_bytes() if found.at_rest else region
        lies = ViewInImage(len(self.images), 0, None if whole else strides, whole)
        return kind, region, lies

    def rows_and_others(
        self, kinds: KindTable, numbers: Sequence[int]
    ) -> tuple[list[tuple[int, int, int, int]], dict[int, m.Leaf]]:
        """Tensors as rows of leaf, kind, image and offset, and all other leaves as records.
        `numbers` has the number of each image in the state's record."""
        rows: list[tuple[int, int, int, int]] = []
        others: dict[int, m.Leaf] = {}

        def part(found: m.TensorLeaf) -> m.TensorLeaf:
            view, lies = self._found.views[found.storage], self._tensors[found.storage]
            if lies.image < 0:
                return m.TensorLeaf(view.dtype, view.shape, view.kept_strides, -1, 0, view.flags)
            image = numbers[lies.image]
            return m.TensorLeaf(
                view.dtype, view.shape, lies.strides, image, lies.offset, view.flags
            )

        for leaf, found in self._found.leaves.items():
            tensor = self._found.row_tensors.get(leaf, -1)
            lies = self._tensors[tensor] if tensor >= 0 else _NO_IMAGE
            kind = self._kind_of(tensor, lies, kinds) if lies.image >= 0 else None
            if kind is None:
                others[leaf] = m.with_parts(found, part)
            else:
                rows.append((leaf, kind, numbers[lies.image], lies.offset))
        return rows, others

    def _kind_of(self, tensor: int, lies: ViewInImage, kinds: KindTable) -> int | None:
        """The kind of a tensor that is a leaf; None for a distributed one that has not an image of
        its own: it cannot be a row."""
        view, sharded = self._found.views[tensor], self._found.owners[tensor].sharded
        if sharded is not None:
            return sharded.number_in(kinds) if lies.whole else None
        flags = view.flags & ~m.ON_DEVICE
        return kinds.leaves.number(LeafKind(view.dtype, view.shape, lies.strides, flags))


def _is_part(view: View, kind: ShardedKind, other: ShardedKind) -> bool:
    """Whether a tensor is what distributed ones of two kinds are said to have here."""
    mine = (view.dtype, kind.shape, (kind.box[0], view.shape))
    return mine == (kind.dtype, kind.shape, kind.box) == (other.dtype, other.shape, other.box)
