"""The record of a state: everything about it but its bytes, in columns.

One schema describes three things:

- a *stream*: the state of one live rank, whose memory is the only volume;
- a *part*: what one rank reports of a step that several ranks save: its outline, without any box,
  or the boxes that it has written, by the names of their images, without an outline;
- the *whole*: a state at rest, with every element of every tensor once.

The bytes of a state are *images*: an image is one tensor, or the memory that several different
views share. An image is cut into *boxes*, and each box lies in a *volume*. Leaves that are tensors
are rows of columns: each row has a kind, an image and an offset in it. All other leaves are records
of their own. The encoded record is a contract: docs/wire-format.md and docs/checkpoint-format.md
describe it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from math import prod
from typing import Annotated, Any, cast

import msgspec
import numpy as np

from torchrelay.errors import ManifestError
from torchrelay.geometry.boxes import Box as Bounds
from torchrelay.geometry.boxes import Numbers
from torchrelay.geometry.chunks import ALIGN
from torchrelay.geometry.numbered import Numbered
from torchrelay.record.dtypes import itemsize
from torchrelay.record.manifest import (
    Box,
    Flags,
    Leaf,
    Mesh,
    Node,
    Number,
    Placement,
    Shape,
    Size,
)
from torchrelay.steps import MAX_STEP
from torchrelay.tables import html_table

VERSION = (4, 0)
_FEW = 32  # boxes that are looked at one by one
MAX_DEVICES = 64
DeviceType = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z_][A-Za-z0-9_]*\Z")]
ON_HOST = ("cpu",)  # the devices of a state that lies in host memory alone

# Whole numbers from 0 on. None stands for the value that the field's comment names.
Column = Numbers | None


class _RowRecord(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Small records are arrays: the order of fields is part of the format."""


class LeafKind(_RowRecord, frozen=True):
    """The common properties of tensor leaves, without their location.

    `strides`, in elements, are those of a view of an image of bytes; None is row-major. `shape` and
    `strides` of a distributed tensor are those of the whole. `sharding`: -1 if it is not one.
    """

    dtype: str
    shape: Shape
    strides: Shape | None = None
    flags: Flags = 0
    sharding: Number = -1


class MeshSharding(_RowRecord, tag="m", frozen=True):
    """How a DTensor is distributed. `coordinate`: of the live rank that describes its part."""

    mesh: Size
    placements: tuple[Placement, ...]
    coordinate: tuple[int, ...] | None = None


class BoxSharding(_RowRecord, tag="b", frozen=True):
    """How a ShardedTensor is distributed: its boxes on all ranks, or those of a `checkpointable`
    tensor on the live rank that describes it."""

    boxes: tuple[Box, ...]
    pinned: bool = False
    checkpointable: bool = False


Sharding = MeshSharding | BoxSharding


