"""Reads the pickled record of a stock torch `PGTransport`, and runs nothing that it names.

`Machine` reads the pickle into inert objects. From these `_Builder` makes torch's records, each by
its own constructor, from fields whose types and bounds were checked; the work is linear in the
length of the input, however much of it is shared.
"""

from __future__ import annotations

import collections
import math
from typing import Any

import torch
from torch.distributed import _mesh_layout
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor.metadata import (
    ShardedTensorMetadata,
    TensorProperties,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.remote_device import _remote_device
from torch.distributed.tensor._dtensor_spec import DTensorSpec, ShardOrderEntry, TensorMeta
from torch.distributed.tensor.placement_types import (
    Partial,
    Placement,
    Replicate,
    Shard,
    _StridedShard,
)
from torch.utils._pytree import (
    TreeSpec,
    tree_flatten_with_path,
    tree_structure,
    tree_unflatten,
)

from torchrelay.dropin._pickles.machine import SCALARS, Machine, Name, PickledCall, refuse
from torchrelay.dropin._torch_records import (
    _DTensorMeta,
    _ShardedTensorMeta,
    _StateDictMeta,
    _TensorMeta,
)
from torchrelay.errors import ManifestError, RemoteProtocolError
from torchrelay.record.keys import KeyTable

_MAX_DEPTH = 200
_MAX_DIMS = 64
_ALWAYS = 10_000  # steps that any record may take
_MAX_BYTES = 1 << 50

_RECORDS = "torch.distributed.checkpoint._pg_transport."
_PYTREE = "torch.utils._pytree."
_LAYOUT = "torch.distributed._mesh_layout."
_SPEC = "torch.distributed.tensor._dtensor_spec."
_PLACEMENT = "torch.distributed.tensor.placement_types."
_SHARDS = "torch.distributed._shard.sharded_tensor.metadata."
_SHARD = "torch.distributed._shard.metadata.ShardMetadata"
_MESH = "torch.distributed.device_mesh.DeviceMesh"
_REMOTE = "torch.distributed.remote_device._remote_device"

_DTYPES = {f"torch.{n}": d for n, d in vars(torch).items() if isinstance(d, torch.dtype)}
_PER_BYTE = {torch.quint4x2: 2, torch.quint2x4: 4}
_LAYOUTS = {str(v): v for v in vars(torch).values() if isinstance(v, torch.layout)}
_MEMORY_FORMATS = (torch.contiguous_format, torch.channels_last, torch.preserve_format)
_REDUCE_OPS = ("sum", "avg", "min", "max", "product", "band", "bor", "bxor", "premul_sum")
_CONTAINERS: dict[str, type] = {
    "builtins.dict": dict,
    "builtins.list": list,
    "builtins.tuple": tuple,
    "collections.OrderedDict": collections.OrderedDict,
    "collections.defaultdict": collections.defaultdict,
    "collections.deque": collections.deque,
}
# What a defaultdict may be told to make of nothing: each is harmless to call without arguments.
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
        *(_SHARDS + n for n in ("ShardedTensorMetadata", "TensorProperties")),
        _SHARDS + "MEM_FORMAT_ENCODING",
        _SHARD,
        _MESH,
        _REMOTE,
        # A mesh carries its ranks twice: as a tensor, whose bytes are left unread, and as a tuple.
        "torch._utils._rebuild_tensor_v2",
        "torch.storage._load_from_bytes",
        "torch.serialization._get_layout",
        "torch.Size",
        "torch.device",
        "builtins.complex",
        "builtins.bytearray",
        "collections.namedtuple",
        *_DTYPES,
        *_FACTORIES,
    ]
)


def loads(data: bytes, limit: int = 1 << 30) -> _StateDictMeta:
    """The record in `data`, checked whole; `RemoteProtocolError` for anything else."""
    if len(data) > limit:
        refuse(f"its record of {len(data)} bytes is over the limit of {limit}")
    try:
        return _Builder(len(data)).state(Machine(data, _NAMES).run())
    except RemoteProtocolError:
        raise
    except ManifestError as fault:
        raise RemoteProtocolError(f"torch's state record was refused: {fault.message}") from fault
    except Exception as fault:  # every way in which hostile bytes can fail has this one meaning
        raise RemoteProtocolError(f"torch's state record is malformed: {fault!r:.200}") from fault


