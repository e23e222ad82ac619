"""Which manifests are valid. Everything a later step relies on is checked here, once.

A manifest that passes is consistent: each leaf lies inside its storage's image, no image is larger
than what its leaves reach, chunks cut the stream without holes or overlaps, and every leaf stands
in the tree. Only then is anything allocated for it.
"""

from __future__ import annotations

import keyword
import unicodedata
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from math import prod
from typing import Any

import numpy as np

from torchrelay.errors import ManifestError
from torchrelay.geometry import DIGEST_BYTES
from torchrelay.geometry.chunks import ALIGN, MAX_CHUNK_BYTES, stream_bytes
from torchrelay.geometry.memo import remembered
from torchrelay.geometry.strides import contiguous_strides, extent
from torchrelay.record import manifest as m
from torchrelay.record.arrays import dtype_from_text
from torchrelay.record.columns import Numbers, Table, devices_of, others_of, sizes_of, table_of
from torchrelay.record.dtypes import itemsize
from torchrelay.record.keys import check_keys
from torchrelay.record.meshes import check_mesh, check_meshes
from torchrelay.record.values import decode_value
from torchrelay.steps import MAX_STEP

MAX_NESTED = 16  # tensor subclasses in tensor subclasses
_NOW_AND_THEN = 1024  # containers between two looks at the clock
MAX_MORE_DIMS = 1 << 19  # of all tensors, beyond `_DIMS` of each: each costs time and memory
_DIMS = 8
MAX_CLASSES = 512  # of namedtuples, which may have to be made
MAX_FIELDS = 1 << 14  # of those classes together
MAX_SIZE = 1 << 62  # of a dimension, a stride or a product of dimensions
_TOO_MUCH = m.MAX_STREAM_BYTES + 1  # so that sums of larger numbers stay in 64 bits

CONTAINERS = ("dict", "OrderedDict", "defaultdict")
FACTORIES = ("bool", "dict", "float", "int", "list", "set", "str", "tuple")
SEQUENCES = ("list", "tuple")
VALUE_KINDS = ("plain", "dtype", "device")
SPARSE_PARTS = {"coo": 2, "csr": 3, "csc": 3, "bsr": 3, "bsc": 3}
SCHEMES = ("per_tensor_affine", "per_channel_affine", "per_channel_affine_float_qparams")
QUANTIZED = ("qint8", "quint8", "qint32")
SUB_BYTE = {"quint4x2": 2, "quint2x4": 4}
PLACEMENTS = ("shard", "replicate", "partial", "strided")
_Marks = np.ndarray[Any, np.dtype[np.bool_]]
Reach = list[int] | defaultdict[int, int]  # by storage, the last byte that leaves reach
_REAL = ("float", "bfloat", "complex")  # how the names of dtypes start that have gradients
_NEGATED = ("int8", "int16", "int32", "int64", "uint8")  # besides those


def check(
    manifest: m.Manifest, *, tree: bool = True, in_time: Callable[[], None] | None = None
) -> None:
    """Raise `ManifestError` unless the manifest is valid. `tree=False`: its tree is known to be.
    `in_time` is called now and then."""
    try:
        _check(manifest, tree, in_time)
    except ManifestError:
        raise
    except (ValueError, TypeError, OverflowError, UnicodeDecodeError, RecursionError) as fault:
        raise ManifestError(f"invalid manifest: {fault}") from None


def check_step(step: int | None) -> None:
    if step is not None and not 0 <= step <= MAX_STEP:
        raise ManifestError(f"step {step} is out of range")


