"""Mappings from models of Transformers to the parameters that vLLM makes of them.

vLLM fuses q, k and v into `qkv_proj`, and gate and up into `gate_up_proj`. With tensor parallelism,
rank r of n has the r-th piece of each of them. If ranks are more than heads of keys and values,
several ranks have the same head. The vocabulary is padded.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from torchrelay.errors import UsageError
from torchrelay.state import tensors as t
from torchrelay.weights.mapping.rules import ParameterRule, SourcePart, WeightMapping

_LAYER = "model.layers.*"
_ATTENTION = f"{_LAYER}.self_attn"
_EMBEDDING = "model.embed_tokens.weight"
_HEAD = "lm_head.weight"


def llama_to_vllm(config: Any, *, dtype: torch.dtype | str | None = None) -> WeightMapping:
    """The mapping for models with the names of Llama: Llama, Mistral and others like them.

    `config` is the model's configuration in Transformers, or a dict with its fields. `dtype` is the
    publisher's, if it is another one than that of vLLM's parameters.

    Use it as `MappedDestination(model, mapping, shard=(rank, ranks))` with the rank and the number
    of ranks of tensor parallelism. For quantized models vLLM has other parameters.
    """
    heads = _field(config, "num_attention_heads")
    kv_heads = _field(config, "num_key_value_heads", heads)
    size = _field(config, "head_dim", None) or _field(config, "hidden_size") // heads
    tied = bool(_field(config, "tie_word_embeddings", False))
    vocabulary = _field(config, "vocab_size")
    name = dtype if dtype is None or isinstance(dtype, str) else t.NAMES[dtype]

    def rule(parameter: str, *parts: SourcePart, **layout: Any) -> ParameterRule:
        return ParameterRule(parameter, parts, dtype=name, **layout)

    def rows(parameter: str, source: str) -> ParameterRule:
        return rule(parameter, SourcePart(source, vocabulary), split=0, padded=True)

    kv = {"size": kv_heads * size, "pieces": kv_heads}
    rules = (
        rows(_EMBEDDING, _EMBEDDING),
        rows(_HEAD, _EMBEDDING if tied else _HEAD),
        rule(
            f"{_ATTENTION}.qkv_proj.*",  # weight or bias
            SourcePart(f"{_ATTENTION}.q_proj.*", heads * size),
            SourcePart(f"{_ATTENTION}.k_proj.*", **kv),
            SourcePart(f"{_ATTENTION}.v_proj.*", **kv),
            split=0,
        ),
        rule(
            f"{_LAYER}.mlp.gate_up_proj.*",
            SourcePart(f"{_LAYER}.mlp.gate_proj.*"),
            SourcePart(f"{_LAYER}.mlp.up_proj.*"),
            split=0,
        ),
        rule(f"{_ATTENTION}.o_proj.weight", split=1),
        rule(f"{_LAYER}.mlp.down_proj.weight", split=1),
        # Every rank has all of the rest: norms, and biases of what is summed over ranks.
        rule("model.**"),
    )
    ignored = ("**.rotary_emb.inv_freq", *([_HEAD] if tied else []))
    return WeightMapping(rules, ignored)


def qwen_to_vllm(config: Any, *, dtype: torch.dtype | str | None = None) -> WeightMapping:
    """The mapping for dense models of Qwen2 and Qwen3. They have the names of Llama, with biases of
    q, k and v in Qwen2 and `q_norm` and `k_norm` in Qwen3. See `llama_to_vllm`."""
    return llama_to_vllm(config, dtype=dtype)


_REQUIRED = object()


def _field(config: Any, name: str, default: Any = _REQUIRED) -> Any:
    found = config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)
    if found is None and default is _REQUIRED:
        raise UsageError(f"the configuration has no {name}")
    return default if found is None else found
