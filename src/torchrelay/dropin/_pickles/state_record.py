"""The record that a stock torch `PGTransport` pickles, read without running what it names.

The closed unpickler gives inert values. Torch's records are made of these, each by its own
constructor, of fields whose types and bounds were checked; the work is linear in the length of the
input, however much of it is shared.
"""

from __future__ import annotations

import collections
import io
import math
import sys
from typing import Any

import torch
from torch.distributed import _mesh_layout
from torch.distributed._shard.sharded_tensor.metadata import (
    ShardedTensorMetadata,
    TensorProperties,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor._dtensor_spec import DTensorSpec, ShardOrderEntry, TensorMeta
from torch.distributed.tensor.placement_types import (
    Partial,
    Placement,
    Replicate,
    Shard,
    _StridedShard,
)
from torch.utils._pytree import TreeSpec, tree_flatten_with_path, tree_structure, tree_unflatten

from torchrelay.dropin._pickles import arrays, shards
from torchrelay.dropin._pickles.fields import (
    DTYPES,
    MAX_DIMS,
    count,
    counts,
    device,
    dtype,
    fields,
    made,
    properties,
    size,
    typed,
)
from torchrelay.dropin._pickles.unpickler import (
    SCALARS,
    Global,
    PickledCall,
    PickledDict,
    PickleRefusedError,
    check_keys,
    refuse,
    unpickled,
)
from torchrelay.dropin._torch_records import (
    _DTensorMeta,
    _ShardedTensorMeta,
    _StateDictMeta,
    _TensorMeta,
)
from torchrelay.errors import RemoteProtocolError

_MAX_DEPTH = 200
_ALWAYS = 10_000  # steps that any record may take
_MAX_BYTES = 1 << 50

_RECORDS = "torch.distributed.checkpoint._pg_transport."
_PYTREE = "torch.utils._pytree."
_LAYOUT = "torch.distributed._mesh_layout."
_SPEC = "torch.distributed.tensor._dtensor_spec."
_PLACEMENT = "torch.distributed.tensor.placement_types."
_MESH = "torch.distributed.device_mesh.DeviceMesh"

_PER_BYTE = {torch.quint4x2: 2, torch.quint2x4: 4}
_REDUCE_OPS = ("sum", "avg", "min", "max", "product", "band", "bor", "bxor", "premul_sum")
_CONTAINERS: dict[str, type] = {
    "builtins.dict": dict,
    "builtins.list": list,
    "builtins.tuple": tuple,
    "collections.OrderedDict": collections.OrderedDict,
    "collections.defaultdict": collections.defaultdict,
    "collections.deque": collections.deque,
}
# Factories that a defaultdict may have: each is harmless to call without arguments.
_FACTORIES: dict[str, type] = {
    **{name: _CONTAINERS[name] for name in _CONTAINERS},
    **{f"builtins.{t.__name__}": t for t in (bool, int, float, complex, str, bytes, set)},
}

# Every name a pickle may hold. The strings are only compared; nothing is looked up by them.
_NAMES = frozenset(
    [
        *(_RECORDS + n for n in ("_StateDictMeta", "_TensorMeta")),
        *(_RECORDS + n for n in ("_DTensorMeta", "_ShardedTensorMeta")),
        *(_PYTREE + n for n in ("TreeSpec", "LeafSpec")),
        *(_PYTREE + n for n in ("MappingKey", "SequenceKey", "GetAttrKey")),
        *(_LAYOUT + n for n in ("_MeshLayout", "_FlatLayout")),
        *(_SPEC + n for n in ("DTensorSpec", "TensorMeta", "ShardOrderEntry")),
        *(_PLACEMENT + n for n in ("Shard", "_StridedShard", "Replicate", "Partial")),
        _MESH,
        # A mesh carries its ranks twice: as a tensor, whose bytes are left unread, and as a tuple.
        "torch._utils._rebuild_tensor_v2",
        "torch.storage._load_from_bytes",
        "torch.serialization._get_layout",
        "torch.Size",
        "torch.device",
        "builtins.complex",
        "builtins.bytearray",
        "collections.namedtuple",
        "_io.BytesIO",
        *arrays.NAMES,
        *shards.NAMES,
        *DTYPES,
        *_FACTORIES,
    ]
)


def loads(data: bytes, limit: int = 1 << 30) -> _StateDictMeta:
    """The record in `data`, checked whole; `RemoteProtocolError` for anything else."""
    try:
        if len(data) > limit:
            refuse(f"its record of {len(data)} bytes is over the limit of {limit}")
        return _Builder(len(data)).state(unpickled(data, _find))
    except PickleRefusedError as fault:
        raise RemoteProtocolError(f"a torch PGTransport peer was refused: {fault}") from fault
    except Exception as fault:  # every way in which hostile bytes can fail has this one meaning
        raise RemoteProtocolError(f"torch's state record is malformed: {fault!r:.200}") from fault


def _find(module: str, name: str) -> Global | None:
    full = f"{module}.{name}"
    if full in _NAMES:
        return Global(full)
    found = _loaded_namedtuple(module, name)
    return None if found is None else Global(full, found)


def _loaded_namedtuple(module: str, name: str) -> type | None:
    """A namedtuple that this process has already imported; modules are looked at, not run."""
    found = vars(sys.modules[module]).get(name) if module in sys.modules else None
    if (
        isinstance(found, type)
        and found.__bases__ == (tuple,)
        # The constructor that `namedtuple` generates, and no other: it only packs its arguments.
        and getattr(found.__new__, "__module__", None) == f"namedtuple_{found.__name__}"
        and isinstance(vars(found).get("_fields"), tuple)
    ):
        return found
    return None


class _Builder:
    """Makes torch's records of inert values; a field that does not fit is refused."""

    def __init__(self, length: int) -> None:
        self.length = length
        # Meshes and leaves that a pickle shares are made once, by the identity of their values.
        self.meshes: dict[int, DeviceMesh] = {}
        self.leaves: dict[int, object] = {}
        # Steps that are left for parts which each of their owners has to look at: a short pickle
        # whose parts share each other could describe a vast tree.
        self.left = 4 * length + _ALWAYS

    def charge(self, count: int) -> None:
        self.left -= count
        if self.left < 0:
            refuse("its parts share each other more often than its length allows")

    def state(self, value: object) -> _StateDictMeta:
        f = fields(value, _RECORDS + "_StateDictMeta")
        spec = self.tree(f["treespec"])
        paths, leaves = typed(f["paths"], list), typed(f["non_tensor_leaves"], list)
        if not len(paths) == len(leaves) == spec.num_leaves:
            refuse(
                f"its tree has {spec.num_leaves} leaves, but {len(paths)} paths and "
                f"{len(leaves)} leaves came with it"
            )
        # A leaf takes more bytes than this with its path.
        if len(leaves) > self.length // 16 + _ALWAYS:
            refuse("it has more leaves than its length allows")
        if not all(type(path) is tuple for path in paths):
            refuse("its paths are malformed")
        # The tree tells the paths; those of the record could point one leaf at another's place.
        told, again = tree_flatten_with_path(tree_unflatten(range(len(leaves)), spec))
        if [number for _, number in told] != list(range(len(leaves))) or again != spec:
            refuse("its tree does not rebuild to itself")
        records = [self.leaf(leaf) for leaf in leaves]
        return _StateDictMeta(spec, [path for path, _ in told], records)

    def leaf(self, value: Any) -> object:
        if id(value) not in self.leaves:
            self.leaves[id(value)] = self.new_leaf(value)
        found = self.leaves[id(value)]
        if isinstance(found, _ShardedTensorMeta):
            shared = len(found.sharded_tensor_metadata.shards_metadata)
            self.charge(len(found.local_shards_meta) + 64 * shared)
        return found

    def new_leaf(self, value: Any) -> object:
        name = value.name if type(value) is PickledCall else ""
        if name:  # each object has a copy of the bytes that it is made of
            told = (*value.args, *(value.state if type(value.state) is tuple else ()))
            self.charge(sum(len(data) for data in told if type(data) is bytes))
        if name == _RECORDS + "_TensorMeta":
            return self.tensor(value)
        if name == _RECORDS + "_DTensorMeta":
            f = fields(value, name)
            return self.dtensor(self.tensor(f["local"]), f["spec"])
        if name == _RECORDS + "_ShardedTensorMeta":
            return self.sharded(value)
        return _plain(value)

    def tree(self, value: Any, depth: int = 0) -> TreeSpec:
        if depth > _MAX_DEPTH:
            refuse(f"its tree is deeper than {_MAX_DEPTH}")
        if type(value) is PickledCall and value.name == _PYTREE + "LeafSpec":
            self.charge(1 + depth)  # the steps of its path
            return tree_structure(None)
        self.charge(1)
        f = fields(value, _PYTREE + "TreeSpec", "type", "_context", "_children")
        # torch before 2.12 keeps these two in public fields.
        context = f.get("_context", f.get("context"))
        below = typed(f.get("_children", f.get("children_specs")), list)
        children = [self.tree(child, depth + 1) for child in below]
        return self.container(typed(f["type"], Global).name, context, children)

    def container(self, kind: str, context: Any, children: list[TreeSpec]) -> TreeSpec:
        width = len(children)
        if kind == "collections.namedtuple":
            cls = typed(context, Global).kind
            if cls is None or len(vars(cls)["_fields"]) != width:
                refuse("a namedtuple does not fit its class")
            return TreeSpec(collections.namedtuple, cls, children)
        if kind not in _CONTAINERS:
            refuse(f"{kind!r} is not a container of a state")
        cls = _CONTAINERS[kind]
        if cls in (list, tuple):
            return TreeSpec(cls, typed(context, type(None)), children)
        if cls is collections.deque:
            room = None if context is None else count(context)
            return TreeSpec(cls, room, children)
        factory = None
        if cls is collections.defaultdict:
            named, context = typed(context, list)
            factory = None if named is None else _FACTORIES[typed(named, Global).name]
        keys = [self.key(key) for key in typed(context, list)]
        check_keys(keys)
        if len(set(keys)) != width or len(keys) != width:
            refuse("the keys of a dict do not fit its items")
        return TreeSpec(cls, [factory, keys] if cls is collections.defaultdict else keys, children)

    def key(self, value: Any, depth: int = 0) -> object:
        # Each use of a key hashes it whole, and tuples that share their parts have vast wholes.
        self.left -= 4
        if self.left < 0 or depth > 16:
            refuse("a key of a dict is too large")
        if type(value) is tuple:
            return tuple([self.key(item, depth + 1) for item in value])
        return _plain(value)

    def tensor(self, value: object) -> _TensorMeta:
        f = fields(value, _RECORDS + "_TensorMeta")
        shape, stride = size(f["shape"]), counts(f["stride"], MAX_DIMS)
        kind, nbytes = dtype(f["dtype"]), count(f["nbytes"], _MAX_BYTES)
        offset = count(f["storage_offset"])
        if len(shape) != len(stride) or math.prod(shape) >= 1 << 62:
            refuse("a tensor has a malformed shape")
        if 0 not in shape:
            reach = offset + 1 + sum((n - 1) * step for n, step in zip(shape, stride, strict=True))
            if reach * kind.itemsize > nbytes * _PER_BYTE.get(kind, 1):
                refuse(f"a tensor reaches past its {nbytes} bytes")
        return _TensorMeta(shape, kind, offset, stride, nbytes)

    def dtensor(self, local: _TensorMeta, value: Any) -> _DTensorMeta:
        f = fields(value, _SPEC + "DTensorSpec")
        mesh = self.mesh(f["mesh"])
        placements = tuple(_placement(p) for p in typed(f["placements"], tuple))
        shape, stride, kind = made(f["tensor_meta"], _SPEC + "TensorMeta")
        whole = TensorMeta(size(shape), counts(stride, MAX_DIMS), dtype(kind))
        dims = len(whole.shape)
        if len(placements) != mesh.ndim or dims != len(local.shape) or whole.dtype != local.dtype:
            refuse("a DTensor does not fit its local tensor or its mesh")
        if any(getattr(p, "dim", 0) >= max(dims, 1) for p in placements):
            refuse("a DTensor is sharded along a dimension that it does not have")
        options: dict[str, Any] = {}
        strided = "use_strided_shard_as_shard_order"
        if f.get(strided) is not None:
            options[strided] = typed(f[strided], bool)
        if f.get("shard_order") is not None:
            pairs = [made(e, _SPEC + "ShardOrderEntry") for e in typed(f["shard_order"], tuple)]
            order = tuple(ShardOrderEntry(count(dim), counts(along)) for dim, along in pairs)
            if any(e.tensor_dim >= dims or max(e.mesh_dims) >= mesh.ndim for e in order):
                refuse("the shard order of a DTensor does not fit it")
            options["shard_order"] = order
        spec = DTensorSpec(mesh, placements, tensor_meta=whole, **options)
        return _DTensorMeta(local, spec)

    def sharded(self, value: object) -> _ShardedTensorMeta:
        f = fields(value, _RECORDS + "_ShardedTensorMeta")
        g = fields(f["sharded_tensor_metadata"], shards.METADATA + "ShardedTensorMetadata")
        whole = size(g["size"])
        mine, where = f["local_shards_meta"], f["local_shards_shard_metadata"]
        parts = [typed(one, list) for one in (mine, where, g["shards_metadata"])]
        self.charge(sum(map(len, parts)) * (8 + 4 * len(whole)))
        kind, layout = properties(g["tensor_properties"], shards.METADATA + "TensorProperties")
        local = [self.tensor(tensor) for tensor in mine]
        boxes, every = ([shards.shard(box, whole) for box in one] for one in parts[1:])
        if [(list(t.shape), t.dtype) for t in local] != [(b.shard_sizes, kind) for b in boxes]:
            refuse("the shards of a ShardedTensor do not fit their records")
        # The receiver makes them contiguous, so an expanded one could ask for any amount of memory.
        if any(math.prod(t.shape) * t.dtype.itemsize > t.nbytes for t in local):
            refuse("a shard of a ShardedTensor has more elements than bytes")
        if layout != "torch.strided":
            refuse(f"a ShardedTensor has the layout {layout!r:.50}")
        metadata = ShardedTensorMetadata(every, whole, TensorProperties(kind))
        return _ShardedTensorMeta(local, boxes, metadata)

    def mesh(self, value: Any, depth: int = 0) -> DeviceMesh:
        if depth > _MAX_DEPTH:
            refuse(f"its meshes are nested deeper than {_MAX_DEPTH}")
        if id(value) in self.meshes:
            return self.meshes[id(value)]
        f = fields(value, _MESH)
        # A root mesh and its flattened meshes name each other, so it is known before it is whole.
        # Its constructor would create process groups; setting its state only looks them up.
        mesh = self.meshes[id(value)] = DeviceMesh.__new__(DeviceMesh)
        self.charge(len(typed(f["_flatten_rank_map"], tuple)))
        ranks = counts(f["_flatten_rank_map"])
        names, root, where = f["_mesh_dim_names"], f["_root_mesh"], f["_coordinate_on_dim"]
        flat = typed(f["_flatten_mapping"], PickledDict)
        self.charge(len(flat))
        state: dict[str, object] = {
            "_device_type": typed(f["_device_type"], str),
            "_layout": _mesh_layout_of(f["_layout"], len(ranks)),
            "_rank_map": torch.tensor(ranks, dtype=torch.int, device="cpu"),
            "_flatten_rank_map": ranks,
            "_mesh_dim_names": None if names is None else _texts(typed(names, tuple)),
            "_root_mesh": None if root is None else self.mesh(root, depth + 1),
            "_flatten_mapping": {n: self.mesh(m, depth + 1) for n, m in flat.items()},
            "_rank": count(f["_rank"]),
            "_coordinate_on_dim": None if where is None else counts(where),
            "_thread_id": None,
            "_hash": None,
        }
        if "_dim_group_names" in f:
            state["_dim_group_names"] = list(_texts(typed(f["_dim_group_names"], list)))
        mesh.__setstate__(state)
        return mesh


def _texts(value: list[object] | tuple[object, ...]) -> tuple[str, ...]:
    return tuple(typed(text, str) for text in value)


def _plain(value: Any) -> object:
    """A leaf that is not a tensor."""
    if type(value) in (*SCALARS, bytearray, set, frozenset):
        return value
    if type(value) is Global and value.name in DTYPES:
        return DTYPES[value.name]
    if type(value) is PickledCall:
        if value.name in arrays.ARRAYS:
            return arrays.array(value)
        if value.name in arrays.SCALARS:
            return arrays.scalar(value)
        if value.name == "_io.BytesIO":
            return _buffer(value)
        if value.name == "torch.Size":
            return size(value)
        if value.name == "torch.device":
            return device(value)
        if value.name == "builtins.complex":
            real, imag = made(value, value.name)
            return complex(typed(real, float), typed(imag, float))
        if value.name == "builtins.bytearray":
            args = made(value, value.name)
            return bytearray(typed(args[0], bytes)) if args else bytearray()
    refuse("a leaf is neither a tensor nor a plain value")


def _buffer(value: PickledCall) -> io.BytesIO:
    data, position, _ = typed(value.state, tuple)
    buffer = io.BytesIO(typed(data, bytes))
    buffer.seek(count(position))
    return buffer


def _placement(value: Any) -> Placement:
    name = typed(value, PickledCall).name
    if name == _PLACEMENT + "Replicate":
        return Replicate()
    f = fields(value, name)
    if name == _PLACEMENT + "Shard":
        return Shard(count(f["dim"]))
    if name == _PLACEMENT + "_StridedShard":
        return _StridedShard(count(f["dim"]), split_factor=count(f["split_factor"]))
    if name == _PLACEMENT + "Partial" and f["reduce_op"] in _REDUCE_OPS:
        return Partial(f["reduce_op"])
    refuse("a placement of a DTensor is unknown")


def _mesh_layout_of(value: object, ranks: int) -> Any:
    axes = []
    for axis in typed(fields(value, _LAYOUT + "_MeshLayout")["axes"], tuple):
        f = fields(axis, _LAYOUT + "_FlatLayout")
        axes.append((counts(f["shape"]), counts(f["stride"])))
    reach = 1
    for shape, stride in axes:
        reach += sum((n - 1) * step for n, step in zip(shape, stride, strict=True))
    if reach > ranks or any(n < 1 for shape, _ in axes for n in shape):
        refuse("a mesh reaches past its ranks")
    return _mesh_layout._MeshLayout([_mesh_layout._FlatLayout(*axis) for axis in axes])
