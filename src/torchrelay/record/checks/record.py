"""Whether all parts of a record agree with each other.

A record that passes can be landed without another look at its sizes: every leaf is all of its
image, or a view inside of an image of bytes; every box lies in its image and in its volume; and
time and memory to get there are bounded by the length of the encoded record.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from operator import lt
from typing import Any

import msgspec
import numpy as np

from torchrelay.errors import ManifestError
from torchrelay.geometry.boxes import Numbers
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
)
from torchrelay.steps import MAX_STEP

MAX_RANKS = 1 << 20
MAX_MORE_DIMS = 1 << 19  # of all tensors, beyond `_DIMS` of each: each costs time and memory
_DIMS = 8
_TOO_MUCH = 1 << 61  # so that sums of larger numbers stay in 64 bits
_encode = msgspec.msgpack.Encoder().encode
_Marks = np.ndarray[Any, np.dtype[np.bool_]]


def check(record: Record, mode: Mode, in_time: Callable[[], None] | None = None) -> None:
    """Raise `ManifestError` unless the record is valid. `in_time` is called now and then."""
    try:
        _check(record, mode, TreeLimits(in_time))
    except ManifestError:
        raise
    except (ValueError, TypeError, OverflowError, UnicodeDecodeError, RecursionError) as fault:
        raise ManifestError(f"invalid record: {fault}") from None


def check_step(step: int | None) -> None:
    if step is not None and not 0 <= step <= MAX_STEP:
        raise ManifestError(f"step {step} is out of range")


def _check(record: Record, mode: Mode, limits: TreeLimits) -> None:
    check_step(record.step)
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
    _check_shardings(record)
    check_images(record, mode)
    if mode != "part" or record.outlines or record.ranks:
        _check_outlines(record, _Rows(record, mode), limits)
    _check_rest(record)
    if mode == "whole" and record.origin is None:
        raise ManifestError("a step that does not say what saved it")


def _check_outlines(record: Record, rows: _Rows, limits: TreeLimits) -> None:
    for outline in record.outlines:
        _check_others(outline, rows, limits)
        rows.check(outline)
    check_meshes((leaf for one in record.outlines for leaf in one.others), record.meshes)
    _check_ranks(record, rows, limits)
    rows.check_reached()


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
    if not 0 <= record.images <= most:
        raise ManifestError(f"{record.images} images, and places of {most}")


def _check_shardings(record: Record) -> None:
    for mesh in record.meshes:
        check_mesh(mesh)
        if mesh.names is not None and len(mesh.names) != len(mesh.shape):
            raise ManifestError("the names of a mesh do not fit its shape")
    for sharding in record.shardings:
        if isinstance(sharding, MeshSharding):
            if not 0 <= sharding.mesh < len(record.meshes):
                raise ManifestError(f"mesh {sharding.mesh} of {len(record.meshes)}")
            dims = len(record.meshes[sharding.mesh].shape)
            coordinate = sharding.coordinate
            if coordinate is not None and len(coordinate) != dims:
                raise ManifestError("a coordinate does not fit its mesh")
            if len(sharding.placements) != dims:
                raise ManifestError(
                    f"{len(sharding.placements)} placements on a mesh of {dims} dimensions"
                )


class _Rows:
    """Checks leaves against the images that they are of, and notes how far they reach."""

    def __init__(self, record: Record, mode: Mode) -> None:
        kinds, images = record.kinds, record.image_kinds
        self._record, self.mode = record, mode
        self._boxes: dict[int, set[bytes]] = {}  # of ShardedTensors, by sharding, encoded
        self._box_shapes: dict[int, tuple[int, ...]] = {}
        for kind in kinds:
            self._check_kind(kind)
        numbers = [self._geometry(kind) for kind in kinds]
        self._itemsize: Numbers = np.array([size for size, _ in numbers], np.int64)
        self._extent: Numbers = np.array([nbytes for _, nbytes in numbers], np.int64)
        self._sharded: _Marks = np.array([kind.sharding >= 0 for kind in kinds], bool)
        self._strided: _Marks = np.array([kind.strides is not None for kind in kinds], bool)
        self._more: Numbers = np.array([max(len(k.shape) - _DIMS, 0) for k in kinds], np.int64)
        self._shapes, self._image_shapes = record.shapes
        self._bytes: _Marks = np.array([_is_bytes(kind) for kind in images], bool)
        # A leaf that is not distributed needs all of its image.
        self._all_there: _Marks = np.array([mode != "stream" or k.is_whole for k in images], bool)
        self._sizes: Numbers = kind_bytes(images)
        self._reach: Numbers = np.zeros(record.images, np.int64)
        self._used: _Marks = np.zeros(record.images, bool)

    def _check_kind(self, kind: LeafKind) -> None:
        check_flags(kind.dtype, kind.flags)
        if kind.flags & m.META:
            raise ManifestError("a meta tensor has no image")
        if not -1 <= kind.sharding < len(self._record.shardings):
            raise ManifestError(f"sharding {kind.sharding} of {len(self._record.shardings)}")
        if kind.sharding >= 0:
            if kind.strides is not None and len(kind.strides) != len(kind.shape):
                raise ManifestError("strides do not fit the shape of a distributed tensor")
            self._check_sharding(kind.sharding, kind.shape)

    def _check_sharding(self, number: int, shape: tuple[int, ...]) -> None:
        sharding = self._record.shardings[number]
        if isinstance(sharding, MeshSharding):
            check_placements(sharding.placements, len(shape))
        elif number not in self._boxes:
            check_boxes(sharding.boxes, shape)
            boxes = sharding.boxes
            self._boxes[number] = {_encode((box.offsets, box.sizes)) for box in boxes}
            self._box_shapes[number] = shape
        elif self._box_shapes[number] != shape:
            raise ManifestError("tensors of different shapes in the same boxes")

    def _geometry(self, kind: LeafKind) -> tuple[int, int]:
        """Item size and bytes reached of a leaf that is a view."""
        strides = None if kind.sharding >= 0 else kind.strides
        _, size, nbytes = geometry(kind.dtype, kind.shape, strides)
        return size, min(nbytes, _TOO_MUCH)

    def check(self, outline: StateOutline) -> None:
        """Raise `ManifestError` unless each row is all of its image, or a view inside of one of
        bytes."""
        record, rows = self._record, outline.rows
        check_column(outline.kinds, rows, len(record.kinds), "kinds of rows")
        check_column(outline.offsets, rows, _TOO_MUCH, "offsets of rows")
        check_column(outline.images, rows, record.images, "images of rows")
        if outline.images is None and rows > record.images:
            raise ManifestError(f"{rows} rows of {record.images} images")
        if not rows:
            return
        kinds, images, offsets = outline.row_kinds, outline.row_images, outline.row_offsets
        if int(self._more[kinds].sum()) > MAX_MORE_DIMS:
            raise ManifestError("too many tensors of many dimensions")
        of_image = record.image_kind[images]
        sharded = self._sharded[kinds]
        whole = self._shapes[kinds] == self._image_shapes[of_image]
        whole &= (offsets == 0) & (sharded | (~self._strided[kinds] & self._all_there[of_image]))
        sizes = self._sizes[of_image]
        ends = offsets + self._extent[kinds]
        inside = self._bytes[of_image] & ~sharded & (ends <= sizes)
        inside &= offsets % self._itemsize[kinds] == 0
        for row in np.flatnonzero(~(whole | inside))[:1].tolist():
            self._refuse(record.kinds[int(kinds[row])], int(images[row]), int(offsets[row]))
        if sharded.any() and self.mode == "stream":
            self._check_own_boxes(kinds[sharded], of_image[sharded])
        np.maximum.at(self._reach, images, np.where(whole, sizes, ends))
        self._used[images] = True

    def _check_own_boxes(self, kinds: Numbers, images: Numbers) -> None:
        """The box of a ShardedTensor on this rank is one of its boxes on all ranks."""
        record, count = self._record, len(self._record.image_kinds)
        for pair in np.unique(kinds * count + images).tolist():
            number = record.kinds[pair // count].sharding
            if number in self._boxes:
                box = record.image_kinds[pair % count].boxes[0]
                if _encode(box) not in self._boxes[number]:
                    raise ManifestError("a box of a ShardedTensor that no rank has")

    def check_part(self, part: m.TensorLeaf) -> None:
        """The same of a strided tensor that is a part of a leaf."""
        numel, size, nbytes = geometry(part.dtype, part.shape, part.strides)
        check_flags(part.dtype, part.flags)
        if part.storage == -1:
            if part.offset or (numel and not part.flags & m.META):
                raise ManifestError("a tensor without its image")
            return
        if numel == 0 or part.flags & m.META:
            raise ManifestError("an empty or meta tensor has no image")
        kind = LeafKind(part.dtype, part.shape, part.strides)
        self._check_one(kind, part.storage, part.offset, size, nbytes, any_layout=False)

    def check_own_row(self, number: int, image: int, offset: int) -> None:
        """A row of a rank that has an image of its own."""
        size, nbytes = int(self._itemsize[number]), int(self._extent[number])
        self._check_one(self._record.kinds[number], image, offset, size, nbytes, any_layout=True)

    def _check_one(
        self, kind: LeafKind, image: int, offset: int, size: int, nbytes: int, *, any_layout: bool
    ) -> None:
        """As `check`. `size` and `nbytes` are of an item and of all that the leaf reaches;
        `any_layout`: it may be all of an image that is not row-major."""
        if not 0 <= image < self._record.images or offset < 0:
            raise ManifestError(f"image {image} of {self._record.images}")
        number = int(self._record.image_kind[image])
        there, room = self._record.image_kinds[number], int(self._sizes[number])
        fits = there.shape == kind.shape and nbytes == room and not offset
        if kind.sharding < 0:
            fits = fits and kind.strides is None and bool(self._all_there[number])
            fits = fits and (any_layout or there.strides is None or self.mode != "stream")
            inside = _is_bytes(there) and offset + nbytes <= room and offset % size == 0
            fits = fits or inside
        if not fits:
            self._refuse(kind, image, offset)
        self._reach[image] = max(int(self._reach[image]), offset + nbytes)
        self._used[image] = True

    def check_reached(self) -> None:
        """No image is larger than what its leaves reach. In a step an image may have no leaf:
        torch's planners name tensors, and no states."""
        sizes = self._record.box_bytes
        # Of a distributed tensor the row reaches all of the whole, and the box is what is there.
        whole = self._sizes[self._record.image_kind] if self._record.images else sizes
        unreached = self._reach != whole
        short = np.flatnonzero(
            unreached | ~self._used if self.mode == "stream" else unreached & self._used
        )
        for image in short[:1].tolist():
            raise ManifestError(
                f"image {image} has {sizes[image]} bytes, its leaves reach {self._reach[image]}"
            )

    def _refuse(self, kind: LeafKind, image: int, offset: int) -> None:
        there = self._record.image_kinds[int(self._record.image_kind[image])]
        raise ManifestError(
            f"a leaf of {kind.dtype[:40]} and shape {kind.shape[:8]} at byte {offset} of image "
            f"{image}, which is {there.dtype[:40]} of shape {there.shape[:8]}"
        )


