"""Records that are refused, one reason at a time, in each of the three modes."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from msgspec.structs import replace

from tests.support.hostile import probing_keys
from tests.support.records import stream_record, whole_record, with_volume
from torchrelay.describing.outline import laid_over
from torchrelay.describing.snapshot import capture
from torchrelay.errors import ManifestError, UnsupportedLeafError
from torchrelay.record import manifest as m
from torchrelay.record.checks.images import Mode
from torchrelay.record.checks.record import check
from torchrelay.record.encoding import decode, encode
from torchrelay.record.keys import check_keys
from torchrelay.record.schema import (
    VERSION,
    BoxSharding,
    ImageKind,
    LeafKind,
    MeshSharding,
    ObjectBytes,
    RankDifference,
    Record,
    StateOutline,
    VolumeRecord,
)
from torchrelay.record.values import Key, TupleKey, encode_key
from torchrelay.steps import MAX_STEP


def refused(record: Record, mode: Mode = "stream") -> None:
    data = encode(record)
    with pytest.raises(ManifestError):
        decode(data, mode)


# A leaf that is no row.

LEAF = m.TensorLeaf("float32", (4,), None, 0)
ARRAY = m.ArrayLeaf('"<f4"', (4,), False, 0, 16)
HUGE = (1 << 63) - 1


@pytest.mark.parametrize(
    "leaf",
    [
        replace(LEAF, dtype="float33"),
        replace(LEAF, dtype="int64"),
        replace(LEAF, dtype="int32", shape=(2,)),
        replace(LEAF, shape=(5,)),
        replace(LEAF, shape=(3,)),
        replace(LEAF, shape=(2, 2)),
        replace(LEAF, shape=(0,)),
        replace(LEAF, shape=(-4,)),
        replace(LEAF, shape=(1 << 61,)),
        replace(LEAF, shape=(1 << 63,)),
        replace(LEAF, shape=(1 << 40, 1 << 40)),
        replace(LEAF, shape=(2,) * 65),
        replace(LEAF, strides=(1,)),
        replace(LEAF, strides=(1, 1)),
        replace(LEAF, strides=(-1,)),
        replace(LEAF, strides=(1 << 62,)),
        replace(LEAF, strides=(2,)),
        replace(LEAF, storage=1),
        replace(LEAF, storage=-1),
        replace(LEAF, storage=-2),
        replace(LEAF, storage=(1 << 64) - 1),
        replace(LEAF, offset=2),
        replace(LEAF, offset=-4),
        replace(LEAF, offset=4),
        replace(LEAF, offset=HUGE),
        replace(LEAF, offset=HUGE - 15),
        replace(LEAF, flags=m.META),
        m.TensorLeaf("complex128", (2, 2), (1 << 61, 1 << 61), 0),
        replace(ARRAY, descr='"O"'),
        replace(ARRAY, descr="["),
        replace(ARRAY, shape=(5,)),
        replace(ARRAY, shape=(1 << 40,), nbytes=0, storage=-1),
        replace(ARRAY, nbytes=0, storage=-1),
        replace(ARRAY, nbytes=-16),
        replace(ARRAY, scalar=True),
    ],
    ids=str,
)
@pytest.mark.parametrize("image", [ImageKind("float32", (4,)), ImageKind("uint8", (16,))], ids=str)
def test_a_leaf_that_does_not_fit_its_image(leaf: m.Leaf, image: ImageKind) -> None:
    """All of it and nothing else, or a view of bytes that reaches to their end."""
    check(stream_record(0, [LEAF], [image]), "stream")
    if image.dtype == "uint8":
        check(stream_record(0, [ARRAY], [image]), "stream")
        check(stream_record(0, [replace(LEAF, shape=(2, 2))], [image]), "stream")
        if leaf in (replace(LEAF, shape=(2, 2)), replace(LEAF, strides=(1,))):
            return
    refused(stream_record(0, [leaf], [image]))


def test_a_leaf_is_no_part_of_an_image_in_another_layout() -> None:
    turned = ImageKind("float32", (2, 3), (1, 2))
    kinds = (LeafKind("float32", (2, 3)),)
    row = Record(
        version=VERSION,
        outlines=(StateOutline(0, 1),),
        kinds=kinds,
        images=1,
        image_kinds=(turned,),
    )
    check(with_volume(row), "stream")
    for leaf in (m.TensorLeaf("float32", (2, 3), None, 0), m.TensorLeaf("float32", (6,), None, 0)):
        refused(stream_record(0, [leaf], [turned]))
    for kind in (LeafKind("float32", (6,)), LeafKind("float32", (2, 3), (1, 2))):
        refused(with_volume(replace(row, kinds=(kind,))))


# Rows, images and the stream.


def _record(**changes: Any) -> Record:
    record = capture({"a": torch.zeros(4), "b": [1, torch.zeros(3)[::2]]}, step=1).record
    return replace(record, **changes)


def _outline(**changes: Any) -> Record:
    record = _record()
    return replace(record, outlines=(replace(record.outlines[0], **changes),))


def _volume(**changes: Any) -> Record:
    record = _record()
    return replace(record, volumes=(replace(record.volumes[0], **changes),))


def _column(*numbers: int) -> Any:
    return np.array(numbers, np.int64)


def _tree(node: m.Node) -> Record:
    return _outline(tree=node)


STREAMS: dict[str, Callable[[], Record]] = {
    "a step below 0": lambda: _record(step=-1),
    "a step too large": lambda: _record(step=MAX_STEP + 1),
    "no outline": lambda: _record(outlines=()),
    "two outlines": lambda: _record(outlines=_record().outlines * 2),
    "no volume": lambda: _record(volumes=()),
    "a rank": lambda: _record(ranks=(0, 0)),
    "a rank's own": lambda: _record(differences=(RankDifference(0),)),
    "places of boxes": lambda: _record(starts=_column(0, 16)),
    "volumes of boxes": lambda: _record(volume_of=_column(0, 0)),
    "names": lambda: _record(names=((0, "a"),)),
    "objects": lambda: _record(objects=(ObjectBytes("x", "raw", 0, 0, 1),)),
    "fewer leaves": lambda: _outline(leaves=2),
    "more leaves": lambda: _outline(leaves=4),
    "fewer leaves than no rows": lambda: _outline(leaves=0),
    "another tree": lambda: _tree(7),
    "a leaf that is no row twice": lambda: _outline(others=(m.SizeLeaf(()),) * 2),
    "a leaf that is no row out of range": lambda: _outline(others_at=_column(3)),
    "leaves out of order": lambda: _outline(
        others=(m.SizeLeaf(()), m.SizeLeaf(())), others_at=_column(1, 0)
    ),
    "a kind out of range": lambda: _outline(kinds=_column(0, 2)),
    "too few kinds": lambda: _outline(kinds=_column(0)),
    "an image out of range": lambda: _outline(images=_column(0, 2)),
    "an image that no leaf has": lambda: _outline(images=_column(0, 0), kinds=_column(0, 0)),
    "an offset": lambda: _outline(offsets=_column(0, 4)),
    "too many offsets": lambda: _outline(offsets=_column(0, 0, 0)),
    "no kinds": lambda: _record(kinds=()),
    "no images": lambda: _record(images=0, kind_of=None),
    "an image more": lambda: _record(images=3, kind_of=_column(0, 1, 1)),
    "fewer kinds of images": lambda: _record(image_kinds=_record().image_kinds[:1]),
    "too many kinds of images": lambda: _record(kind_of=_column(0, 1, 1)),
    "an image of another kind": lambda: _record(kind_of=_column(1, 0)),
    "storages out of order": lambda: _record(storage_of=_column(1, 0)),
    "storages that begin late": lambda: _record(storage_of=_column(1, 2)),
    "too few storages": lambda: _record(storage_of=_column(0)),
    "no devices": lambda: _record(devices=()),
    "a device with a number": lambda: _record(devices=("cuda:0",)),
    "a device type with a line end": lambda: _record(devices=("cpu\n",)),
    "a device out of range": lambda: _record(device_of=_column(0, 1)),
    "very many devices": lambda: _record(devices=("cpu",) * 65),
    "a sharding out of range": lambda: _record(kinds=(LeafKind("float32", (4,), sharding=0),) * 2),
    "a volume that is larger": lambda: _volume(nbytes=48),
    "no chunks": lambda: _volume(cuts=None),
    "too many chunks": lambda: _volume(cuts=_column(16, 16, 16)),
    "a chunk of odd size": lambda: _volume(cuts=_column(8, 24)),
    "a chunk of nothing": lambda: _volume(cuts=_column(32, 0)),
    "chunks of one size": lambda: _volume(chunk_bytes=16),
    "digests": lambda: _volume(digests=bytes(16)),
    "a name": lambda: _volume(name="x"),
    "a key twice": lambda: _tree(
        m.DictNode("dict", ("a", "a"), (0, m.SequenceNode("list", (1, 2))))
    ),
    "a key too few": lambda: _tree(m.DictNode("dict", ("a",), (0, m.SequenceNode("list", (1, 2))))),
    "an unknown container": lambda: _tree(
        m.DictNode("Counter", ("a", "b"), (0, m.SequenceNode("list", (1, 2))))
    ),
    "a dict with a factory": lambda: _tree(
        m.DictNode("dict", ("a", "b"), (0, m.SequenceNode("list", (1, 2))), "list")
    ),
    "an unknown factory": lambda: _tree(
        m.DictNode("defaultdict", ("a", "b"), (0, m.SequenceNode("list", (1, 2))), "eval")
    ),
    "a set": lambda: _tree(m.SequenceNode("set", (0, 1, 2))),
    "leaves not in order": lambda: _tree(m.SequenceNode("list", (0, 2, 1))),
    "a leaf that is nowhere": lambda: _tree(m.SequenceNode("list", (0, 1))),
    "too few fields": lambda: _tree(m.NamedTupleNode("T", ("a", "b"), (0, 1, 2))),
    "a field twice": lambda: _tree(m.NamedTupleNode("T", ("a", "a", "b"), (0, 1, 2))),
    "a field that is no name": lambda: _tree(m.NamedTupleNode("T", ("a", "b", "c d"), (0, 1, 2))),
    "a keyword": lambda: _tree(m.NamedTupleNode("T", ("a", "b", "class"), (0, 1, 2))),
    "a private field": lambda: _tree(m.NamedTupleNode("T", ("a", "b", "__new__"), (0, 1, 2))),
    "a class that is a keyword": lambda: _tree(
        m.NamedTupleNode("import", ("a", "b", "c"), (0, 1, 2))
    ),
}


@pytest.mark.parametrize("make", STREAMS.values(), ids=STREAMS)
def test_streams_that_are_refused(make: Callable[[], Record]) -> None:
    check(_record(), "stream")
    refused(make())


IMAGES = [
    ImageKind("float33", (4,)),
    ImageKind("float32", (-1,)),
    ImageKind("float32", (1 << 62,)),
    ImageKind("float32", (1 << 63,)),
    ImageKind("float32", (1 << 40, 1 << 40)),
    ImageKind("float32", (1,) * 65),
    ImageKind("float32", (4,), (2,)),
    ImageKind("float32", (4,), (1, 1)),
    ImageKind("float32", (4,), (0,)),
    ImageKind("float32", (4,), (-1,)),
    ImageKind("float32", (2, 2), (1, 1)),
    ImageKind("float32", (4,), None, 0),
    ImageKind("float32", (4,), None, 2),
    ImageKind("float32", (4,), None, -1),
    ImageKind("float32", (4,), None, 1, _column(0)),
    ImageKind("float32", (4,), None, 1, None, _column(4)),
    ImageKind("float32", (4,), None, 1, _column(0, 0), _column(4, 1)),
    ImageKind("float32", (4,), None, 1, _column(1), _column(4)),
    ImageKind("float32", (4,), None, 1, _column(HUGE), _column(4)),
    ImageKind("float32", (4,), None, 1, _column(0), _column(HUGE)),
    ImageKind("float32", (4,), None, 2, _column(0, 2), _column(2, 2)),
    ImageKind("float32", (), None, 1, _column(), _column()),
]


@pytest.mark.parametrize("image", IMAGES, ids=str)
def test_images_that_are_refused_in_a_stream(image: ImageKind) -> None:
    record = _record()
    refused(replace(record, image_kinds=(image, *record.image_kinds[1:])))


# Distributed tensors.


def _sharded(**changes: Any) -> Record:
    record = Record(
        version=VERSION,
        outlines=(StateOutline(m.SequenceNode("list", (0, 1)), 2, kinds=_column(0, 1)),),
        kinds=(LeafKind("float32", (4, 4), sharding=0), LeafKind("float32", (6,), sharding=1)),
        images=2,
        image_kinds=(
            ImageKind("float32", (4, 4), None, 1, _column(2, 0), _column(2, 4)),
            ImageKind("float32", (6,), None, 1, _column(3), _column(3)),
        ),
        kind_of=_column(0, 1),
        meshes=(m.Mesh("cpu", (2,), (0, 1), None),),
        shardings=(
            MeshSharding(0, (m.Placement("shard", 0),), (1,)),
            BoxSharding((m.Box((0,), (3,), None), m.Box((3,), (3,), None))),
        ),
    )
    return replace(with_volume(record), **changes)


def _how(how: Any) -> dict[str, Any]:
    return {"shardings": (how, _sharded().shardings[1])}


SHARDED: dict[str, dict[str, Any]] = {
    "no shardings": {"shardings": ()},
    "no mesh": {"meshes": ()},
    "a mesh of other ranks": {"meshes": (m.Mesh("cpu", (2,), (0, 0), None),)},
    "a rank below 0": {"meshes": (m.Mesh("cpu", (2,), (-1, 1), None),)},
    "a first rank below 0": {"meshes": (m.Mesh("cpu", (2,), (-1,), None, (1,)),)},
    "strides below 0": {"meshes": (m.Mesh("cpu", (2,), (1,), None, (-1,)),)},
    "a mesh with other names": {"meshes": (m.Mesh("cpu", (2,), (0, 1), ("a", "b")),)},
    "too many placements": _how(MeshSharding(0, (m.Placement("replicate"),) * 2)),
    "a placement on no dimension": _how(MeshSharding(0, (m.Placement("shard", 2),))),
    "an unknown placement": _how(MeshSharding(0, (m.Placement("eval"),))),
    "a coordinate of two": _how(MeshSharding(0, (m.Placement("shard", 0),), (0, 1))),
    "a box that no rank has": {
        "shardings": (_sharded().shardings[0], BoxSharding((m.Box((0,), (6,), None),)))
    },
    "a box out of its tensor": {
        "shardings": (
            _sharded().shardings[0],
            BoxSharding((m.Box((3,), (3,), None), m.Box((3,), (4,), None))),
        )
    },
    "another shape": {"kinds": (LeafKind("float32", (4, 3), sharding=0), _sharded().kinds[1])},
    "another dtype": {"kinds": (LeafKind("float64", (4, 4), sharding=0), _sharded().kinds[1])},
    "strides of one dimension": {
        "kinds": (LeafKind("float32", (4, 4), (1,), sharding=0), _sharded().kinds[1])
    },
    "a box for a plain leaf": {"kinds": (LeafKind("float32", (4, 4)), _sharded().kinds[1])},
}


@pytest.mark.parametrize("changes", SHARDED.values(), ids=SHARDED)
def test_distributed_tensors_that_are_refused(changes: dict[str, Any]) -> None:
    check(_sharded(), "stream")
    refused(_sharded(**changes))


# At rest.


def _whole(**changes: Any) -> Record:
    return replace(whole_record(), **changes)


def _file(**changes: Any) -> Record:
    first, second = whole_record().volumes
    return _whole(volumes=(replace(first, **changes), second))


def _boxes(*boxes: tuple[tuple[int, ...], tuple[int, ...]]) -> Record:
    """The first image, cut otherwise; with places for as many boxes."""
    kinds = whole_record().image_kinds
    kind = ImageKind.of_boxes("float32", (4, 2), boxes)
    more = kind.count - 2
    starts = [8, 16, *[8] * more] if more >= 0 else [8] * kind.count
    rest = whole_record().box_starts.tolist()[2:]
    return _whole(image_kinds=(kind, *kinds[1:]), starts=_column(*starts, *rest), volume_of=None)


HALVES = (((0, 0), (2, 2)), ((2, 0), (2, 2)))

WHOLES: dict[str, Callable[[], Record]] = {
    "boxes that overlap": lambda: _boxes(((0, 0), (3, 2)), ((2, 0), (2, 2))),
    "boxes with a hole": lambda: _boxes(((0, 0), (1, 2)), ((2, 0), (2, 2))),
    "a box that is not in its file": lambda: _whole(
        starts=_column(8, 16, 24, 48, 32, 64, 80, 96, 96)
    ),
    "a box at an odd byte": lambda: _whole(starts=_column(9, 16, 24, 48, 32, 64, 80, 96, 40)),
    "too few places": lambda: _whole(starts=_column(8, 16, 24)),
    "no places": lambda: _whole(starts=None),
    "a volume out of range": lambda: _whole(volume_of=_column(0, 1, 0, 0, 2, 0, 0, 0, 1)),
    "storages": lambda: _whole(storage_of=_column(0, 1, 2, 3, 4, 5)),
    "a name that is a path": lambda: _file(name="../x"),
    "a name twice": lambda: _file(name="rank-1.safetensors"),
    "a file of nothing": lambda: _file(nbytes=0),
    "no chunk size": lambda: _file(chunk_bytes=0),
    "chunks that cut elements": lambda: _file(chunk_bytes=63, digests=bytes(64)),
    "uneven chunks": lambda: _file(cuts=_column(100, 100)),
    "too few digests": lambda: _file(digests=bytes(48)),
    "no ranks": lambda: _whole(ranks=()),
    "a rank of no outline": lambda: _whole(ranks=(0, 0, 2)),
    "a leaf of another shape": lambda: _whole(
        kinds=(*whole_record().kinds[:4], LeafKind("bfloat16", (2, 2)))
    ),
    "a leaf of more bytes": lambda: _whole(
        kinds=(*whole_record().kinds[:4], LeafKind("bfloat16", (3, 3)))
    ),
    "a view past its bytes": lambda: _whole(
        kinds=(
            *whole_record().kinds[:3],
            LeafKind("int16", (2, 3), (1, 2)),
            whole_record().kinds[4],
        )
    ),
    "ranks out of order": lambda: _whole(differences=(RankDifference(1), RankDifference(0))),
    "a rank that is none": lambda: _whole(differences=(RankDifference(3),)),
    "an own leaf out of range": lambda: _whole(
        differences=(RankDifference(1, ((6, m.SizeLeaf(())),)),)
    ),
    "own leaves out of order": lambda: _whole(
        differences=(RankDifference(1, ((4, m.SizeLeaf(())), (3, m.SizeLeaf(())))),)
    ),
    "an own leaf that does not fit": lambda: _whole(
        differences=(RankDifference(1, ((5, m.ArrayLeaf('"<i4"', (3,), False, 5, 12)),)),)
    ),
    "an own image that does not fit": lambda: _whole(
        differences=(RankDifference(1, (), ((0, 2),)),)
    ),
    "an own image out of range": lambda: _whole(differences=(RankDifference(1, (), ((0, 6),)),)),
    "an own row out of range": lambda: _whole(differences=(RankDifference(1, (), ((4, 0),)),)),
    "a name for no image": lambda: _whole(names=((6, "x"),)),
    "one name for two": lambda: _whole(names=((1, "x"), (2, "x"))),
    "an unknown object": lambda: _whole(objects=(ObjectBytes("x", "code", 0, 0, 1),)),
    "an unknown object at the end of a line": lambda: _whole(
        objects=(ObjectBytes("x", "raw\n", 0, 0, 1),)
    ),
    "an object past its file": lambda: _whole(objects=(ObjectBytes("x", "raw", 0, 199, 2),)),
    "an object in no file": lambda: _whole(objects=(ObjectBytes("x", "raw", 2, 0, 1),)),
    "an object twice": lambda: _whole(objects=(ObjectBytes("x", "raw", 0, 0, 1),) * 2),
}


@pytest.mark.parametrize("make", WHOLES.values(), ids=WHOLES)
def test_steps_that_are_refused(make: Callable[[], Record]) -> None:
    check(whole_record(), "whole")
    check(_boxes(*HALVES), "whole")
    refused(make(), "whole")


def test_a_part_may_have_some_boxes_and_no_digests() -> None:
    some = _boxes(((0, 0), (1, 2)), ((2, 0), (2, 2)))
    for record in (whole_record(), some, _boxes(HALVES[0]), _file(digests=b"")):
        check(record, "part")
    none = replace(whole_record().image_kinds[0], count=0, offsets=None, sizes=None)
    record = _whole(
        image_kinds=(none, *whole_record().image_kinds[1:]),
        starts=whole_record().box_starts[2:],
        volume_of=None,
    )
    check(record, "part")
    for mode in ("whole", "stream"):
        refused(record, mode)  # type: ignore[arg-type]
    refused(some, "whole")
    refused(whole_record(), "stream")
    refused(_record(), "whole")


def test_memory_for_columns_is_bounded_by_the_columns_that_came() -> None:
    """A short record that claims to have very many images or boxes is refused as it stands."""
    few = replace(
        whole_record(), images=1 << 24, kind_of=None, starts=_column(8), volume_of=None, names=()
    )
    refused(few, "whole")
    kind = ImageKind("uint8", (1 << 24,), None, 1 << 24, _column(0), _column(1))
    refused(replace(whole_record(), image_kinds=(kind,), kind_of=None), "part")
    volume = VolumeRecord("", 0)
    refused(replace(_record(), images=1 << 24, kind_of=None, volumes=(volume,)))


# Keys.


def test_keys_of_any_number_are_taken() -> None:
    for keys in (
        tuple(range(1, 400_000)),
        tuple(range(100_000)),
        tuple(n << 40 for n in range(100_000)),
        tuple(n << 43 for n in range(200_000)),
        tuple(-n * 1000 for n in range(100_000)),
        tuple(TupleKey((n, "x")) for n in range(20_000)),
        tuple(TupleKey((n % 141 - 70, n // 141 - 70)) for n in range(20_000)),
        tuple(encode_key(n / 64) for n in range(20_000)),
        tuple(encode_key(3**n) for n in range(20, 420)),
        tuple(map(str, range(100_000))),
        (TupleKey((1,) * (1 << 17)),),
    ):
        check_keys(keys)


def colliding() -> dict[str, tuple[Key, ...]]:
    modulus = sys.hash_info.modulus
    return {
        "one hash": tuple(encode_key(modulus * n) for n in range(9, 1000)),
        "one hash, negative": tuple(encode_key(-modulus * n - 5) for n in range(9, 1000)),
        "one sequence of slots": tuple(probing_keys(20_000, 1 << 15)),
        "signs": tuple(TupleKey(key) for key in itertools.product((-1, -2), repeat=11)),
        "long tuples": tuple(
            TupleKey((*(7,) * 5000, *key)) for key in itertools.product((-1, -2), repeat=9)
        ),
    }


@pytest.mark.parametrize("name", colliding())
def test_keys_that_would_make_a_dict_slow_are_refused(name: str) -> None:
    keys = colliding()[name]
    with pytest.raises(ManifestError, match="collide"):
        check_keys(keys)
    tree = m.DictNode("dict", keys, (0,) * len(keys))
    with pytest.raises(ManifestError, match="collide"):
        decode(encode(stream_record(tree, [m.ValueLeaf("plain", 0)])))


def test_what_a_receiver_would_refuse_is_refused_by_name_before_it_is_sent() -> None:
    modulus = sys.hash_info.modulus
    state = {"x": {"many": {n * modulus: n for n in range(1000)}}}
    with pytest.raises(UnsupportedLeafError, match="use text") as caught:
        capture(state)
    assert caught.value.path == "['x']['many']"


def test_dicts_of_several_ranks_are_checked_as_the_one_that_they_make() -> None:
    modulus = sys.hash_info.modulus
    trees: list[tuple[m.Node, int]] = []
    for rank in range(9):
        keys = tuple(encode_key(modulus * n) for n in range(100 * rank, 100 * rank + 100))
        check_keys(keys)  # few enough to cost little
        trees.append((m.DictNode("dict", keys, (0,) * len(keys)), 1))
    with pytest.raises(ManifestError, match="collide"):
        laid_over(trees)


def test_a_key_that_is_a_deep_tuple_is_refused_by_path() -> None:
    key: Any = ()
    for _ in range(5000):
        key = (key,)
    with pytest.raises(UnsupportedLeafError, match="nested deeper than 128") as caught:
        capture({"x": {"y": {key: 1}}})
    assert caught.value.path == "['x']['y']"
    record: Any = TupleKey(())
    for _ in range(200):
        record = TupleKey((record,))
    with pytest.raises(ManifestError, match="nested deeper"):
        check_tree_of(record)
    shallow: Any = 1
    for _ in range(100):
        shallow = (shallow,)
    assert check_tree_of(encode_key(shallow))


def check_tree_of(key: Key) -> bool:
    tree = m.DictNode("dict", (key,), (0,))
    found = decode(encode(stream_record(tree, [m.ValueLeaf("plain", 0)])))
    return found.outlines[0].tree == tree


def test_each_nan_is_a_key_of_its_own() -> None:
    nan = float("nan")
    state = {nan: 1, float("nan"): 2, (nan, 1): 3, (float("nan"), 1): 4}
    record = capture(state).record
    check(record, "stream")
    tree = record.outlines[0].tree
    assert isinstance(tree, m.DictNode) and len(tree.keys) == 4
    one = msgspec.structs.replace(tree, keys=(1, True, *tree.keys[2:]))
    refused(replace(record, outlines=(replace(record.outlines[0], tree=one),)))
