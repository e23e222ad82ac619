"""Whether leaves fit the images that they are of: rows, and strided tensors that are parts of other
leaves, all of them in columns."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

import msgspec
import numpy as np

from torchrelay.errors import ManifestError
from torchrelay.geometry.boxes import Numbers
from torchrelay.geometry.numbered import Numbered
from torchrelay.geometry.strides import contiguous_strides, extent
from torchrelay.record import manifest as m
from torchrelay.record.checks.images import Mode, check_ascending, check_column
from torchrelay.record.checks.leaves import check_boxes, check_placements, check_shape
from torchrelay.record.dtypes import itemsize
from torchrelay.record.schema import ImageKind, LeafKind, MeshSharding, Record, shape_numbers

MAX_MORE_DIMS = 1 << 19  # of all tensors, beyond `_DIMS` of each: each costs time and memory
_DIMS = 8
_TOO_MUCH = 1 << 61  # so that sums of larger numbers stay in 64 bits
# How the names of dtypes start that have gradients.
_REAL = ("float", "bfloat", "complex", "bcomplex")
_encode = msgspec.msgpack.Encoder().encode


class _LeafForm(IntEnum):
    """How a leaf, or a strided tensor that is a part of one, says where its elements are."""

    DISTRIBUTED = 0  # by a box of the whole
    ROW = 1  # not at all: its image says how it is laid out
    PART = 2  # not at all: it is row-major
    VIEW = 3  # by strides of its own


class _ImageForm(IntEnum):
    """The elements of an image that a record has."""

    BOX = 0  # one box, in a stream
    LAID_OUT = 1  # all elements, in an order that its strides say
    ROW_MAJOR = 2  # all elements in row-major order


# Whether a leaf of the same dtype size and shape is all that its image has. One that is not has to
# be a view of an image of bytes.
_IS_ALL = np.array(
    [  # BOX  LAID_OUT  ROW_MAJOR
        [True, True, True],  # DISTRIBUTED
        [False, True, True],  # ROW
        [False, False, True],  # PART
        [False, False, False],  # VIEW
    ]
)


def check_rows(record: Record, mode: Mode, sizes: Numbers, parts: Sequence[m.TensorLeaf]) -> None:
    """Raise `ManifestError` unless each row, and each of the `parts` of other leaves, is all of its
    image, or a view inside of one of bytes; and no image is larger than what its leaves reach.
    `sizes`: bytes of an image of each kind."""
    boxes = _check_kinds(record)
    # Parts have kinds with numbers after those of rows.
    table: Numbered[LeafKind] = Numbered()
    of_parts = table.numbers(LeafKind(p.dtype, p.shape, p.strides, p.flags) for p in parts)
    of_parts += len(record.kinds)
    all_kinds = [*record.kinds, *table.found]
    measured = np.array([_measured(kind) for kind in all_kinds], np.int64).reshape(-1, 3)
    numel, items, reach = measured.T
    forms = np.array(
        [_form(kind, n < len(record.kinds)) for n, kind in enumerate(all_kinds)], np.int64
    )
    shapes, image_shapes = shape_numbers(all_kinds, record.image_kinds)
    columns = _rows_of(record, all_kinds)
    columns.append(_stored(parts, of_parts, all_kinds, numel))
    kinds, images, offsets = map(np.concatenate, zip(*columns, strict=True))
    check_column(images, len(kinds), record.images, "images of leaves")

    of_image = record.image_kind[images]
    image_forms = np.array([_image_form(kind, mode) for kind in record.image_kinds], np.int64)
    is_all = _IS_ALL[forms[kinds], image_forms[of_image]] & (offsets == 0)
    is_all &= shapes[kinds] == image_shapes[of_image]
    ends = sizes[of_image]
    views = np.flatnonzero(~is_all)
    if len(views):
        view_kinds, view_images, starts = kinds[views], of_image[views], offsets[views]
        ends[views] = starts + reach[view_kinds]
        is_bytes = np.array([_is_bytes(kind) for kind in record.image_kinds], bool)
        inside = is_bytes[view_images] & (forms[view_kinds] != _LeafForm.DISTRIBUTED)
        inside &= (ends[views] <= sizes[view_images]) & (starts % items[view_kinds] == 0)
        if not inside.all():
            row = int(views[~inside][0])
            kind, image = all_kinds[int(kinds[row])], record.image_kinds[int(of_image[row])]
            raise ManifestError(
                f"a leaf of {kind.dtype[:40]} and shape {kind.shape[:8]} at byte {offsets[row]} of "
                f"image {images[row]}, which is {image.dtype[:40]} of shape {image.shape[:8]}"
            )
    if boxes and mode == "stream":
        sharded = forms[kinds] == _LeafForm.DISTRIBUTED
        _check_own_boxes(record, boxes, kinds[sharded], of_image[sharded])

    reached: Numbers = np.full(record.images, -1, np.int64)
    np.maximum.at(reached, images, ends)
    short = reached != sizes[record.image_kind]
    if mode != "stream":  # there an image may have no leaf: torch's planners name tensors alone
        short &= reached >= 0
    if short.any():
        number = int(np.flatnonzero(short)[0])
        most = sizes[record.image_kind[number]]
        raise ManifestError(f"image {number} has {most} bytes, its leaves reach {reached[number]}")


def _check_kinds(record: Record) -> dict[int, set[bytes]]:
    """Check the kinds of rows. Returns the encoded boxes of each ShardedTensor, by the number of
    its sharding."""
    shapes: dict[int, tuple[int, ...]] = {}
    found: dict[int, set[bytes]] = {}
    for kind in record.kinds:
        number, shape = kind.sharding, kind.shape
        if kind.flags & m.META:
            raise ManifestError("a meta tensor has no image")
        if number >= len(record.shardings):
            raise ManifestError(f"sharding {number} of {len(record.shardings)}")
        if number < 0:
            continue
        how = record.shardings[number]
        if isinstance(how, MeshSharding):
            if how.mesh >= len(record.meshes):
                raise ManifestError(f"mesh {how.mesh} of {len(record.meshes)}")
            mesh = record.meshes[how.mesh]
            check_placements(how.placements, how.coordinate, mesh, len(shape))
        elif shapes.setdefault(number, shape) != shape:
            raise ManifestError("tensors of different shapes in the same boxes")
        elif number not in found:
            check_boxes(how.boxes, shape)
            found[number] = {_encode((box.offsets, box.sizes)) for box in how.boxes}
    return found


def _measured(kind: LeafKind) -> tuple[int, int, int]:
    """Elements of a strided tensor, bytes of each, and bytes that it reaches. Refuses flags that no
    torch tensor can have: torch would fail in the middle of a landing."""
    numel, size = check_shape(kind.shape, kind.strides), itemsize(kind.dtype)
    if kind.flags & m.REQUIRES_GRAD and not kind.dtype.startswith(_REAL):
        raise ManifestError(f"a gradient of dtype {kind.dtype[:40]!r}")
    strides = contiguous_strides(kind.shape) if kind.strides is None else kind.strides
    return numel, size, min(extent(kind.shape, strides) * size, _TOO_MUCH)


def _form(kind: LeafKind, is_row: bool) -> _LeafForm:
    if kind.sharding >= 0:
        return _LeafForm.DISTRIBUTED
    if kind.strides is not None:
        return _LeafForm.VIEW
    return _LeafForm.ROW if is_row else _LeafForm.PART


def _image_form(kind: ImageKind, mode: Mode) -> _ImageForm:
    """At rest elements are row-major, whatever `strides` say."""
    if mode == "stream" and not kind.is_whole:
        return _ImageForm.BOX
    if mode == "stream" and kind.strides is not None:
        return _ImageForm.LAID_OUT
    return _ImageForm.ROW_MAJOR


def _is_bytes(kind: ImageKind) -> bool:
    """Whether an image is plain bytes: leaves may be views of it."""
    one = kind.dtype == "uint8" and len(kind.shape) == 1
    return one and kind.count < 2 and kind.offsets is None and kind.strides is None


def _rows_of(record: Record, kinds: Sequence[LeafKind]) -> list[tuple[Numbers, Numbers, Numbers]]:
    """Kinds, images and offsets of the rows of all outlines, and of those that ranks have of their
    own."""
    found = []
    more: Numbers = np.array([max(len(kind.shape) - _DIMS, 0) for kind in kinds], np.int64)
    for outline in record.outlines:
        rows, others = outline.rows, len(outline.others)
        check_column(outline.others_at, others, outline.leaves, "leaves that are not rows")
        check_ascending(outline.other_leaves.tolist(), outline.leaves, "leaves that are not rows")
        check_column(outline.kinds, rows, len(record.kinds), "kinds of rows")
        check_column(outline.offsets, rows, _TOO_MUCH, "offsets of rows")
        check_column(outline.row_images, rows, record.images, "images of rows")
        if int(more[outline.row_kinds].sum()) > MAX_MORE_DIMS:
            raise ManifestError("too many tensors of many dimensions")
        found.append((outline.row_kinds, outline.row_images, outline.row_offsets))
    for one in record.differences:
        if one.images:
            outline = record.outlines[record.ranks[one.rank]]
            at, images = np.array(one.images, np.int64).T
            found.append((outline.row_kinds[at], images, outline.row_offsets[at]))
    return found


def _stored(
    parts: Sequence[m.TensorLeaf], of_parts: Numbers, kinds: Sequence[LeafKind], numel: Numbers
) -> tuple[Numbers, Numbers, Numbers]:
    """Kinds, images and offsets of the parts of leaves that have an image: all but empty and meta
    tensors."""
    images: Numbers = np.array([part.storage for part in parts], np.int64)
    offsets: Numbers = np.array([part.offset for part in parts], np.int64)
    meta = np.array([kind.flags & m.META for kind in kinds], bool)
    stored = images >= 0
    if (stored != ((numel > 0) & ~meta)[of_parts]).any() or offsets[~stored].any():
        raise ManifestError("a tensor without its image, or an empty or meta tensor that has one")
    return of_parts[stored], images[stored], offsets[stored]


def _check_own_boxes(
    record: Record, boxes: dict[int, set[bytes]], kinds: Numbers, images: Numbers
) -> None:
    """The box of a ShardedTensor on this rank is one of its boxes on all ranks."""
    for kind, image in set(zip(kinds.tolist(), images.tolist(), strict=True)):
        number = record.kinds[kind].sharding
        box = record.image_kinds[image].boxes[0]
        if number in boxes and _encode(box) not in boxes[number]:
            raise ManifestError("a box of a ShardedTensor that no rank has")
