"""Trees and leaves of a state, as records: everything about them but their bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Annotated, Any, Literal, get_args

import msgspec
from msgspec import Meta

from torchrelay.record.values import Key, Value

# Caps on what a record may claim. They bound memory and time before anything else is looked at.
MAX_ENCODED_BYTES = 1 << 30
MAX_RECORD_BYTES = 1 << 31  # of the record of a step at rest
MAX_LEAVES = 1 << 24
MAX_DEPTH = 128
MAX_STREAM_BYTES = 1 << 50
MAX_DIMS = 64
MAX_SIZE = 1 << 62  # of a dimension, a stride or a product of dimensions
MAX_RANK = 1 << 31
MAX_MESH_DIMS = 16

# Types of fields. A decoder refuses values out of range.
Size = Annotated[int, Meta(ge=0, lt=MAX_SIZE)]
Shape = Annotated[tuple[Size, ...], Meta(max_length=MAX_DIMS)]  # or strides
Number = Annotated[int, Meta(ge=-1, lt=MAX_SIZE)]  # -1: none
Flags = Annotated[int, Meta(ge=0, lt=1 << 5)]
Rank = Annotated[int, Meta(ge=0, lt=MAX_RANK)]
Int64 = Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
Factory = Literal["bool", "dict", "float", "int", "list", "set", "str", "tuple"]
FACTORIES: tuple[str, ...] = get_args(Factory)


class _Record(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Records travel as arrays: field order is part of the format, new fields go at the end."""


# Tree: containers hold nodes; an int is the index of a leaf.


class DictNode(_Record, tag="d", frozen=True):
    kind: Literal["dict", "OrderedDict", "defaultdict"]
    keys: tuple[Key, ...]
    items: tuple[Node, ...]
    factory: Factory | None = None  # of a defaultdict


class SequenceNode(_Record, tag="l", frozen=True):
    kind: Literal["list", "tuple"]
    items: tuple[Node, ...]


class NamedTupleNode(_Record, tag="n", frozen=True):
    name: str
    fields: tuple[str, ...]
    items: tuple[Node, ...]
    module: str = ""


class RecordNode(_Record, tag="r", frozen=True):
    """A registered type: `name` is the registered name, `body` what its encoder returned."""

    name: str
    body: Node


Container = DictNode | SequenceNode | NamedTupleNode | RecordNode
Node = int | Container


# Leaves.

REQUIRES_GRAD, PARAMETER, COALESCED, META = 1, 2, 4, 8
ON_DEVICE = 16  # an empty tensor on a device: it has no storage that would say so


class TensorLeaf(_Record, tag="t", frozen=True):
    """A strided tensor. `strides` None is row-major; `storage` is the number of its image, or -1:
    no bytes, meta or empty. `offset` is in bytes from the start of the image, strides in elements.
    """

    dtype: str
    shape: Shape
    strides: Shape | None
    storage: Number
    offset: Size = 0
    flags: Flags = 0


class SparseLeaf(_Record, tag="s", frozen=True):
    """`parts`: COO (indices, values); compressed layouts (pointers, indices, values)."""

    layout: str
    shape: Shape
    parts: tuple[TensorLeaf, ...]
    flags: Flags = 0


class ArrayLeaf(_Record, tag="a", frozen=True):
    """A numpy array (or scalar). `descr` is the JSON text of numpy's own dtype description."""

    descr: str
    shape: Shape
    fortran: bool
    storage: Number
    nbytes: int
    scalar: bool = False


class ValueLeaf(_Record, tag="v", frozen=True):
    """A plain value, the name of a dtype or a device, or an object that `typed` encodes."""

    kind: Literal["plain", "dtype", "device", "object"]
    value: Value


class SizeLeaf(_Record, tag="z", frozen=True):
    size: tuple[Int64, ...]


class Mesh(_Record, frozen=True):
    """`ranks` are all of them, row-major; or the first alone where `strides` say what one step
    along each dimension adds, so that a mesh of many ranks takes no more room than one of few."""

    device_type: str
    shape: Annotated[tuple[Size, ...], Meta(max_length=MAX_MESH_DIMS)]
    ranks: tuple[Rank, ...]
    names: tuple[str, ...] | None
    strides: Shape = ()


