"""The private names of torch that the drop-ins use, besides those that the library does.

`NAMES` and `FIELDS` say where each one is, and the names of this module are their keys. A test has
a case for each. Names that torch's pickles hold are text, and in the modules that read them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchrelay.state.torch_names import lazily

if TYPE_CHECKING:
    from torch.distributed.checkpoint._nested_dict import flatten_state_dict
    from torch.distributed.checkpoint._pg_transport import (
        _DTensorMeta,
        _ShardedTensorMeta,
        _StateDictMeta,
        _TensorMeta,
        _timeit,
    )
    from torch.distributed.checkpoint.utils import _DistWrapper as DistWrapper
    from torch.utils._pytree import KeyPath, keystr, tree_flatten_with_path, tree_unflatten

    __all__ = [
        "DistWrapper",
        "KeyPath",
        "_DTensorMeta",
        "_ShardedTensorMeta",
        "_StateDictMeta",
        "_TensorMeta",
        "_timeit",
        "flatten_state_dict",
        "keystr",
        "tree_flatten_with_path",
        "tree_unflatten",
    ]

_PYTREE = "torch.utils._pytree."
_RECORDS = "torch.distributed.checkpoint._pg_transport."
_GROUPS = "torch.distributed.distributed_c10d."
_SPEC = "torch.distributed.tensor._dtensor_spec."

NAMES = {
    # States as torch flattens them.
    **{name: _PYTREE + name for name in ("keystr", "tree_flatten_with_path", "tree_unflatten")},
    "flatten_state_dict": "torch.distributed.checkpoint._nested_dict.flatten_state_dict",
    # The records of torch's `PGTransport`, under its own names.
    **{
        name: _RECORDS + name
        for name in ("_DTensorMeta", "_ShardedTensorMeta", "_StateDictMeta", "_TensorMeta")
    },
    "_timeit": _RECORDS + "_timeit",
    # DTensors in these records.
    "DTensorSpec": _SPEC + "DTensorSpec",
    "ShardOrderEntry": _SPEC + "ShardOrderEntry",
    "TensorMeta": _SPEC + "TensorMeta",
    "StridedShard": "torch.distributed.tensor.placement_types._StridedShard",
    "MeshLayout": "torch.distributed._mesh_layout._MeshLayout",
    # Groups.
    "DistWrapper": "torch.distributed.checkpoint.utils._DistWrapper",
    "new_group_helper": _GROUPS + "_new_process_group_helper",
    "default_store": _GROUPS + "_get_default_store",
    "world": _GROUPS + "_world",
}
FIELDS = {
    "layout_of": "torch.distributed.device_mesh.DeviceMesh._layout",
    "coordinate_of": "torch.distributed.device_mesh.DeviceMesh._coordinate_on_dim",
    "device_types_of": "torch.distributed.ProcessGroup._device_types",
    "backend_finder_of": "torch.distributed.ProcessGroup._get_backend",
    "timeout_of": "torch._C._distributed_c10d.Backend.Options._timeout",
}
FLAT_LAYOUT = "torch.distributed._mesh_layout._FlatLayout"  # since torch 2.12

__getattr__ = lazily(globals(), NAMES, FIELDS)