class ImageKind(msgspec.Struct, array_like=True, frozen=True, dict=True):
    """The common properties of images: dtype, shape, and the `count` boxes they are cut into.

    `offsets` and `sizes` have a number for each dimension of each box; both are None where the one
    box is all of the image. `strides` is the layout in memory, where it is not row-major: of the
    box, if there is one, else of the whole. In a stream the bytes lie so; elements of boxes in
    files are row-major, and the strides are those of a tensor that is made of them.
    """

    dtype: str
    shape: Shape
    strides: Shape | None = None
    count: Size = 1
    offsets: Column = None
    sizes: Column = None

    @classmethod
    def of_boxes(
        cls,
        dtype: str,
        shape: tuple[int, ...],
        boxes: Sequence[Bounds],
        strides: tuple[int, ...] | None = None,
    ) -> ImageKind:
        if len(boxes) == 1 and boxes[0] == ((0,) * len(shape), shape):
            return cls(dtype, shape, strides)
        columns = (np.array([box[n] for box in boxes], np.int64).reshape(-1) for n in (0, 1))
        return cls(dtype, shape, strides, len(boxes), *columns)

    @property
    def without_boxes(self) -> ImageKind:
        """The same dtype, shape and layout, and no box."""
        return ImageKind(self.dtype, self.shape, self.strides, 0)

    @property
    def is_whole(self) -> bool:
        """Whether its one box is all of the image."""
        return self.count == 1 and self.offsets is None and self.sizes is None

    @cached_property
    def columns(self) -> tuple[Numbers, Numbers]:
        """Offsets and sizes, a row for each box."""
        dims = len(self.shape)
        if self.offsets is None or self.sizes is None:
            whole = np.array(self.shape, np.int64).reshape(1, dims)[: self.count]
            return np.zeros_like(whole), whole
        return self.offsets.reshape(self.count, dims), self.sizes.reshape(self.count, dims)

    @cached_property
    def boxes(self) -> list[Bounds]:
        rows = (map(tuple, column.tolist()) for column in self.columns)
        return list(zip(*rows, strict=True))

    @cached_property
    def nbytes(self) -> Numbers:
        """Bytes of each box."""
        if self.is_whole:
            return np.array([prod(self.shape) * itemsize(self.dtype)], np.int64)
        found: Numbers = self.columns[1].prod(1) * itemsize(self.dtype)
        return found

    def candidates(self, box: Bounds) -> Sequence[int]:
        """The boxes that may have elements of this one, which a destination wants: where there are
        many, most have none."""
        if self.count <= _FEW:
            return range(self.count)
        offsets, sizes = self.columns
        first, last = np.array(box[0], np.int64), np.array(box, np.int64).sum(0)
        meet = ((offsets < last) & (offsets + sizes > first)).all(1)
        found: list[int] = np.flatnonzero(meet).tolist()
        return found


class _MapRecord(msgspec.Struct, frozen=True, omit_defaults=True, dict=True):
    """Large records are maps: fields by name, those with their default left out."""


class StateOutline(_MapRecord, frozen=True):
    """The tree of a rank's state and its leaves: `others` as records, the rest as rows."""

    tree: Node
    leaves: Size
    others: tuple[Leaf, ...] = ()
    others_at: Column = None  # the leaf that each of the others is; None: 0
    kinds: Column = None  # of each row; None: the first
    images: Column = None  # of each row; None: row n is of image n. Tied leaves have one image
    offsets: Column = None  # of each row, bytes in its image; None: 0

    @property
    def rows(self) -> int:
        return self.leaves - len(self.others)

    @cached_property
    def row_leaves(self) -> Numbers:
        """The leaf that each row is."""
        return np.delete(np.arange(self.leaves), self.other_leaves)

    @property
    def other_leaves(self) -> Numbers:
        return zeros_or(self.others_at, len(self.others))

    @cached_property
    def row_kinds(self) -> Numbers:
        return zeros_or(self.kinds, self.rows)

    @cached_property
    def row_images(self) -> Numbers:
        return np.arange(self.rows) if self.images is None else self.images

    @cached_property
    def row_offsets(self) -> Numbers:
        return zeros_or(self.offsets, self.rows)


class RankDifference(_RowRecord, frozen=True):
    """Where a rank differs from the outline that it shares: other leaves, and other images of rows,
    by their numbers in ascending order."""

    rank: Size
    leaves: tuple[tuple[Size, Leaf], ...] = ()
    images: tuple[tuple[Size, Size], ...] = ()


