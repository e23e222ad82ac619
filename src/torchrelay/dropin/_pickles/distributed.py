"""DTensors as torch pickles them, made of checked fields."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Partial, Placement, Replicate, Shard

from torchrelay.dropin import torch_private as private
from torchrelay.dropin._pickles import unpickler as p
from torchrelay.dropin._torch_records import _DTensorMeta, _TensorMeta
from torchrelay.state.torch_names import if_imported

_LAYOUT = "torch.distributed._mesh_layout."
_SPEC = "torch.distributed.tensor._dtensor_spec."
_PLACEMENT = "torch.distributed.tensor.placement_types."
_MESH = "torch.distributed.device_mesh.DeviceMesh"
_REDUCE_OPS = ("sum", "avg", "min", "max", "product", "band", "bor", "bxor", "premul_sum")

NAMES = (
    *(_LAYOUT + n for n in ("_MeshLayout", "_FlatLayout")),
    *(_SPEC + n for n in ("DTensorSpec", "TensorMeta", "ShardOrderEntry")),
    *(_PLACEMENT + n for n in ("Shard", "_StridedShard", "Replicate", "Partial")),
    _MESH,
    # A mesh carries its ranks twice: as a tensor, whose bytes are left unread, and as a tuple.
    *("torch._utils._rebuild_tensor_v2", "torch.storage._load_from_bytes"),
)


class DTensors:
    """Records of DTensors. A mesh that the pickle shares among them is made once."""

    def __init__(self, work: p.WorkLimit) -> None:
        self.work = work
        self.meshes: dict[int, DeviceMesh] = {}  # by the identity of their values

    def record(self, local: _TensorMeta, value: object) -> _DTensorMeta:
        f = p.fields(value, _SPEC + "DTensorSpec")
        mesh = self.mesh(f["mesh"])
        placements = tuple([_placement(one) for one in p.dims(f["placements"])])
        shape, stride, dtype = p.named(f["tensor_meta"], _SPEC + "TensorMeta").args
        whole = private.TensorMeta(
            p.typed(shape, torch.Size), p.counts(stride), p.typed(dtype, torch.dtype)
        )
        dims = len(whole.shape)
        if len(placements) != mesh.ndim or dims != len(local.shape) or whole.dtype != local.dtype:
            p.refuse("a DTensor does not fit its local tensor or its mesh")
        if any(getattr(one, "dim", 0) >= max(dims, 1) for one in placements):
            p.refuse("a DTensor is sharded along a dimension that it does not have")
        options: dict[str, Any] = {}
        strided = "use_strided_shard_as_shard_order"
        if f.get(strided) is not None:
            options[strided] = p.typed(f[strided], bool)
        if f.get("shard_order") is not None:
            entries = p.dims(f["shard_order"])
            pairs = [p.named(one, _SPEC + "ShardOrderEntry").args for one in entries]
            order = tuple(
                [private.ShardOrderEntry(p.count(dim), p.counts(along)) for dim, along in pairs]
            )
            if any(e.tensor_dim >= dims or max(e.mesh_dims) >= mesh.ndim for e in order):
                p.refuse("the shard order of a DTensor does not fit it")
            options["shard_order"] = order
        spec = private.DTensorSpec(mesh, placements, tensor_meta=whole, **options)
        return _DTensorMeta(local, spec)

    def mesh(self, value: Any) -> DeviceMesh:
        """A mesh without the one that it is a part of. A constructor would create process groups;
        setting its state only looks them up."""
        if id(value) in self.meshes:
            return self.meshes[id(value)]
        f = p.fields(value, _MESH)
        self.work.charge(len(p.typed(f["_flatten_rank_map"], tuple)))
        ranks = tuple([p.count(rank) for rank in f["_flatten_rank_map"]])
        names, where = f["_mesh_dim_names"], f["_coordinate_on_dim"]
        state: dict[str, object] = {
            "_device_type": p.typed(f["_device_type"], str),
            "_layout": _layout(f["_layout"], len(ranks)),
            "_rank_map": torch.tensor(ranks, dtype=torch.int, device="cpu"),
            "_flatten_rank_map": ranks,
            "_mesh_dim_names": None if names is None else _texts(p.dims(names)),
            "_root_mesh": None,
            "_flatten_mapping": {},
            "_rank": p.count(f["_rank"]),
            "_coordinate_on_dim": None if where is None else p.counts(where),
            "_thread_id": None,
            "_preserve_rank_order": p.typed(f.get("_preserve_rank_order", False), bool),
            "_hash": None,
        }
        if "_dim_group_names" in f:
            groups = tuple(p.typed(f["_dim_group_names"], list))
            state["_dim_group_names"] = list(_texts(p.dims(groups)))
        mesh = self.meshes[id(value)] = DeviceMesh.__new__(DeviceMesh)
        mesh.__setstate__(state)
        return mesh


def _texts(value: tuple[object, ...]) -> tuple[str, ...]:
    return tuple([p.typed(text, str) for text in value])


def _layout(value: object, ranks: int) -> Any:
    f = p.fields(value, _LAYOUT + "_MeshLayout")
    axes = _axes(f)
    reach = 1
    for shape, stride in axes:
        reach += sum((n - 1) * step for n, step in zip(shape, stride, strict=True))
    if reach > ranks or any(n < 1 for shape, _ in axes for n in shape):
        p.refuse("a mesh reaches past its ranks")
    layout, flat = private.MeshLayout, if_imported(private.FLAT_LAYOUT)
    if flat is not None:
        return layout([flat(*axis) for axis in axes])
    if "shape" in f:  # of the same torch: as it was, tuples of one number included
        return layout(f["shape"], f["stride"])
    return layout(*(tuple([_bare(axis[n]) for axis in axes]) for n in (0, 1)))


_Axis = tuple[tuple[int, ...], tuple[int, ...]]


def _axes(f: dict[str, Any]) -> list[_Axis]:
    """Shapes and strides of each dimension of a mesh; a flattened dimension has several."""
    if "axes" in f:
        flat = [p.fields(axis, _LAYOUT + "_FlatLayout") for axis in p.dims(f["axes"])]
        return [(p.counts(axis["shape"]), p.counts(axis["stride"])) for axis in flat]
    # torch 2.11 has two tuples, whose elements are numbers or tuples of them.
    shapes, strides = p.dims(_several(f["shape"])), p.dims(_several(f["stride"]))
    if len(shapes) != len(strides):
        p.refuse("the layout of a mesh has more sizes than strides, or fewer")
    return [
        (p.counts(_several(shape)), p.counts(_several(stride)))
        for shape, stride in zip(shapes, strides, strict=True)
    ]


def _several(value: object) -> tuple[object, ...]:
    return value if isinstance(value, tuple) else (value,)


def _bare(numbers: tuple[int, ...]) -> int | tuple[int, ...]:
    return numbers[0] if len(numbers) == 1 else numbers


def _placement(value: Any) -> Placement:
    name = p.typed(value, p.PickledCall).name
    if name == _PLACEMENT + "Replicate":
        return Replicate()
    f = p.fields(value, name)
    if name == _PLACEMENT + "Shard":
        return Shard(p.count(f["dim"]))
    if name == _PLACEMENT + "_StridedShard":
        make: Any = private.StridedShard
        strided: Placement = make(p.count(f["dim"]), split_factor=p.count(f["split_factor"]))
        return strided
    if name == _PLACEMENT + "Partial" and f["reduce_op"] in _REDUCE_OPS:
        return Partial(f["reduce_op"])
    p.refuse("a placement of a DTensor is unknown")