class _Builder:
    """Makes torch's records from what the machine read; a field that does not fit is refused."""

    def __init__(self, length: int) -> None:
        self.length = length
        # Objects that a pickle shares are made once: else a short one could describe a vast tree.
        self.specs: dict[int, TreeSpec] = {}
        self.spans: dict[int, int] = {}  # by spec, the steps of all paths to its leaves
        self.meshes: dict[int, DeviceMesh] = {}
        self.leaves: dict[int, object] = {}
        self.shards: dict[int, list[ShardMetadata]] = {}
        # What is shared and yet has to be looked at by each that shares it.
        self.left = 4 * length + _ALWAYS

    def charge(self, count: int) -> None:
        self.left -= count
        if self.left < 0:
            refuse("its parts share each other more often than its length allows")

    def state(self, value: object) -> _StateDictMeta:
        f = _fields(value, _RECORDS + "_StateDictMeta")
        spec = self.tree(f["treespec"])
        paths, leaves = _typed(f["paths"], list), _typed(f["non_tensor_leaves"], list)
        if not len(paths) == len(leaves) == spec.num_leaves:
            refuse(
                f"its tree has {spec.num_leaves} leaves, but {len(paths)} paths and "
                f"{len(leaves)} leaves came with it"
            )
        # A leaf takes more bytes than this with its path.
        if len(leaves) > self.length // 16 + _ALWAYS:
            refuse("it has more leaves than its length allows")
        if spec.num_nodes > self.length or not all(type(path) is tuple for path in paths):
            refuse("its tree or its paths are malformed")
        self.charge(self.spans.get(id(f["treespec"]), 0))
        # The tree tells the paths; those beside it could point one leaf at another's place.
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
            self.charge(len(found.local_shards_meta))
        return found

    def new_leaf(self, value: Any) -> object:
        name = value.name if type(value) is PickledCall else ""
        if name == "builtins.bytearray":
            self.charge(sum(len(data) for data in value.args if type(data) is bytes))
        if name == _RECORDS + "_TensorMeta":
            return self.tensor(value)
        if name == _RECORDS + "_DTensorMeta":
            f = _fields(value, name)
            return self.dtensor(self.tensor(f["local"]), f["spec"])
        if name == _RECORDS + "_ShardedTensorMeta":
            return self.sharded(value)
        return _plain(value)

    def tree(self, value: Any, depth: int = 0) -> TreeSpec:
        if depth > _MAX_DEPTH:
            refuse(f"its tree is deeper than {_MAX_DEPTH}")
        if type(value) is PickledCall and value.name == _PYTREE + "LeafSpec":
            return tree_structure(None)
        if id(value) not in self.specs:
            f = _fields(value, _PYTREE + "TreeSpec", "type", "_context", "_children")
            # torch before 2.12 keeps these two in public fields.
            context = f.get("_context", f.get("context"))
            below = _typed(f.get("_children", f.get("children_specs")), list)
            self.charge(len(below))
            children = [self.tree(child, depth + 1) for child in below]
            deeper = sum(self.spans.get(id(child), 0) for child in below)
            self.spans[id(value)] = deeper + sum(child.num_leaves for child in children)
            kind = _typed(f["type"], Name).name
            self.specs[id(value)] = self.container(kind, context, children)
        return self.specs[id(value)]

    def container(self, kind: str, context: Any, children: list[TreeSpec]) -> TreeSpec:
        width = len(children)
        if kind == "collections.namedtuple":
            cls = _typed(context, Name).namedtuple
            if cls is None or len(vars(cls)["_fields"]) != width:
                refuse("a namedtuple does not fit its class")
            return TreeSpec(collections.namedtuple, cls, children)
        if kind not in _CONTAINERS:
            refuse(f"{kind!r} is no container of a state")
        cls = _CONTAINERS[kind]
        if cls in (list, tuple):
            return TreeSpec(cls, _typed(context, type(None)), children)
        if cls is collections.deque:
            room = None if context is None else _count(context)
            return TreeSpec(cls, room, children)
        factory = None
        if cls is collections.defaultdict:
            named, context = _typed(context, list)
            factory = None if named is None else _FACTORIES[_typed(named, Name).name]
        before, table = self.left, KeyTable()
        keys = [self.key(key) for key in _typed(context, list)]
        table.put(keys, weight=before - self.left)
        if len(table) != width or len(keys) != width:
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
        f = _fields(value, _RECORDS + "_TensorMeta")
        shape, stride = _size(f["shape"]), _counts(f["stride"], _MAX_DIMS)
        dtype, nbytes = _dtype(f["dtype"]), _count(f["nbytes"], _MAX_BYTES)
        offset = _count(f["storage_offset"])
        if len(shape) != len(stride) or math.prod(shape) >= 1 << 62:
            refuse("a tensor has a malformed shape")
        if 0 not in shape:
            reach = offset + 1 + sum((n - 1) * step for n, step in zip(shape, stride, strict=True))
            if reach * dtype.itemsize > nbytes * _PER_BYTE.get(dtype, 1):
                refuse(f"a tensor reaches past its {nbytes} bytes")
        return _TensorMeta(shape, dtype, offset, stride, nbytes)

    def dtensor(self, local: _TensorMeta, value: Any) -> _DTensorMeta:
        f = _fields(value, _SPEC + "DTensorSpec")
        mesh = self.mesh(f["mesh"])
        placements = tuple(_placement(p) for p in _typed(f["placements"], tuple))
        meta = _made(f["tensor_meta"], _SPEC + "TensorMeta")
        shape, stride, dtype = meta
        whole = TensorMeta(_size(shape), _counts(stride, _MAX_DIMS), _dtype(dtype))
        dims = len(whole.shape)
        if len(placements) != mesh.ndim or dims != len(local.shape) or whole.dtype != local.dtype:
            refuse("a DTensor does not fit its local tensor or its mesh")
        if any(getattr(p, "dim", 0) >= max(dims, 1) for p in placements):
            refuse("a DTensor is sharded along a dimension that it does not have")
        options: dict[str, Any] = {}
        if f.get("use_strided_shard_as_shard_order") is not None:
            strided = _typed(f["use_strided_shard_as_shard_order"], bool)
            options["use_strided_shard_as_shard_order"] = strided
        if f.get("shard_order") is not None:
            pairs = [_made(e, _SPEC + "ShardOrderEntry") for e in _typed(f["shard_order"], tuple)]
            order = tuple(ShardOrderEntry(_count(dim), _counts(along)) for dim, along in pairs)
            if any(e.tensor_dim >= dims or max(e.mesh_dims) >= mesh.ndim for e in order):
                refuse("the shard order of a DTensor does not fit it")
            options["shard_order"] = order
        spec = DTensorSpec(mesh, placements, tensor_meta=whole, **options)
        return _DTensorMeta(local, spec)

    def mesh(self, value: Any, depth: int = 0) -> DeviceMesh:
        if depth > _MAX_DEPTH:
            refuse(f"its meshes are nested deeper than {_MAX_DEPTH}")
        if id(value) in self.meshes:
            return self.meshes[id(value)]
        f = _fields(value, _MESH)
        # A root mesh and its flattened meshes name each other, so it is known before it is whole.
        # Its constructor would create process groups; setting its state only looks them up.
        mesh = self.meshes[id(value)] = DeviceMesh.__new__(DeviceMesh)
        self.charge(len(_typed(f["_flatten_rank_map"], tuple)))
        ranks = _counts(f["_flatten_rank_map"])
        names, root, where = f["_mesh_dim_names"], f["_root_mesh"], f["_coordinate_on_dim"]
        flat = _typed(f["_flatten_mapping"], dict)
        self.charge(len(flat))
        state: dict[str, object] = {
            "_device_type": _typed(f["_device_type"], str),
            "_layout": _mesh_layout_of(f["_layout"], len(ranks)),
            "_rank_map": torch.tensor(ranks, dtype=torch.int, device="cpu"),
            "_flatten_rank_map": ranks,
            "_mesh_dim_names": None if names is None else _texts(_typed(names, tuple)),
            "_root_mesh": None if root is None else self.mesh(root, depth + 1),
            "_flatten_mapping": {n: self.mesh(m, depth + 1) for n, m in flat.items()},
            "_rank": _count(f["_rank"]),
            "_coordinate_on_dim": None if where is None else _counts(where),
            "_thread_id": None,
            "_hash": None,
        }
        if "_dim_group_names" in f:
            state["_dim_group_names"] = list(_texts(_typed(f["_dim_group_names"], list)))
        mesh.__setstate__(state)
        return mesh

    def sharded(self, value: object) -> _ShardedTensorMeta:
        f = _fields(value, _RECORDS + "_ShardedTensorMeta")
        mine, where = f["local_shards_meta"], f["local_shards_shard_metadata"]
        self.charge(8 * (len(_typed(mine, list)) + len(_typed(where, list))))
        local = [self.tensor(t) for t in mine]
        boxes = [_shard(s) for s in where]
        g = _fields(f["sharded_tensor_metadata"], _SHARDS + "ShardedTensorMetadata")
        told = _typed(g["shards_metadata"], list)
        self.charge(16 * len(told))
        if id(told) not in self.shards:
            self.shards[id(told)] = [_shard(s) for s in told]
        shards = self.shards[id(told)]
        whole = ShardedTensorMetadata(shards, _size(g["size"]), _properties(g["tensor_properties"]))
        if len(local) != len(boxes) or any(
            list(t.shape) != box.shard_sizes or t.dtype != whole.tensor_properties.dtype
            for t, box in zip(local, boxes, strict=True)
        ):
            refuse("the shards of a ShardedTensor do not fit their records")
        for box in (*boxes, *shards):
            ends = [o + n for o, n in zip(box.shard_offsets, box.shard_sizes, strict=True)]
            if len(ends) != len(whole.size) or any(
                end > size for end, size in zip(ends, whole.size, strict=True)
            ):
                refuse("a shard reaches past its ShardedTensor")
        return _ShardedTensorMeta(local, boxes, whole)


