"""Weight sync: workers that follow the steps that a trainer publishes.

A name is imported when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torchrelay.endpoint.encoding import Encoding
    from torchrelay.weights.mapping import (
        MappedDestination,
        ParameterRule,
        SourcePart,
        WeightMapping,
        llama_to_vllm,
        qwen_to_vllm,
    )

__all__ = [
    "Encoding",
    "MappedDestination",
    "ParameterRule",
    "SourcePart",
    "WeightMapping",
    "llama_to_vllm",
    "qwen_to_vllm",
]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = "torchrelay.endpoint.encoding" if name == "Encoding" else f"{__name__}.mapping"
    value: object = getattr(import_module(module), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