def _check(manifest: m.Manifest, tree: bool, in_time: Callable[[], None] | None) -> None:
    check_step(manifest.step)
    if len(manifest.leaves) > m.MAX_LEAVES:
        raise ManifestError(f"{len(manifest.leaves)} leaves, the cap is {m.MAX_LEAVES}")
    if tree:
        _check_tree(manifest.tree, len(manifest.leaves), in_time)
    if in_time is not None:
        in_time()
    sizes = sizes_of(manifest.storages)
    _check_stream(manifest, sizes)
    # Tensors are most of the leaves: those that are in order are checked together, the rest and
    # what is not in order one by one.
    table = table_of(manifest.leaves)
    more = np.array([max(len(kind.shape) - _DIMS, 0) for kind in table.kinds], np.int64)
    if len(table.kinds) and int(more[table.numbers].sum()) > MAX_MORE_DIMS:
        raise ManifestError("too many tensors of many dimensions")
    reach = [0] * len(sizes)
    others = others_of(manifest.leaves).values()
    for leaf in others:
        _check_leaf(leaf, manifest.storages, reach)
    check_meshes(others)
    fine, absent, ends = _fine(table, sizes)
    for index in np.flatnonzero(~(fine | absent)).tolist():
        _check_leaf(table.record(index), manifest.storages, reach)
    reached = np.array(reach, np.int64)
    np.maximum.at(reached, table.storages[fine], ends[fine])
    short = np.flatnonzero(reached != sizes).tolist()
    for index in short[:1]:
        raise ManifestError(
            f"storage {index} has {sizes[index]} bytes, its leaves reach {reached[index]}"
        )


def _fine(table: Table, sizes: Numbers) -> tuple[_Marks, _Marks, Numbers]:
    """`_check_tensor` for many at once: which of them have a storage and lie in it, which have
    none and need none, and the last byte of it that each reaches. `sizes` are those of storages,
    in range."""
    storages, offsets, numbers = table.storages, table.offsets, table.numbers
    for kind in table.kinds:
        _check_flags(kind.dtype, kind.flags)
    known = [_geometry(kind.dtype, kind.shape, kind.strides) for kind in table.kinds]
    itemsizes = np.array([size for _, size, _ in known], np.int64)[numbers]
    nbytes = np.array([min(nbytes, _TOO_MUCH) for _, _, nbytes in known], np.int64)[numbers]
    ends = np.minimum(offsets, _TOO_MUCH) + nbytes
    there = (storages >= 0) & (storages < len(sizes))
    room = np.zeros(len(storages), np.int64)
    room[there] = sizes[storages[there]]
    fine = there & (nbytes > 0) & (offsets >= 0) & (offsets % itemsizes == 0) & (ends <= room)
    meta = np.array([bool(kind.flags & m.META) for kind in table.kinds], bool)[numbers]
    empty = np.array([numel == 0 for numel, _, _ in known], bool)[numbers]
    absent = (storages == -1) & (offsets == 0) & (empty | meta)
    return fine & ~meta, absent, ends


def check_outline(tree: m.Node, leaves: tuple[m.Leaf, ...], sizes: Sequence[int]) -> None:
    """Raise `ManifestError` unless the leaves stand in the tree and fill tensors of these sizes."""
    try:
        if len(leaves) > m.MAX_LEAVES:
            raise ManifestError(f"{len(leaves)} leaves, the cap is {m.MAX_LEAVES}")
        _check_tree(tree, len(leaves))
    except (ValueError, TypeError, OverflowError, RecursionError) as fault:
        raise ManifestError(f"invalid outline: {fault}") from None
    check_leaves(leaves, sizes)


def check_leaves(leaves: Collection[m.Leaf], sizes: Sequence[int]) -> None:
    """Raise `ManifestError` unless the leaves lie in tensors of these sizes."""
    storages = _Sized(sizes)
    reach: defaultdict[int, int] = defaultdict(int)
    try:
        for leaf in leaves:
            _check_leaf(leaf, storages, reach)
        check_meshes(leaves)
    except (ValueError, TypeError, OverflowError, RecursionError) as fault:
        raise ManifestError(f"invalid outline: {fault}") from None


