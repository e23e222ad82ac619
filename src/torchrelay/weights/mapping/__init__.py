"""Names and layouts of a publisher, and those of a serving engine that takes its weights."""

from torchrelay.weights.mapping.destination import MappedDestination
from torchrelay.weights.mapping.rules import ParameterRule, SourcePart, WeightMapping
from torchrelay.weights.mapping.vllm import llama_to_vllm, qwen_to_vllm

__all__ = [
    "MappedDestination",
    "ParameterRule",
    "SourcePart",
    "WeightMapping",
    "llama_to_vllm",
    "qwen_to_vllm",
]
