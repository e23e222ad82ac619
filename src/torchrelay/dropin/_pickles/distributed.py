"""DTensors and ShardedTensors as torch pickles them, made of checked fields."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.distributed import _mesh_layout
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor.metadata import ShardedTensorMetadata, TensorProperties
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

from torchrelay.dropin._pickles.unpickler import (
    MAX_DIMS,
    PickledCall,
    WorkLimit,
    count,
    counts,
    device,
    dtype,
    fields,
    made,
    properties,
    refuse,
    size,
    typed,
)
from torchrelay.dropin._torch_records import _DTensorMeta, _ShardedTensorMeta, _TensorMeta

_LAYOUT = "torch.distributed._mesh_layout."
_SPEC = "torch.distributed.tensor._dtensor_spec."
_PLACEMENT = "torch.distributed.tensor.placement_types."
_MESH = "torch.distributed.device_mesh.DeviceMesh"
_METADATA = "torch.distributed._shard.sharded_tensor.metadata."
_SHARD = "torch.distributed._shard.metadata.ShardMetadata"
_REMOTE = "torch.distributed.remote_device._remote_device"
_REDUCE_OPS = ("sum", "avg", "min", "max", "product", "band", "bor", "bxor", "premul_sum")

NAMES = (
    *(_LAYOUT + n for n in ("_MeshLayout", "_FlatLayout")),
    *(_SPEC + n for n in ("DTensorSpec", "TensorMeta", "ShardOrderEntry")),
    *(_PLACEMENT + n for n in ("Shard", "_StridedShard", "Replicate", "Partial")),
    *(_METADATA + n for n in ("ShardedTensorMetadata", "TensorProperties", "MEM_FORMAT_ENCODING")),
    *(_MESH, _SHARD, _REMOTE),
    # A mesh carries its ranks twice: as a tensor, whose bytes are left unread, and as a tuple.
    *("torch._utils._rebuild_tensor_v2", "torch.storage._load_from_bytes"),
    *("torch.serialization._get_layout", "torch.Size", "torch.device"),
)


class DTensors:
    """Records of DTensors. A mesh that the pickle shares among them is made once."""

    def __init__(self, work: WorkLimit) -> None:
        self.work = work
        self.meshes: dict[int, DeviceMesh] = {}  # by the identity of their values

    def record(self, local: _TensorMeta, value: object) -> _DTensorMeta:
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

    def mesh(self, value: Any) -> DeviceMesh:
        """A mesh without the one that it is a part of. A constructor would create process groups;
        setting its state only looks them up."""
        if id(value) in self.meshes:
            return self.meshes[id(value)]
        f = fields(value, _MESH)
        self.work.charge(len(typed(f["_flatten_rank_map"], tuple)))
        ranks = counts(f["_flatten_rank_map"])
        names, where = f["_mesh_dim_names"], f["_coordinate_on_dim"]
        state: dict[str, object] = {
            "_device_type": typed(f["_device_type"], str),
            "_layout": _layout(f["_layout"], len(ranks)),
            "_rank_map": torch.tensor(ranks, dtype=torch.int, device="cpu"),
            "_flatten_rank_map": ranks,
            "_mesh_dim_names": None if names is None else _texts(typed(names, tuple)),
            "_root_mesh": None,
            "_flatten_mapping": {},
            "_rank": count(f["_rank"]),
            "_coordinate_on_dim": None if where is None else counts(where),
            "_thread_id": None,
            "_hash": None,
        }
        if "_dim_group_names" in f:
            state["_dim_group_names"] = list(_texts(typed(f["_dim_group_names"], list)))
        mesh = self.meshes[id(value)] = DeviceMesh.__new__(DeviceMesh)
        mesh.__setstate__(state)
        return mesh


def _texts(value: list[object] | tuple[object, ...]) -> tuple[str, ...]:
    return tuple(typed(text, str) for text in value)


def _layout(value: object, ranks: int) -> Any:
    f = fields(value, _LAYOUT + "_MeshLayout")
    axes = _axes(f)
    reach = 1
    for shape, stride in axes:
        reach += sum((n - 1) * step for n, step in zip(shape, stride, strict=True))
    if reach > ranks or any(n < 1 for shape, _ in axes for n in shape):
        refuse("a mesh reaches past its ranks")
    layout: Any = _mesh_layout._MeshLayout
    flat: Any = getattr(_mesh_layout, "_FlatLayout", None)
    if flat is not None:
        return layout([flat(*axis) for axis in axes])
    if "shape" in f:  # of the same torch: as it was, tuples of one number included
        return layout(f["shape"], f["stride"])
    return layout(*(tuple(_bare(axis[n]) for axis in axes) for n in (0, 1)))


_Axis = tuple[tuple[int, ...], tuple[int, ...]]


def _axes(f: dict[str, Any]) -> list[_Axis]:
    """Shapes and strides of each dimension of a mesh; a flattened dimension has several."""
    if "axes" in f:
        flat = [fields(axis, _LAYOUT + "_FlatLayout") for axis in typed(f["axes"], tuple)]
        return [(counts(axis["shape"]), counts(axis["stride"])) for axis in flat]
    # torch 2.11 has two tuples, whose elements are numbers or tuples of them.
    shapes, strides = _several(f["shape"]), _several(f["stride"])
    if len(shapes) != len(strides):
        refuse("the layout of a mesh has more sizes than strides, or fewer")
    return [
        (counts(_several(shape)), counts(_several(stride)))
        for shape, stride in zip(shapes, strides, strict=True)
    ]


def _several(value: object) -> tuple[object, ...]:
    return value if isinstance(value, tuple) else (value,)


def _bare(numbers: tuple[int, ...]) -> int | tuple[int, ...]:
    return numbers[0] if len(numbers) == 1 else numbers


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


def sharded_record(
    local: list[_TensorMeta], boxes: object, metadata: object, work: WorkLimit
) -> _ShardedTensorMeta:
    """The record of a ShardedTensor with these local tensors, if they fit the rest of it."""
    f = fields(metadata, _METADATA + "ShardedTensorMetadata")
    whole = size(f["size"])
    mine, every = typed(boxes, list), typed(f["shards_metadata"], list)
    work.charge((len(local) + len(mine) + len(every)) * (8 + 4 * len(whole)))
    kind, layout = properties(f["tensor_properties"], _METADATA + "TensorProperties")
    here, all_shards = ([_shard(box, whole) for box in some] for some in (mine, every))
    if [(list(t.shape), t.dtype) for t in local] != [(box.shard_sizes, kind) for box in here]:
        refuse("the shards of a ShardedTensor do not fit their records")
    # The receiver makes them contiguous, so an expanded one could ask for any amount of memory.
    if any(math.prod(t.shape) * t.dtype.itemsize > t.nbytes for t in local):
        refuse("a shard of a ShardedTensor has more elements than bytes")
    if layout != "torch.strided":
        refuse(f"a ShardedTensor has the layout {layout!r:.50}")
    told = ShardedTensorMetadata(all_shards, whole, TensorProperties(kind))
    return _ShardedTensorMeta(local, here, told)


def _shard(value: object, whole: torch.Size) -> ShardMetadata:
    """A shard that lies inside of its tensor."""
    f = fields(value, _SHARD)
    offsets, sizes = (_numbers(f[name]) for name in ("shard_offsets", "shard_sizes"))
    if not len(offsets) == len(sizes) == len(whole) or any(
        start + n > end for start, n, end in zip(offsets, sizes, whole, strict=True)
    ):
        refuse("a shard reaches past its ShardedTensor")
    placement = None if f["placement"] is None else _remote(f["placement"])
    return ShardMetadata(offsets, sizes, placement)


def _numbers(value: Any) -> list[int]:
    return list(counts(tuple(typed(value, list)[: MAX_DIMS + 1]), MAX_DIMS))


def _remote(value: object) -> _remote_device:
    f = fields(value, _REMOTE)
    where, worker, rank = device(f["_device"]), f["_worker_name"], f["_rank"]
    if rank is not None:
        return _remote_device(f"rank:{count(rank)}/{where}")
    return _remote_device(where if worker is None else f"{typed(worker, str)}/{where}")
