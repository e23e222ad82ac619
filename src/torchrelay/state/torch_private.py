"""The private names of torch that the library uses. The drop-ins have some of their own, in
`dropin/torch_private.py`; no other module uses any.

`NAMES` and `FIELDS` say where each one is, and the names of this module are their keys. A test has
a case for each, which fails with the name that a release of torch has moved.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from torchrelay.errors import UnsupportedTorchError
from torchrelay.state.torch_names import if_imported, lazily

if TYPE_CHECKING:
    from torch.distributed._shard.metadata import ShardMetadata
    from torch.distributed._shard.sharded_tensor.api import ShardedTensor
    from torch.distributed._shard.sharded_tensor.metadata import TensorProperties
    from torch.distributed.tensor._dtensor_spec import DTensorSpec

    __all__ = ["DTensorSpec", "ShardMetadata", "ShardedTensor", "TensorProperties"]

_SHARD = "torch.distributed._shard."
_SHARDED = _SHARD + "sharded_tensor."
_SPEC = "torch.distributed.tensor._dtensor_spec."
_TENSOR = "torch.Tensor."

NAMES = {
    # Shards as torch had them before DTensors.
    "OldShard": _SHARDED + "shard.Shard",
    "ShardMetadata": _SHARD + "metadata.ShardMetadata",
    "ShardedTensor": _SHARDED + "api.ShardedTensor",
    "ShardedTensorMetadata": _SHARDED + "metadata.ShardedTensorMetadata",
    "TensorProperties": _SHARDED + "metadata.TensorProperties",
    "sharded_of_shards": (
        _SHARDED + "api.ShardedTensor._init_from_local_shards_and_global_metadata"
    ),
    # DTensors.
    "DTensorSpec": _SPEC + "DTensorSpec",
    "TensorMeta": _SPEC + "TensorMeta",
    "StridedShard": "torch.distributed.tensor.placement_types._StridedShard",
    # Kinds of tensors.
    "is_functional": "torch._is_functional_tensor",
    "is_functorch_wrapped": "torch._C._functorch.is_functorch_wrapped_tensor",
    # All tensors at once.
    "copy_each": "torch._foreach_copy_",
    "CompiledModule": "torch._dynamo.eval_frame.OptimizedModule",
}
FIELDS = {
    "storage_handle_of": "torch.UntypedStorage._cdata",
    "version_of": _TENSOR + "_version",
    "is_zero_tensor_of": _TENSOR + "_is_zerotensor",
    "indices_of": _TENSOR + "_indices",
    "values_of": _TENSOR + "_values",
    "local_tensor_of": "torch.distributed.tensor.DTensor._local_tensor",
    "spec_of": "torch.distributed.tensor.DTensor._spec",
    "device_types_of": "torch.distributed.ProcessGroup._device_types",
    "backend_finder_of": "torch.distributed.ProcessGroup._get_backend",
}
PARAMETERS = {"torch.distributed.device_mesh.DeviceMesh": ("_init_backend", "_rank")}
MARK = _TENSOR + "_is_param"  # of parameters of a subclass; torch only declares it
OPTIONAL = "torch._C._cuda_hasPrimaryContext"  # a build without CUDA has no contexts of it
SLOW_TO_IMPORT = "torch._dynamo"  # torch's optimizers import it when one is made

__getattr__ = lazily(globals(), NAMES, FIELDS)
_own: Any = sys.modules[__name__]


def has_context(device: int) -> bool:
    """Whether this process has set up a GPU: doing so takes half a gigabyte of its memory."""
    ask = getattr(torch._C, "_cuda_hasPrimaryContext", None)
    return ask is None or bool(ask(device))


def sharded_types() -> tuple[type, ...]:
    """The type ShardedTensor; none in a process that has not imported it, and so has none of it."""
    found = if_imported(NAMES["ShardedTensor"])
    return () if found is None else (found,)


def compiled_modules() -> tuple[type, ...]:
    """The type of the modules that torch.compile makes; none where it was never called."""
    found = if_imported(NAMES["CompiledModule"])
    return () if found is None else (found,)


def is_marked_parameter(tensor: torch.Tensor) -> bool:
    """Whether torch has marked an instance of another class as a parameter."""
    return bool(getattr(tensor, "_is_param", False))


def device_backends(group: object) -> dict[str, str]:
    """The name of a process group's backend for each kind of device; empty if it does not tell."""
    try:
        known = _own.device_types_of(group)
    except (AttributeError, UnsupportedTorchError):
        return {}
    find = _own.backend_finder_of(group)
    return {device.type: find(device).name().lower() for device in known}


def mesh_without_groups(
    device_type: str, ranks: torch.Tensor, rank: int, names: tuple[str, ...] | None
) -> DeviceMesh:
    """A mesh as one rank sees it, with no process groups behind it."""
    return DeviceMesh(device_type, ranks, mesh_dim_names=names, _init_backend=False, _rank=rank)
