"""Records of streams that are made by hand, for tests of what reads them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from torchrelay.geometry.chunks import stream_bytes
from torchrelay.record import manifest as m
from torchrelay.record.schema import (
    VERSION,
    BoxSharding,
    ImageKind,
    LeafKind,
    MeshSharding,
    ObjectBytes,
    Origin,
    RankDifference,
    Record,
    StateOutline,
    VolumeRecord,
)


def stream_record(
    tree: m.Node,
    leaves: Sequence[m.Leaf] = (),
    images: Sequence[ImageKind | int] = (),
    step: int | None = 1,
    **changes: Any,
) -> Record:
    """A record of these leaves, none of them in rows, and of images: kinds, or so many bytes."""
    kinds = [one if isinstance(one, ImageKind) else ImageKind("uint8", (one,)) for one in images]
    count = len(leaves)
    record = Record(
        version=VERSION,
        step=step,
        outlines=(StateOutline(tree, count, tuple(leaves), np.arange(count) if count else None),),
        images=len(kinds),
        image_kinds=tuple(kinds),
        kind_of=np.arange(len(kinds)) if kinds else None,
    )
    return msgspec.structs.replace(with_volume(record), **changes)


def with_volume(record: Record) -> Record:
    """The record with a volume of one chunk that its images fill."""
    total = stream_bytes(record.box_bytes)
    cuts = np.array([total], np.int64) if total else None
    return msgspec.structs.replace(record, volumes=(VolumeRecord("", total, cuts=cuts),))


def whole_record() -> Record:
    """A step of three ranks at rest: two outlines, boxes in two files, and what one rank has of its
    own."""
    mesh = m.Mesh("cpu", (2,), (0, 1), None)
    boxes = tuple(m.Box((at,), (3,), f"rank:{at // 3}/cpu") for at in (0, 3))
    first = StateOutline(
        m.DictNode(
            "dict", ("w", "s", "views", "n", "rng"), (0, 1, m.SequenceNode("list", (2, 3)), 4, 5)
        ),
        6,
        (m.ValueLeaf("plain", 7), m.ArrayLeaf('"<i4"', (2,), False, 4, 8)),
        np.array([4, 5]),
        np.array([0, 1, 2, 3]),
        np.array([0, 1, 2, 2]),
        np.array([0, 0, 0, 8]),
    )
    second = StateOutline(
        m.DictNode("dict", ("w", "t"), (0, 1)), 2, (), None, np.array([0, 4]), np.array([0, 3])
    )
    kinds = (
        LeafKind("float32", (4, 2), None, m.PARAMETER, 0),
        LeafKind("float64", (6,), None, 0, 1),
        LeafKind("float32", (4,), None),
        LeafKind("int16", (2, 2), (1, 2)),
        LeafKind("bfloat16", (3, 2), None),
    )
    image_kinds = (
        ImageKind("float32", (4, 2), None, 2, np.array([0, 0, 2, 0]), np.array([2, 2, 2, 2])),
        ImageKind("float64", (6,), None, 3, np.array([0, 3, 5]), np.array([3, 2, 1])),
        ImageKind("uint8", (16,)),
        ImageKind("bfloat16", (3, 2), (1, 3)),
        ImageKind("uint8", (8,)),
    )
    return Record(
        version=VERSION,
        step=7,
        outlines=(first, second),
        kinds=kinds,
        images=6,
        image_kinds=image_kinds,
        kind_of=np.array([0, 1, 2, 3, 4, 4]),
        volumes=(
            VolumeRecord("model.safetensors", 200, 64, None, bytes(range(64))),
            VolumeRecord("rank-1.safetensors", 100, 128, None, bytes(16)),
        ),
        volume_of=np.array([0, 1, 0, 0, 1, 0, 0, 0, 1]),
        starts=np.array([8, 16, 24, 48, 32, 64, 80, 96, 40]),
        meshes=(mesh,),
        shardings=(MeshSharding(0, (m.Placement("shard", 0),)), BoxSharding(boxes)),
        ranks=(0, 0, 1),
        differences=(
            RankDifference(
                1, ((4, m.ValueLeaf("plain", 9)), (5, m.ArrayLeaf('"<i4"', (2,), False, 5, 8)))
            ),
        ),
        names=((5, "rng@rank-1"),),
        objects=(ObjectBytes("extra", "state", 0, 120, 30),),
        origin=Origin("2026-11-17T00:00:00Z", "2.13", "0.1"),
    )


def rank_record(
    boxes: Sequence[tuple[tuple[int, ...], tuple[int, ...]]],
    shape: tuple[int, ...] = (4, 4),
    dtype: str = "float32",
    step: int | None = None,
) -> Record:
    """A live rank that has these boxes of one ShardedTensor, under the key `w`."""
    all_boxes = tuple(m.Box(*box, None) for box in boxes)
    parts = tuple(m.TensorLeaf(dtype, box[1], None, at) for at, box in enumerate(boxes))
    leaf = m.ShardedLeaf(parts, all_boxes, all_boxes, shape, dtype)
    images = [ImageKind(dtype, box[1]) for box in boxes]
    return stream_record(m.DictNode("dict", ("w",), (0,)), [leaf], images, step)