class VolumeRecord(_RowRecord, frozen=True):
    """A run of bytes: a file, or the stream of a live rank, which has no name.

    Chunks have `chunk_bytes` each, but for the last, or the bytes in `cuts`. `digests` has the
    XXH3-128 of each chunk, one after the other, if they are known.
    """

    name: str
    nbytes: Size
    chunk_bytes: Size = 0
    cuts: Column = None
    digests: bytes = b""

    @property
    def chunks(self) -> int:
        if self.cuts is not None:
            return len(self.cuts)
        return -(-self.nbytes // self.chunk_bytes) if self.chunk_bytes > 0 else 0


class ObjectBytes(_RowRecord, frozen=True):
    """Bytes of an object that a planner of torch's gave: `kind` says how to read them back."""

    name: str
    kind: Annotated[str, msgspec.Meta(pattern=r"^(state|raw)\Z")]
    volume: Size
    start: Size
    nbytes: Size


class ReplicaMark(_RowRecord, frozen=True):
    """Replicas that should be equal differed when the step was saved: the number of tensors, and
    the first of them with the ranks in the minority."""

    tensors: Size
    first: tuple[tuple[str, tuple[Size, ...]], ...]

    def __str__(self) -> str:
        shown = [
            f"{path} on rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
            for path, ranks in self.first[:2]
        ]
        more = [f"{self.tensors - len(shown)} more"] if self.tensors > len(shown) else []
        return f"replicas differ: {'; '.join([*shown, *more])}"


class Origin(_MapRecord, frozen=True):
    """The program and time (UTC, as 2026-01-02T03:04:05Z) of a save. `save_id`: the name that a
    writer of torch's DCP gave it. `metrics`: numbers that the caller passed, finite ones. `reused`:
    bytes that were taken from another step, because they were the same; `since_full`: saves since
    the last that took none. `replicas`: the mark of a step that a restart takes last."""

    time: str
    torch: str
    torchrelay: str
    save_id: str | None = None
    metrics: dict[str, float] = {}
    reused: Size = 0
    since_full: Size = 0
    replicas: ReplicaMark | None = None


class Record(_MapRecord, frozen=True, kw_only=True):
    """A recorded state. `ranks` has the outline of each rank that has a part of it."""

    version: tuple[Size, Size]
    step: Annotated[int, msgspec.Meta(ge=0, le=MAX_STEP)] | None = None
    outlines: tuple[StateOutline, ...]
    kinds: tuple[LeafKind, ...] = ()
    images: Size = 0
    image_kinds: tuple[ImageKind, ...] = ()
    kind_of: Column = None  # of each image; None: the first
    volumes: tuple[VolumeRecord, ...] = ()
    volume_of: Column = None  # of each box; None: the first
    starts: Column = None  # of each box; None: one after the other, at multiples of ALIGN
    devices: Annotated[tuple[DeviceType, ...], msgspec.Meta(max_length=MAX_DEVICES)] = ON_HOST
    device_of: Column = None  # of each image; None: the first
    storage_of: Column = None  # of each image; None: each has a storage of its own
    meshes: tuple[Mesh, ...] = ()
    shardings: tuple[Sharding, ...] = ()
    ranks: tuple[int, ...] = (0,)
    differences: tuple[RankDifference, ...] = ()
    names: tuple[tuple[Size, str], ...] = ()  # images that are not named by their first path
    objects: tuple[ObjectBytes, ...] = ()
    origin: Origin | None = None

    @cached_property
    def difference_of(self) -> dict[int, RankDifference]:
        """The differences by rank."""
        return {one.rank: one for one in self.differences}

    @cached_property
    def image_kind(self) -> Numbers:
        """The kind of each image."""
        return zeros_or(self.kind_of, self.images)

    def kind_of_image(self, image: int) -> ImageKind:
        return self.image_kinds[int(self.image_kind[image])]

    @cached_property
    def box_counts(self) -> Numbers:
        """The boxes of each kind of image."""
        return np.array([kind.count for kind in self.image_kinds], np.int64)

    @cached_property
    def first_boxes(self) -> Numbers:
        """The first box of each image; and the number of all boxes."""
        return np.concatenate([[0], np.cumsum(self.box_counts[self.image_kind])])

    @property
    def boxes(self) -> int:
        return int(self.first_boxes[-1])

    @cached_property
    def box_bytes(self) -> Numbers:
        if not self.images:
            return np.zeros(0, np.int64)
        nbytes = np.concatenate([kind.nbytes for kind in self.image_kinds])
        begins = np.cumsum(self.box_counts) - self.box_counts
        found: Numbers = nbytes[runs(begins[self.image_kind], self.box_counts[self.image_kind])]
        return found

    @cached_property
    def box_starts(self) -> Numbers:
        if self.starts is not None:
            return self.starts
        rooms = (self.box_bytes + (ALIGN - 1)) & -ALIGN
        found: Numbers = np.cumsum(rooms) - rooms
        return found

    @cached_property
    def box_volumes(self) -> Numbers:
        return zeros_or(self.volume_of, self.boxes)

    @cached_property
    def image_devices(self) -> Numbers:
        """The device of each image, by its number in `devices`."""
        return zeros_or(self.device_of, self.images)

    @property
    def used_devices(self) -> set[str]:
        """The kinds of devices that images come from."""
        used = np.flatnonzero(np.bincount(self.image_devices)) if self.images else ()
        return {self.devices[n] for n in used}

    def _repr_html_(self) -> str:
        """For notebooks: who wrote the step when, and its files."""
        made = f", {self.origin.time}, torch {self.origin.torch}" if self.origin else ""
        nbytes = sum(volume.nbytes for volume in self.volumes)
        of = f" of {len(self.ranks)} ranks" if len(self.ranks) > 1 else ""
        caption = f"step {self.step}: {nbytes} bytes{of}{made}"
        files = [(volume.name, volume.nbytes, volume.chunks) for volume in self.volumes]
        return html_table(caption, ("file", "bytes", "chunks"), files)

    @property
    def nbytes(self) -> int:
        """Bytes of all boxes, without padding."""
        return int(self.box_bytes.sum())

    @property
    def volume_bytes(self) -> int:
        return sum(volume.nbytes for volume in self.volumes)

    @property
    def saved(self) -> Origin:
        """The origin of a step at rest, which always has one."""
        assert self.origin is not None
        return self.origin

    @property
    def mark(self) -> ReplicaMark | None:
        """The mark of a step whose replicas differ."""
        return None if self.origin is None else self.origin.replicas

    @property
    def planned(self) -> bool:
        """Whether a planner of torch's described the containers, as it does to the DCP writer: it
        takes tuples of tensors for lists, and drops empty containers."""
        return self.origin is not None and self.origin.save_id is not None


def shape_numbers(
    leaves: Sequence[LeafKind], images: Sequence[ImageKind]
) -> tuple[Numbers, Numbers]:
    """A number for the item size and shape of each kind: equal where those are."""
    known: Numbered[tuple[int, Shape]] = Numbered()
    kinds: list[LeafKind | ImageKind] = [*leaves, *images]
    found = known.numbers((itemsize(kind.dtype), kind.shape) for kind in kinds)
    return found[: len(leaves)], found[len(leaves) :]


def runs(begins: Numbers, counts: Numbers) -> Numbers:
    """The numbers in runs of them, one run after the other."""
    if (counts == 1).all():
        return begins
    before = np.cumsum(counts) - counts
    found: Numbers = np.arange(counts.sum()) + np.repeat(begins - before, counts)
    return found


def zeros_or(column: Column, count: int) -> Numbers:
    return np.zeros(count, np.int64) if column is None else column


def column_of(numbers: Numbers) -> Column:
    """A column; None where all numbers are 0."""
    return numbers if numbers.any() else None


def pack_column(numbers: Numbers) -> bytes:
    """Numbers from 0 on as bytes: one byte with the width of a number, the narrowest that all of
    them fit into, then the numbers, little-endian."""
    least, most = (int(numbers.min()), int(numbers.max())) if numbers.size else (0, 0)
    if least < 0:
        raise ManifestError(f"{least} in a column of numbers from 0 on")
    width = np.min_scalar_type(most).itemsize
    return bytes([width]) + numbers.reshape(-1).astype(f"<u{width}").tobytes()


def unpack_column(data: bytes) -> Numbers:
    """Undo `pack_column`; `ValueError` for other bytes, and for numbers past 63 bits."""
    width = data[0] if data else 0
    if width not in (1, 2, 4, 8) or (len(data) - 1) % width:
        raise ValueError(f"a column of {len(data)} bytes")
    column: Any = np.frombuffer(data, f"<u{width}", offset=1).astype(np.int64)
    if width == 8 and len(column) and int(column.min()) < 0:
        raise ValueError("a number past 63 bits")
    return cast("Numbers", column)