def _is_bytes(kind: ImageKind) -> bool:
    """Whether an image is plain bytes: leaves may be views of it."""
    one = kind.dtype == "uint8" and len(kind.shape) == 1
    return one and kind.count < 2 and kind.offsets is None and kind.strides is None


def _check_others(outline: StateOutline, rows: _Rows, limits: TreeLimits) -> None:
    others = outline.others
    check_column(outline.others_at, len(others), outline.leaves, "leaves that are not rows")
    at = outline.other_leaves
    if (at[1:] <= at[:-1]).any():
        raise ManifestError("leaves that are not rows are out of order")
    for leaf in others:
        check_leaf(leaf, rows.check_part, limits)


def _check_ranks(record: Record, rows: _Rows, limits: TreeLimits) -> None:
    if not 0 < len(record.ranks) <= MAX_RANKS:
        raise ManifestError(f"a state of {len(record.ranks)} ranks")
    if not all(0 <= number < len(record.outlines) for number in record.ranks):
        raise ManifestError("a rank has no outline")
    _check_ascending([one.rank for one in record.differences], len(record.ranks), "ranks")
    for one in record.differences:
        outline = record.outlines[record.ranks[one.rank]]
        _check_ascending([leaf for leaf, _ in one.leaves], outline.leaves, "own leaves")
        _check_ascending([row for row, _ in one.images], outline.rows, "own images")
        for _, leaf in one.leaves:
            check_leaf(leaf, rows.check_part, limits)
        for row, image in one.images:
            number, offset = int(outline.row_kinds[row]), int(outline.row_offsets[row])
            rows.check_own_row(number, image, offset)
    check_meshes(leaf for one in record.differences for _, leaf in one.leaves)


def _check_ascending(numbers: Sequence[int], stop: int, what: str) -> None:
    if numbers and not (
        numbers[0] >= 0 and numbers[-1] < stop and all(map(lt, numbers, numbers[1:]))
    ):
        raise ManifestError(f"{what}: out of order, or not from 0 to {stop - 1}")


def _check_rest(record: Record) -> None:
    if record.names:
        images, names = zip(*record.names, strict=True)
        _check_ascending(images, record.images, "names of images")
        _check_different(names, "name")
    _check_different([one.name for one in record.objects], "object")
    for one in record.objects:
        if one.kind not in ("state", "raw"):
            raise ManifestError(f"an object of kind {one.kind[:40]!r}")
        if not 0 <= one.volume < len(record.volumes):
            raise ManifestError(f"volume {one.volume} of {len(record.volumes)}")
        room = record.volumes[one.volume].nbytes
        if one.start < 0 or one.nbytes < 0 or one.start + one.nbytes > room:
            raise ManifestError(f"object {one.name[:80]!r} is not in its volume")


def _check_different(names: Iterable[str], what: str) -> None:
    names = list(names)
    if len(set(names)) != len(names):
        raise ManifestError(f"a {what} stands there twice")
