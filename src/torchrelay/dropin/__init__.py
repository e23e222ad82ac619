"""Torch's names and signatures, for programs that change nothing but their import line."""

from torchrelay.dropin._torch_records import (
    _cast_tensor,
    _DTensorMeta,
    _prepare_state_dict,
    _prepare_tensor,
    _ShardedTensorMeta,
    _StateDictMeta,
    _TensorMeta,
    _timeit,
)
from torchrelay.dropin.checkpointer import TorchCheckpointer as Checkpointer
from torchrelay.dropin.pg_transport import PGTransport

__all__ = [
    "Checkpointer",
    "PGTransport",
    "_DTensorMeta",
    "_ShardedTensorMeta",
    "_StateDictMeta",
    "_TensorMeta",
    "_cast_tensor",
    "_prepare_state_dict",
    "_prepare_tensor",
    "_timeit",
]
