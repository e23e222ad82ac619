"""Torch's names and signatures, for programs that change nothing but their import line.

A name is imported when it is first used: a checkpointer needs no private name of torch that only
transports do.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
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
    from torchrelay.dropin.conversion import convert
    from torchrelay.dropin.pg_transport import PGTransport
    from torchrelay.dropin.stock_dcp import (
        read_stock,
        read_torch_save,
        write_stock,
        write_torch_save,
    )

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
    "convert",
    "read_stock",
    "read_torch_save",
    "write_stock",
    "write_torch_save",
]

_MODULES = {
    "Checkpointer": ("checkpointer", "TorchCheckpointer"),
    "PGTransport": ("pg_transport", "PGTransport"),
    "convert": ("conversion", "convert"),
    "read_stock": ("stock_dcp", "read_stock"),
    "read_torch_save": ("stock_dcp", "read_torch_save"),
    "write_stock": ("stock_dcp", "write_stock"),
    "write_torch_save": ("stock_dcp", "write_torch_save"),
}


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, own = _MODULES.get(name, ("_torch_records", name))
    value: object = getattr(import_module(f"{__name__}.{module}"), own)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
