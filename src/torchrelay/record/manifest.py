"""Trees and leaves of a state, as records: everything about them but their bytes."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from torchrelay.record.values import Key, Value

# Caps on what a record may claim. They bound memory and time before anything else is looked at.
MAX_ENCODED_BYTES = 1 << 30
MAX_RECORD_BYTES = 1 << 31  # of the record of a step at rest
MAX_LEAVES = 1 << 24
MAX_DEPTH = 128
MAX_STREAM_BYTES = 1 << 50
MAX_DIMS = 64


class _Record(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Records travel as arrays: field order is part of the format, new fields go at the end."""


# Tree: containers hold nodes; an int is the index of a leaf.


class DictNode(_Record, tag="d", frozen=True):
    kind: str  # "dict", "OrderedDict" or "defaultdict"
    keys: tuple[Key, ...]
    items: tuple[Node, ...]
    factory: str | None = None  # defaultdict: a name out of a closed list


class SequenceNode(_Record, tag="l", frozen=True):
    kind: str  # "list" or "tuple"
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


Node = int | DictNode | SequenceNode | NamedTupleNode | RecordNode


# Leaves.

REQUIRES_GRAD, PARAMETER, CONJ, NEG, COALESCED, META = 1, 2, 4, 8, 16, 32
ON_DEVICE = 64  # an empty tensor on a device: it has no storage that would say so


class TensorLeaf(_Record, tag="t", frozen=True):
    """A strided tensor. `strides` None is row-major; `storage` is the number of its image, or -1:
    no bytes, meta or empty. `offset` is in bytes from the start of the image, strides in elements.
    """

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    storage: int
    offset: int = 0
    flags: int = 0


class QuantizedLeaf(_Record, tag="q", frozen=True):
    """Per tensor, `scalars` are scale and zero point; per channel, `tensors` are, along an axis.

    Dtypes that pack several elements into a byte are in `dtype`, with the tensor's shape; `raw` is
    its bytes.
    """

    raw: TensorLeaf
    scheme: str
    scalars: tuple[Value, ...] = ()
    tensors: tuple[TensorLeaf, ...] = ()
    axis: int = 0
    dtype: str = ""
    shape: tuple[int, ...] = ()


class SparseLeaf(_Record, tag="s", frozen=True):
    """`parts`: COO (indices, values); compressed layouts (pointers, indices, values)."""

    layout: str
    shape: tuple[int, ...]
    parts: tuple[TensorLeaf, ...]
    flags: int = 0


class ArrayLeaf(_Record, tag="a", frozen=True):
    """A numpy array (or scalar). `descr` is the JSON text of numpy's own dtype description."""

    descr: str
    shape: tuple[int, ...]
    fortran: bool
    storage: int
    nbytes: int
    scalar: bool = False


class ValueLeaf(_Record, tag="v", frozen=True):
    """A plain value; `kind` tells apart those that need a constructor (dtype, device, Size)."""

    kind: str
    value: Value


class SizeLeaf(_Record, tag="z", frozen=True):
    size: tuple[int, ...]


class Mesh(_Record, frozen=True):
    """`ranks` are all of them, row-major; or the first alone where `strides` say what one step
    along each dimension adds, so that a mesh of many ranks takes no more room than one of few."""

    device_type: str
    shape: tuple[int, ...]
    ranks: tuple[int, ...]
    names: tuple[str, ...] | None
    strides: tuple[int, ...] = ()


class Placement(_Record, frozen=True):
    """`kind`: "shard", "replicate", "partial" or "strided"."""

    kind: str
    dim: int = 0
    split: int = 0
    reduce: str = ""


class DTensorLeaf(_Record, tag="D", frozen=True):
    """One rank's part of a DTensor. `coordinate` is the sender's place in the mesh."""

    local: TensorLeaf
    mesh: Mesh
    placements: tuple[Placement, ...]
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    coordinate: tuple[int, ...] | None
    flags: int = 0


class Box(_Record, frozen=True):
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    placement: str | None


class ShardedLeaf(_Record, tag="S", frozen=True):
    """One rank's shards of a ShardedTensor, and where all shards are."""

    shards: tuple[TensorLeaf, ...]
    boxes: tuple[Box, ...]
    all_boxes: tuple[Box, ...]
    shape: tuple[int, ...]
    dtype: str
    flags: int = 0
    pinned: bool = False


class SubclassLeaf(_Record, tag="x", frozen=True):
    """A tensor subclass that flattens itself: inner tensors and a context (a state of its own)."""

    name: str
    attributes: tuple[str, ...]
    parts: tuple[Leaf, ...]
    context: Node
    context_leaves: tuple[Leaf, ...]
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    flags: int = 0


Leaf = (
    TensorLeaf
    | QuantizedLeaf
    | SparseLeaf
    | ArrayLeaf
    | ValueLeaf
    | SizeLeaf
    | DTensorLeaf
    | ShardedLeaf
    | SubclassLeaf
)


def parts(leaf: Leaf) -> Iterator[TensorLeaf]:
    """The strided tensors of a leaf, nested ones included."""
    if isinstance(leaf, TensorLeaf):
        yield leaf
    elif isinstance(leaf, QuantizedLeaf):
        yield leaf.raw
        yield from leaf.tensors
    elif isinstance(leaf, SparseLeaf):
        yield from leaf.parts
    elif isinstance(leaf, DTensorLeaf):
        yield leaf.local
    elif isinstance(leaf, ShardedLeaf):
        yield from leaf.shards
    elif isinstance(leaf, SubclassLeaf):
        for inner in (*leaf.parts, *leaf.context_leaves):
            yield from parts(inner)
    elif isinstance(leaf, ArrayLeaf) and leaf.nbytes:
        yield TensorLeaf("uint8", (leaf.nbytes,), None, leaf.storage)