def _fields(value: object, name: str, *order: str) -> dict[str, Any]:
    """The fields set on a new `name`; a class with slots sets a list of them, in `order`."""
    if type(value) is not PickledCall or value.name != name or value.args:
        refuse(f"{name} was expected")
    state = value.state
    if type(state) is tuple and len(state) == 2 and state[0] is None:
        state = state[1]
    if type(state) is list:
        state = dict(zip(order, state, strict=False))
    return dict(_typed(state, dict))


def _made(value: object, name: str) -> tuple[Any, ...]:
    """The arguments with which a `name` is to be made, when nothing else is set on it."""
    if type(value) is not PickledCall or value.name != name or value.state is not None:
        refuse(f"{name} was expected")
    return value.args


def _typed(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        refuse(f"{kind.__name__} was expected, not {type(value).__name__}")
    return value


def _count(value: object, cap: int = 1 << 62) -> int:
    if type(value) is not int or not 0 <= value < cap:
        refuse("a number is out of bounds")
    return value


def _counts(value: object, most: int | None = None) -> tuple[int, ...]:
    if most is not None and len(_typed(value, tuple)) > most:
        refuse(f"a shape has more than {most} dimensions")
    return tuple([_count(n) for n in _typed(value, tuple)])


def _texts(value: list[object] | tuple[object, ...]) -> tuple[str, ...]:
    return tuple(_typed(text, str) for text in value)


def _size(value: object) -> torch.Size:
    (numbers,) = _made(value, "torch.Size")
    return torch.Size(_counts(numbers, _MAX_DIMS))


def _dtype(value: object) -> torch.dtype:
    return _DTYPES[_typed(value, Name).name]


def _device(value: object) -> torch.device:
    args = _made(value, "torch.device")
    if not 1 <= len(args) <= 2:
        refuse("a device is malformed")
    return torch.device(_typed(args[0], str), *(_count(n, 1 << 15) for n in args[1:]))


_VALUES = frozenset((*SCALARS, bytearray, set, frozenset))


def _plain(value: Any) -> object:
    """A leaf that is no tensor."""
    if type(value) in _VALUES:
        return value
    if type(value) is Name and value.name in _DTYPES:
        return _DTYPES[value.name]
    if type(value) is PickledCall:
        if value.name == "torch.Size":
            return _size(value)
        if value.name == "torch.device":
            return _device(value)
        if value.name == "builtins.complex":
            real, imag = _made(value, value.name)
            return complex(_typed(real, float), _typed(imag, float))
        if value.name == "builtins.bytearray":
            args = _made(value, value.name)
            return bytearray(_typed(args[0], bytes)) if args else bytearray()
    refuse("a leaf is neither a tensor nor a plain value")


def _placement(value: Any) -> Placement:
    name = _typed(value, PickledCall).name
    if name == _PLACEMENT + "Replicate":
        return Replicate()
    f = _fields(value, name)
    if name == _PLACEMENT + "Shard":
        return Shard(_count(f["dim"]))
    if name == _PLACEMENT + "_StridedShard":
        return _StridedShard(_count(f["dim"]), split_factor=_count(f["split_factor"]))
    if name == _PLACEMENT + "Partial" and f["reduce_op"] in _REDUCE_OPS:
        return Partial(f["reduce_op"])
    refuse("a placement of a DTensor is unknown")


def _mesh_layout_of(value: object, ranks: int) -> Any:
    axes = []
    for axis in _typed(_fields(value, _LAYOUT + "_MeshLayout")["axes"], tuple):
        f = _fields(axis, _LAYOUT + "_FlatLayout")
        axes.append((_counts(f["shape"]), _counts(f["stride"])))
    reach = 1
    for shape, stride in axes:
        reach += sum((n - 1) * step for n, step in zip(shape, stride, strict=True))
    if reach > ranks or any(n < 1 for shape, _ in axes for n in shape):
        refuse("a mesh reaches past its ranks")
    return _mesh_layout._MeshLayout([_mesh_layout._FlatLayout(*axis) for axis in axes])


def _shard(value: object) -> ShardMetadata:
    f = _fields(value, _SHARD)
    placement = f["placement"]
    lists = (_typed(f[name], list) for name in ("shard_offsets", "shard_sizes"))
    offsets, sizes = (_counts(tuple(numbers[: _MAX_DIMS + 1]), _MAX_DIMS) for numbers in lists)
    where = None if placement is None else _remote(placement)
    return ShardMetadata(list(offsets), list(sizes), where)


def _remote(value: object) -> _remote_device:
    f = _fields(value, _REMOTE)
    device, worker, rank = _device(f["_device"]), f["_worker_name"], f["_rank"]
    if rank is not None:
        return _remote_device(f"rank:{_count(rank)}/{device}")
    return _remote_device(device if worker is None else f"{_typed(worker, str)}/{device}")


def _properties(value: Any) -> TensorProperties:
    if type(value) is not PickledCall or value.name != _SHARDS + "TensorProperties" or value.args:
        refuse("TensorProperties was expected")
    dtype, layout, requires_grad, memory_format, pin_memory = _typed(value.state, tuple)
    (layout_name,) = _made(layout, "torch.serialization._get_layout")
    (encoding,) = _made(memory_format, _SHARDS + "MEM_FORMAT_ENCODING")
    return TensorProperties(
        _dtype(dtype),
        _LAYOUTS[_typed(layout_name, str)],
        _typed(requires_grad, bool),
        _MEMORY_FORMATS[_count(encoding)],
        _typed(pin_memory, bool),
    )