class Placement(_Record, frozen=True):
    kind: Literal["shard", "replicate", "partial", "strided"]
    dim: int = 0
    split: int = 0
    reduce: str = ""


class DTensorLeaf(_Record, tag="D", frozen=True):
    """One rank's part of a DTensor. `coordinate` is the sender's position in the mesh."""

    local: TensorLeaf
    mesh: Mesh
    placements: tuple[Placement, ...]
    shape: Shape
    strides: tuple[int, ...]
    coordinate: tuple[int, ...] | None
    flags: Flags = 0


class Box(_Record, frozen=True):
    offsets: Shape
    sizes: Shape
    placement: str | None


class ShardedLeaf(_Record, tag="S", frozen=True):
    """One rank's shards of a ShardedTensor, and where all shards are. Of a `checkpointable` one, a
    plain tensor that says of itself which boxes it has, only those of this rank are known."""

    shards: tuple[TensorLeaf, ...]
    boxes: tuple[Box, ...]
    all_boxes: tuple[Box, ...]
    shape: Shape
    dtype: str
    flags: Flags = 0
    pinned: bool = False
    checkpointable: bool = False


class SubclassLeaf(_Record, tag="x", frozen=True):
    """A tensor subclass that flattens itself: inner tensors and a context (a state of its own)."""

    name: str
    attributes: tuple[str, ...]
    parts: tuple[Leaf, ...]
    context: Node
    context_leaves: tuple[Leaf, ...]
    shape: Shape
    strides: tuple[int, ...]
    flags: Flags = 0


Leaf = (
    TensorLeaf
    | SparseLeaf
    | ArrayLeaf
    | ValueLeaf
    | SizeLeaf
    | DTensorLeaf
    | ShardedLeaf
    | SubclassLeaf
)


# The fields of a leaf that have its strided tensors, or leaves that have some.
_PART_FIELDS: dict[type, tuple[str, ...]] = {
    SparseLeaf: ("parts",),
    DTensorLeaf: ("local",),
    ShardedLeaf: ("shards",),
    SubclassLeaf: ("parts", "context_leaves"),
}


def tensor_of(leaf: Leaf) -> tuple[str, Shape] | None:
    """Dtype and shape of a strided tensor, or of the whole that a distributed one is a part of."""
    if isinstance(leaf, (TensorLeaf, ShardedLeaf)):
        return leaf.dtype, leaf.shape
    return (leaf.local.dtype, leaf.shape) if isinstance(leaf, DTensorLeaf) else None


def parts(leaf: Leaf) -> Iterator[TensorLeaf]:
    """The strided tensors of a leaf, nested ones included; an array is one of bytes."""
    if isinstance(leaf, TensorLeaf):
        yield leaf
        return
    if isinstance(leaf, ArrayLeaf) and leaf.nbytes:
        yield TensorLeaf("uint8", (leaf.nbytes,), None, leaf.storage)
    for name in _PART_FIELDS.get(type(leaf), ()):
        found = getattr(leaf, name)
        for inner in found if isinstance(found, tuple) else (found,):
            yield from parts(inner)


def with_parts(leaf: Leaf, change: Callable[[TensorLeaf], TensorLeaf]) -> Leaf:
    """The same leaf with other records of its strided tensors, those that have an image."""
    if isinstance(leaf, TensorLeaf):
        return change(leaf) if leaf.storage >= 0 else leaf
    if isinstance(leaf, ArrayLeaf) and leaf.nbytes and leaf.storage >= 0:
        return msgspec.structs.replace(leaf, storage=change(next(parts(leaf))).storage)
    changed: dict[str, Any] = {}
    for name in _PART_FIELDS.get(type(leaf), ()):
        found = getattr(leaf, name)
        changed[name] = (
            tuple([with_parts(inner, change) for inner in found])
            if isinstance(found, tuple)
            else with_parts(found, change)
        )
    return msgspec.structs.replace(leaf, **changed) if changed else leaf