class _Sized(Sequence[m.Storage]):
    """Storages of these sizes, each made when it is looked at."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self._sizes = sizes

    def __len__(self) -> int:
        return len(self._sizes)

    def __getitem__(self, index: Any) -> Any:
        return m.Storage(self._sizes[index])


def _check_stream(manifest: m.Manifest, sizes: Numbers) -> None:
    for device in devices_of(manifest.storages):
        if not (device.isascii() and device.isidentifier()):
            raise ManifestError(f"device type {device[:40]!r}")
    for nbytes in (int(sizes.min()), int(sizes.max())) if len(sizes) else ():
        if not 0 < nbytes <= m.MAX_STREAM_BYTES:
            raise ManifestError(f"storage of {nbytes} bytes")
    # As a float, which does not overflow: what is far too much, and then exactly.
    total = int(sizes.sum(dtype=np.float64))
    if total <= 2 * m.MAX_STREAM_BYTES:
        total = stream_bytes(sizes.view(np.uint64))
    if total > m.MAX_STREAM_BYTES:
        raise ManifestError(f"stream of {total} bytes, the cap is {m.MAX_STREAM_BYTES}")
    for nbytes in manifest.chunks:
        if not 0 < nbytes <= MAX_CHUNK_BYTES or nbytes % ALIGN:
            raise ManifestError(f"chunk of {nbytes} bytes")
    if sum(manifest.chunks) != total:
        raise ManifestError(f"chunks of {sum(manifest.chunks)} bytes for a stream of {total}")
    if manifest.digests is not None:
        if len(manifest.digests) != len(manifest.chunks):
            raise ManifestError(
                f"{len(manifest.digests)} digests for {len(manifest.chunks)} chunks"
            )
        if any(len(digest) != DIGEST_BYTES for digest in manifest.digests):
            raise ManifestError(f"a digest is not {DIGEST_BYTES} bytes")


def _check_tree(tree: m.Node, leaves: int, in_time: Callable[[], None] | None = None) -> None:
    """Every leaf is in the tree, first seen in order of its index."""
    seen = seen_nodes = 0
    classes: dict[tuple[str, ...], int] = {}
    stack: list[Iterator[m.Node]] = [iter((tree,))]
    while stack:
        for node in stack[-1]:
            if type(node) is int:
                if not 0 <= node <= seen or node >= leaves:
                    raise ManifestError(f"leaf {node} out of order or of range")
                seen += node == seen
            else:
                items = _node_children(node)
                seen_nodes += 1
                if in_time is not None and seen_nodes % _NOW_AND_THEN == 0:
                    in_time()
                if isinstance(node, m.NamedTupleNode):
                    _check_classes(classes, node)
                # Most containers hold leaves alone, none of them seen before.
                fresh = seen + len(items)
                shallow = len(stack) <= m.MAX_DEPTH
                if shallow and fresh <= leaves and items == tuple(range(seen, fresh)):
                    seen = fresh
                    continue
                stack.append(iter(items))
                break
        else:
            stack.pop()
        if len(stack) > m.MAX_DEPTH + 1:
            raise ManifestError(f"tree deeper than {m.MAX_DEPTH}")
    if seen != leaves:
        raise ManifestError(f"{leaves} leaves, {seen} of them in the tree")


def _check_classes(classes: dict[tuple[str, ...], int], node: m.NamedTupleNode) -> None:
    """Note a class of namedtuples. Each may have to be made, which takes time and memory."""
    key = (node.module, node.name, *node.fields)
    if key not in classes:
        classes[key] = len(node.fields)
        if len(classes) > MAX_CLASSES or sum(classes.values()) > MAX_FIELDS:
            raise ManifestError(
                f"namedtuples of more than {MAX_CLASSES} classes, or with more than {MAX_FIELDS} "
                "fields in all"
            )


def _node_children(node: m.Node) -> tuple[m.Node, ...]:
    if isinstance(node, m.DictNode):
        if node.kind not in CONTAINERS or node.factory not in (None, *FACTORIES):
            raise ManifestError(f"container {node.kind[:40]!r} of {str(node.factory)[:40]!r}")
        if (node.factory is not None) and node.kind != "defaultdict":
            raise ManifestError(f"a {node.kind} has no factory")
        if len(node.keys) != len(node.items):
            raise ManifestError(f"{len(node.keys)} keys for {len(node.items)} items")
        check_keys(node.keys)
        return node.items
    if isinstance(node, m.SequenceNode):
        if node.kind not in SEQUENCES:
            raise ManifestError(f"sequence {node.kind[:40]!r}")
        return node.items
    if isinstance(node, m.NamedTupleNode):
        fields = _spoken(node.fields)
        names = [*_spoken([node.name.lstrip("_")])]  # a class may be private, a field may not
        names += [name for place, name in enumerate(fields) if name != f"_{place}"]
        if len(fields) != len(node.items) or len(set(fields)) != len(fields):
            raise ManifestError(f"namedtuple {node.name[:40]!r} with odd fields")
        if not all(map(_is_name, names)):
            raise ManifestError("a namedtuple's names are identifiers")
        return node.items
    if isinstance(node, m.RecordNode):
        return (node.body,)
    raise ManifestError(f"node of type {type(node).__name__}")


def _spoken(names: Sequence[str]) -> Sequence[str]:
    """Identifiers as Python takes them: those that it normalises to one are one."""
    if "".join(names).isascii():
        return names
    return [unicodedata.normalize("NFKC", name) for name in names]


def _is_name(name: str) -> bool:
    return (
        name.isidentifier()
        and len(name) < 256
        and not name.startswith("_")
        and not keyword.iskeyword(name)
    )


def _check_leaf(leaf: m.Leaf, storages: Sequence[m.Storage], reach: Reach, depth: int = 0) -> None:
    if isinstance(leaf, m.TensorLeaf):
        _check_tensor(leaf, storages, reach)
    elif isinstance(leaf, m.ValueLeaf):
        if leaf.kind not in VALUE_KINDS:
            raise ManifestError(f"value of kind {leaf.kind[:40]!r}")
        value = decode_value(leaf.value)
        if leaf.kind != "plain" and not isinstance(value, str):
            raise ManifestError(f"a {leaf.kind} is named by a string")
    elif isinstance(leaf, m.SizeLeaf):
        if not all(-(1 << 63) <= size < 1 << 63 for size in leaf.size):
            raise ManifestError("a torch.Size holds 64-bit numbers")
    elif isinstance(leaf, m.ArrayLeaf):
        _check_array(leaf, storages, reach)
    elif isinstance(leaf, m.QuantizedLeaf):
        _check_quantized(leaf)
        for part in (leaf.raw, *leaf.tensors):
            _check_tensor(part, storages, reach)
    elif isinstance(leaf, m.SparseLeaf):
        _check_shape(leaf.shape)
        if SPARSE_PARTS.get(leaf.layout) != len(leaf.parts):
            raise ManifestError(f"{len(leaf.parts)} parts for layout {leaf.layout[:40]!r}")
        for part in leaf.parts:
            _check_tensor(part, storages, reach)
    elif isinstance(leaf, m.DTensorLeaf):
        _check_dtensor(leaf)
        _check_tensor(leaf.local, storages, reach)
    elif isinstance(leaf, m.ShardedLeaf):
        _check_sharded(leaf)
        for part in leaf.shards:
            _check_tensor(part, storages, reach)
    elif isinstance(leaf, m.SubclassLeaf):
        if depth > MAX_NESTED:
            raise ManifestError(f"tensor subclasses nested deeper than {MAX_NESTED}")
        _check_shape(leaf.shape)
        if len(leaf.attributes) != len(leaf.parts) or len(leaf.strides) != len(leaf.shape):
            raise ManifestError(f"subclass {leaf.name[:40]!r} with odd parts")
        if not all(name.isidentifier() for name in leaf.attributes):
            raise ManifestError("attributes are identifiers")
        _check_tree(leaf.context, len(leaf.context_leaves))
        for inner in (*leaf.parts, *leaf.context_leaves):
            _check_leaf(inner, storages, reach, depth + 1)


def _check_quantized(leaf: m.QuantizedLeaf) -> None:
    if leaf.scheme not in SCHEMES:
        raise ManifestError(f"quantization scheme {leaf.scheme[:40]!r}")
    per_tensor = leaf.scheme == SCHEMES[0]
    if (len(leaf.scalars), len(leaf.tensors)) != ((2, 0) if per_tensor else (0, 2)):
        raise ManifestError(f"parameters do not fit {leaf.scheme}")
    raw, shape = leaf.raw, leaf.raw.shape
    if leaf.dtype:
        shape = leaf.shape
        if leaf.dtype not in SUB_BYTE or raw.dtype != "uint8" or raw.strides or raw.offset:
            raise ManifestError(f"packed elements of dtype {leaf.dtype[:40]!r}")
        if raw.shape != (packed_bytes(leaf.dtype, shape),):
            raise ManifestError(f"{raw.shape} bytes for packed elements of shape {shape}")
    elif raw.dtype not in QUANTIZED:
        raise ManifestError(f"quantized elements of dtype {raw.dtype[:40]!r}")
    for part in leaf.tensors:
        if not 0 <= leaf.axis < len(shape) or part.shape != (shape[leaf.axis],):
            raise ManifestError(f"a parameter a channel is needed on axis {leaf.axis}")
        if part.dtype not in ("float32", "float64", "int64") or part.flags & ~m.ON_DEVICE:
            raise ManifestError(f"quantization parameters of dtype {part.dtype[:40]!r}")
    for scalar in leaf.scalars:
        decode_value(scalar)


def packed_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    """Bytes of a tensor whose dtype packs several elements of a row into each byte."""
    _check_shape(shape)
    row = shape[-1] if shape else 1
    return prod(shape[:-1]) * -(-row // SUB_BYTE[dtype])


def _check_shape(shape: tuple[int, ...]) -> int:
    """The number of elements."""
    if len(shape) > m.MAX_DIMS:
        raise ManifestError(f"{len(shape)} dimensions, the cap is {m.MAX_DIMS}")
    for size in shape:
        if not 0 <= size < MAX_SIZE:
            raise ManifestError(f"dimension of {size}")
    numel = prod(shape)
    if numel >= MAX_SIZE:
        raise ManifestError(f"{numel} elements")
    return numel


@remembered(1 << 14)
def _geometry(
    dtype: str, shape: tuple[int, ...], strides: tuple[int, ...] | None
) -> tuple[int, int, int]:
    """Elements, item size and bytes reached of a strided tensor whose numbers are in range."""
    numel = _check_shape(shape)
    if strides is None:
        strides = contiguous_strides(shape)
    if len(strides) != len(shape):
        raise ManifestError(f"{len(strides)} strides for {len(shape)} dimensions")
    if any(not 0 <= stride < MAX_SIZE for stride in strides):
        raise ManifestError("stride out of range")
    size = itemsize(dtype)
    return numel, size, extent(shape, strides) * size


def last_byte(leaf: m.TensorLeaf) -> int:
    """Up to where in its storage a strided tensor reaches."""
    return leaf.offset + _geometry(leaf.dtype, leaf.shape, leaf.strides)[2]


def _check_tensor(leaf: m.TensorLeaf, storages: Sequence[m.Storage], reach: Reach) -> None:
    numel, size, nbytes = _geometry(leaf.dtype, leaf.shape, leaf.strides)
    _check_flags(leaf.dtype, leaf.flags)
    if leaf.storage == -1:
        if leaf.offset or (numel and not leaf.flags & m.META):
            raise ManifestError("a tensor without its storage")
        return
    if numel == 0 or leaf.flags & m.META:
        raise ManifestError("an empty or meta tensor has no storage")
    if leaf.offset % size:
        raise ManifestError(f"offset {leaf.offset} is not a multiple of the item size {size}")
    _reach(leaf.storage, leaf.offset, leaf.offset + nbytes, storages, reach)


_FLAG_BITS = 31


def _check_flags(dtype: str, flags: int) -> None:
    """What torch has no tensors of, it would refuse in the middle of a landing."""
    if flags.bit_length() > _FLAG_BITS:
        raise ManifestError("flags out of range")
    real = dtype.startswith(_REAL)
    if flags & m.REQUIRES_GRAD and not real:
        raise ManifestError(f"a gradient of dtype {dtype[:40]!r}")
    if flags & m.NEG and not (real or dtype in _NEGATED):
        raise ManifestError(f"a negation of dtype {dtype[:40]!r}")


def _check_array(leaf: m.ArrayLeaf, storages: Sequence[m.Storage], reach: Reach) -> None:
    numel = _check_shape(leaf.shape)
    dtype = dtype_from_text(leaf.descr)
    if leaf.scalar and leaf.shape:
        raise ManifestError("a numpy scalar has no dimensions")
    if leaf.nbytes != numel * dtype.itemsize:
        raise ManifestError(f"{leaf.nbytes} bytes for {numel} items of {dtype.itemsize}")
    if (leaf.storage == -1) != (leaf.nbytes == 0):
        raise ManifestError("an array has a storage, an empty one has none")
    if leaf.nbytes:
        _reach(leaf.storage, 0, leaf.nbytes, storages, reach)


def _reach(index: int, first: int, last: int, storages: Sequence[m.Storage], reach: Reach) -> None:
    if not 0 <= index < len(storages):
        raise ManifestError(f"storage {index} of {len(storages)}")
    if first < 0 or last > storages[index].nbytes:
        raise ManifestError(
            f"a leaf needs bytes {first} to {last} of a storage of {storages[index].nbytes}"
        )
    reach[index] = max(reach[index], last)


def _check_dtensor(leaf: m.DTensorLeaf) -> None:
    _check_shape(leaf.shape)
    _check_shape(leaf.mesh.shape)
    if len(leaf.strides) != len(leaf.shape):
        raise ManifestError("strides do not fit the shape of a DTensor")
    check_mesh(leaf.mesh)
    dims = len(leaf.mesh.shape)
    if len(leaf.placements) != dims:
        raise ManifestError(f"{len(leaf.placements)} placements on a mesh of {dims} dimensions")
    for per_dim in (leaf.mesh.names, leaf.coordinate):
        if per_dim is not None and len(per_dim) != dims:
            raise ManifestError("names or coordinate do not fit the mesh")
    for placement in leaf.placements:
        if placement.kind not in PLACEMENTS:
            raise ManifestError(f"placement {placement.kind[:40]!r}")
        sharded = placement.kind in ("shard", "strided")
        if sharded and not 0 <= placement.dim < len(leaf.shape):
            raise ManifestError(f"sharded on dimension {placement.dim} of {len(leaf.shape)}")
        if placement.kind == "strided" and not 0 < placement.split < MAX_SIZE:
            raise ManifestError(f"split factor {placement.split}")


def _check_sharded(leaf: m.ShardedLeaf) -> None:
    _check_shape(leaf.shape)
    itemsize(leaf.dtype)
    if len(leaf.shards) != len(leaf.boxes) or not leaf.all_boxes:
        raise ManifestError("shards and boxes do not fit")
    for shard, box in zip(leaf.shards, leaf.boxes, strict=True):
        if shard.shape != box.sizes or shard.dtype != leaf.dtype:
            raise ManifestError("a shard does not fill its box")
    for box in (*leaf.boxes, *leaf.all_boxes):
        if not len(box.offsets) == len(box.sizes) == len(leaf.shape):
            raise ManifestError("a box has other dimensions than its tensor")
        for offset, size, whole in zip(box.offsets, box.sizes, leaf.shape, strict=True):
            if offset < 0 or size < 0 or offset + size > whole:
                raise ManifestError("a box reaches out of its tensor")
