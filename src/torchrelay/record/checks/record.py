"""Whether all parts of a record agree with each other.

A record that passes can be landed without another look at its sizes: every leaf is all of its
image, or a view inside of an image of bytes; every box lies in its image and in its volume; and
time and memory to get there are bounded by the length of the encoded record. The types of fields
say which numbers and words may stand there, and a decoder has checked them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import lt
from typing import Any

import msgspec
import numpy as np

from torchrelay.errors import ManifestError
from torchrelay.geometry.boxes import Numbers
from torchrelay.geometry.numbered import Numbered
from torchrelay.record import manifest as m
from torchrelay.record.checks.images import Mode, check_column, check_images, kind_bytes
from torchrelay.record.checks.leaves import (
    check_boxes,
    check_flags,
    check_leaf,
    check_placements,
    geometry,
)
from torchrelay.record.checks.tree import TreeLimits, check_tree
from torchrelay.record.meshes import check_mesh, check_meshes
from torchrelay.record.schema import (
    ImageKind,
    LeafKind,
    MeshSharding,
    Record,
    StateOutline,
    shape_numbers,
)

MAX_RANKS = 1 << 20
MAX_MORE_DIMS = 1 << 19  # of all tensors, beyond `_DIMS` of each: each costs time and memory
_DIMS = 8
_TOO_MUCH = 1 << 61  # so that sums of larger numbers stay in 64 bits
_encode = msgspec.msgpack.Encoder().encode
_Marks = np.ndarray[Any, np.dtype[np.bool_]]


def check(record: Record, mode: Mode, in_time: Callable[[], None] | None = None) -> None:
    """Raise `ManifestError`, or what the functions that this calls raise, unless a record whose
    fields are in range is valid. `in_time` is called now and then."""
    limits = TreeLimits(in_time)
    if mode == "stream":
        _check_one_rank(record)
    leaves = sum(outline.leaves for outline in record.outlines)
    if leaves > m.MAX_LEAVES:
        raise ManifestError(f"{leaves} leaves, the cap is {m.MAX_LEAVES}")
    for outline in record.outlines:
        if outline.leaves < len(outline.others):
            raise ManifestError(f"{outline.leaves} leaves, {len(outline.others)} of them no rows")
        check_tree(outline.tree, outline.leaves, limits)
    _check_count(record, mode)
    for mesh in record.meshes:
        check_mesh(mesh)
    check_images(record, mode)
    if mode != "part" or record.outlines or record.ranks:
        _check_leaves(record, mode, limits)
    _check_rest(record)
    if mode == "whole" and record.origin is None:
        raise ManifestError("a step that does not say what saved it")


def _check_one_rank(record: Record) -> None:
    if (
        len(record.outlines) != 1
        or len(record.volumes) != 1
        or record.ranks != (0,)
        or record.starts is not None
        or record.volume_of is not None
        or record.differences
        or record.names
        or record.objects
    ):
        raise ManifestError("not the record of one live rank")


def _check_count(record: Record, mode: Mode) -> None:
    """The number of images is one that something in the record stands for."""
    others = (leaf for outline in record.outlines for leaf in outline.others)
    most = sum(outline.rows for outline in record.outlines)
    most += sum(1 for leaf in others for _ in m.parts(leaf))
    if mode != "stream":
        known = (record.kind_of, record.starts)
        most = max(most, *(0 if column is None else len(column) for column in known))
    if record.images > most:
        raise ManifestError(f"{record.images} images, and places of {most}")


def _check_leaves(record: Record, mode: Mode, limits: TreeLimits) -> None:
    """Leaves agree with themselves, and with the images that they are of."""
    _check_ranks(record)
    own = [leaf for one in record.differences for _, leaf in one.leaves]
    others = [leaf for outline in record.outlines for leaf in outline.others]
    for leaf in (*others, *own):
        check_leaf(leaf, limits)
    check_meshes(others, record.meshes)
    check_meshes(own)
    parts = [part for leaf in (*others, *own) for part in m.parts(leaf) if part.storage >= 0]
    table: Numbered[LeafKind] = Numbered()
    kinds = table.numbers(LeafKind(part.dtype, part.shape, part.strides) for part in parts)
    rows = _Rows(record, mode, table.found)
    for outline in record.outlines:
        rows.check_outline(outline)
    rows.check_differences()
    rows.check(
        kinds + len(record.kinds),
        np.array([part.storage for part in parts], np.int64),
        np.array([part.offset for part in parts], np.int64),
    )
    rows.check_reached()


class _Rows:
    """Checks leaves against the images that they are of, and notes how far they reach. Strided
    tensors that are parts of other leaves have kinds with numbers after those of rows."""

    def __init__(self, record: Record, mode: Mode, of_parts: Sequence[LeafKind]) -> None:
        self._record, self._mode = record, mode
        # By sharding: the shape and the encoded boxes of ShardedTensors.
        self._boxes: dict[int, tuple[tuple[int, ...], set[bytes]]] = {}
        for kind in record.kinds:
            self._check_kind(kind)
        kinds = [*record.kinds, *of_parts]
        images, self._kinds = record.image_kinds, kinds
        self._shapes, self._image_shapes = shape_numbers(kinds, images)
        own = [None if kind.sharding >= 0 else kind.strides for kind in kinds]
        reach = [geometry(k.dtype, k.shape, s) for k, s in zip(kinds, own, strict=True)]
        self._itemsize: Numbers = np.array([size for _, size, _ in reach], np.int64)
        self._extent: Numbers = np.array([min(n, _TOO_MUCH) for _, _, n in reach], np.int64)
        self._sharded: _Marks = np.array([kind.sharding >= 0 for kind in kinds], bool)
        self._strided: _Marks = np.array([kind.strides is not None for kind in kinds], bool)
        self._more: Numbers = np.array([max(len(k.shape) - _DIMS, 0) for k in kinds], np.int64)
        self._bytes: _Marks = np.array([_is_bytes(kind) for kind in images], bool)
        # A leaf that is not distributed needs all of its image.
        self._all_there: _Marks = np.array([mode != "stream" or k.is_whole for k in images], bool)
        # A part says its strides itself: in a stream it cannot be of an image in another layout.
        self._for_parts: _Marks = np.array(
            [mode != "stream" or kind.strides is None for kind in images], bool
        )
        self._sizes: Numbers = kind_bytes(images)
        self._reached: Numbers = np.zeros(record.images, np.int64)
        self._used: _Marks = np.zeros(record.images, bool)

    def _check_kind(self, kind: LeafKind) -> None:
        check_flags(kind.dtype, kind.flags)
        if kind.flags & m.META:
            raise ManifestError("a meta tensor has no image")
        if kind.sharding >= len(self._record.shardings):
            raise ManifestError(f"sharding {kind.sharding} of {len(self._record.shardings)}")
        if kind.sharding < 0:
            return
        if kind.strides is not None and len(kind.strides) != len(kind.shape):
            raise ManifestError("strides do not fit the shape of a distributed tensor")
        number, shape = kind.sharding, kind.shape
        how = self._record.shardings[number]
        if isinstance(how, MeshSharding):
            if how.mesh >= len(self._record.meshes):
                raise ManifestError(f"mesh {how.mesh} of {len(self._record.meshes)}")
            mesh = self._record.meshes[how.mesh]
            check_placements(how.placements, how.coordinate, mesh, len(shape))
        elif number not in self._boxes:
            check_boxes(how.boxes, shape)
            self._boxes[number] = shape, {_encode((box.offsets, box.sizes)) for box in how.boxes}
        elif self._boxes[number][0] != shape:
            raise ManifestError("tensors of different shapes in the same boxes")

    def check_outline(self, outline: StateOutline) -> None:
        record, rows, others = self._record, outline.rows, len(outline.others)
        check_column(outline.others_at, others, outline.leaves, "leaves that are not rows")
        _check_ascending(outline.other_leaves.tolist(), outline.leaves, "leaves that are not rows")
        check_column(outline.kinds, rows, len(record.kinds), "kinds of rows")
        check_column(outline.offsets, rows, _TOO_MUCH, "offsets of rows")
        check_column(outline.images, rows, record.images, "images of rows")
        if outline.images is None and rows > record.images:
            raise ManifestError(f"{rows} rows of {record.images} images")
        if rows and int(self._more[outline.row_kinds].sum()) > MAX_MORE_DIMS:
            raise ManifestError("too many tensors of many dimensions")
        self.check(outline.row_kinds, outline.row_images, outline.row_offsets)

    def check_differences(self) -> None:
        """Raise `ManifestError` unless the images that ranks have of their own fit their rows."""
        record = self._record
        found: list[tuple[Numbers, Numbers, Numbers]] = []
        for one in record.differences:
            if one.images:
                outline = record.outlines[record.ranks[one.rank]]
                at, images = np.array(one.images, np.int64).T
                found.append((outline.row_kinds[at], images, outline.row_offsets[at]))
        if found:  # all at once: there may be thousands of ranks
            self.check(*map(np.concatenate, zip(*found, strict=True)))

    def check(self, kinds: Numbers, images: Numbers, offsets: Numbers) -> None:
        """Raise `ManifestError` unless each leaf is all of its image, or a view inside of one of
        bytes."""
        if not len(kinds):
            return
        record = self._record
        check_column(images, len(kinds), record.images, "images of leaves")
        of_image = record.image_kind[images]
        sharded, sizes = self._sharded[kinds], self._sizes[of_image]
        plain = ~self._strided[kinds] & self._all_there[of_image]
        plain &= (kinds < len(record.kinds)) | self._for_parts[of_image]
        whole = self._shapes[kinds] == self._image_shapes[of_image]
        whole &= (offsets == 0) & (sharded | plain)
        ends = offsets + self._extent[kinds]
        inside = self._bytes[of_image] & ~sharded & (ends <= sizes)
        inside &= offsets % self._itemsize[kinds] == 0
        for row in np.flatnonzero(~(whole | inside))[:1].tolist():
            kind, image = self._kinds[int(kinds[row])], int(images[row])
            there = record.image_kinds[int(of_image[row])]
            raise ManifestError(
                f"a leaf of {kind.dtype[:40]} and shape {kind.shape[:8]} at byte {offsets[row]} of "
                f"image {image}, which is {there.dtype[:40]} of shape {there.shape[:8]}"
            )
        if sharded.any() and self._mode == "stream":
            self._check_own_boxes(kinds[sharded], of_image[sharded])
        np.maximum.at(self._reached, images, np.where(whole, sizes, ends))
        self._used[images] = True

    def _check_own_boxes(self, kinds: Numbers, images: Numbers) -> None:
        """The box of a ShardedTensor on this rank is one of its boxes on all ranks."""
        record, count = self._record, len(self._record.image_kinds)
        for pair in np.unique(kinds * count + images).tolist():
            number = record.kinds[pair // count].sharding
            if number in self._boxes:
                box = record.image_kinds[pair % count].boxes[0]
                if _encode(box) not in self._boxes[number][1]:
                    raise ManifestError("a box of a ShardedTensor that no rank has")

    def check_reached(self) -> None:
        """No image is larger than what its leaves reach. In a step an image may have no leaf:
        torch's planners name tensors, and no states."""
        sizes = self._record.box_bytes
        # Of a distributed tensor the row reaches all of the whole, and the box is what is there.
        whole = self._sizes[self._record.image_kind] if self._record.images else sizes
        unreached = self._reached != whole
        short = np.flatnonzero(
            unreached | ~self._used if self._mode == "stream" else unreached & self._used
        )
        for image in short[:1].tolist():
            raise ManifestError(
                f"image {image} has {sizes[image]} bytes, its leaves reach {self._reached[image]}"
            )


