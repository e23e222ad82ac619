"""The records of torch's `PGTransport` and their helpers, under torch's own names.

The record classes are torch's: a stock peer unpickles them by their import path. The helpers keep
torch's contracts and bytes, and refuse by path what would arrive as something else.
"""

from __future__ import annotations

from typing import cast

import torch
from torch.distributed.tensor import DTensor

from torchrelay.dropin import torch_private as private
from torchrelay.dropin.torch_private import (
    _DTensorMeta,
    _ShardedTensorMeta,
    _StateDictMeta,
    _TensorMeta,
    _timeit,
)
from torchrelay.errors import UnsupportedLeafError
from torchrelay.state.backing import with_memory
from torchrelay.state.tensors import dtensor_parts, is_sharded

__all__ = [
    "_DTensorMeta",
    "_ShardedTensorMeta",
    "_StateDictMeta",
    "_TensorMeta",
    "_cast_tensor",
    "_prepare_state_dict",
    "_prepare_tensor",
    "_timeit",
]


def _cast_tensor(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The whole storage under `tensor` as a flat tensor of `dtype`; no byte is copied.

    Bytes past the last whole item are out of its reach; as `uint8` all of them are in it.
    """
    if not _is_plain(tensor):
        raise AssertionError(f"can only cast standard tensors not {type(tensor)}")
    return torch.empty(0, dtype=dtype, device=tensor.device).set_(tensor.untyped_storage())


def _prepare_tensor(tensor: torch.Tensor) -> tuple[torch.Tensor, _TensorMeta]:
    """The bytes of the tensor's storage, and the record that finds the tensor in them."""
    return _prepare(tensor, path=None)


def _prepare_state_dict(
    state_dict: object,
    device: torch.device,
) -> tuple[_StateDictMeta, list[torch.Tensor]]:
    """The record of a whole state and its storages in the order in which they are sent.

    `device` is there for torch's signature: moving to it is left to the sender, tensor by tensor.
    """
    leaves, treespec = private.tree_flatten_with_path(state_dict)
    records: list[object] = []
    tensors: list[torch.Tensor] = []

    for path, leaf in leaves:
        if not isinstance(leaf, torch.Tensor):
            records.append(leaf)
            continue
        local, spec = dtensor_parts(leaf) if isinstance(leaf, DTensor) else (leaf, None)
        storage, record = _prepare(local, private.keystr(path))
        tensors.append(storage)
        records.append(record if spec is None else _DTensorMeta(record, spec))
    return _StateDictMeta(treespec, [path for path, _ in leaves], records), tensors


def _prepare(tensor: torch.Tensor, path: str | None) -> tuple[torch.Tensor, _TensorMeta]:
    reason = _why_not(tensor)
    if reason is not None:
        raise UnsupportedLeafError(f"torch's PGTransport protocol cannot carry {reason}", path=path)
    # Conjugation and negation are flags of the view: the protocol has no field for either.
    try:
        tensor = with_memory(tensor.detach()).resolve_conj().resolve_neg()
    except UnsupportedLeafError as fault:
        fault.path = path
        raise
    return (
        _cast_tensor(tensor, torch.uint8),
        _TensorMeta(
            shape=tensor.shape,
            dtype=tensor.dtype,
            storage_offset=cast(int, tensor.storage_offset()),
            stride=tensor.stride(),
            nbytes=tensor.untyped_storage().nbytes(),
        ),
    )


def _is_plain(tensor: torch.Tensor) -> bool:
    return type(tensor) in (torch.Tensor, torch.nn.Parameter)


SHARDED = 'a ShardedTensor: use PGTransport(protocol="relay") on both sides, or a DTensor'


def _why_not(tensor: torch.Tensor) -> str | None:
    """Why a storage, a dtype, a shape and strides do not describe the tensor; None if they do."""
    if is_sharded(tensor):
        return SHARDED
    if not _is_plain(tensor):
        return f"a tensor subclass ({type(tensor).__name__})"
    if tensor.is_nested:
        return "a nested tensor"
    if tensor.layout != torch.strided:
        return f"a tensor of layout {tensor.layout}"
    if tensor.is_meta:
        return "a meta tensor: it has no bytes"
    if tensor.is_quantized:
        return "a quantized tensor: its scale would be lost"
    return None