def _is_bytes(kind: ImageKind) -> bool:
    """Whether an image is plain bytes: leaves may be views of it."""
    one = kind.dtype == "uint8" and len(kind.shape) == 1
    return one and kind.count < 2 and kind.offsets is None and kind.strides is None


def _check_ranks(record: Record) -> None:
    if not 0 < len(record.ranks) <= MAX_RANKS:
        raise ManifestError(f"a state of {len(record.ranks)} ranks")
    if not all(0 <= number < len(record.outlines) for number in record.ranks):
        raise ManifestError("a rank has no outline")
    _check_ascending([one.rank for one in record.differences], len(record.ranks), "ranks")
    for one in record.differences:
        outline = record.outlines[record.ranks[one.rank]]
        _check_ascending([leaf for leaf, _ in one.leaves], outline.leaves, "own leaves")
        _check_ascending([row for row, _ in one.images], outline.rows, "own images")


def _check_ascending(numbers: Sequence[int], stop: int, what: str) -> None:
    if numbers and not (numbers[-1] < stop and all(map(lt, numbers, numbers[1:]))):
        raise ManifestError(f"{what}: out of order, or not from 0 to {stop - 1}")


def _check_rest(record: Record) -> None:
    if record.names:
        images, names = zip(*record.names, strict=True)
        _check_ascending(images, record.images, "names of images")
        _check_different(names, "name")
    _check_different([one.name for one in record.objects], "object")
    for one in record.objects:
        if one.volume >= len(record.volumes):
            raise ManifestError(f"volume {one.volume} of {len(record.volumes)}")
        if one.start + one.nbytes > record.volumes[one.volume].nbytes:
            raise ManifestError(f"object {one.name[:80]!r} is not in its volume")


def _check_different(names: Sequence[str], what: str) -> None:
    if len(set(names)) != len(names):
        raise ManifestError(f"a {what} stands there twice")
