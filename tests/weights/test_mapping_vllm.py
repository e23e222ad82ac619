"""Llama's and Qwen's weights in the parameters that vLLM makes of them, for any tensor parallelism.

Names, shapes and pieces are those that vLLM documents for `QKVParallelLinear`,
`MergedColumnParallelLinear`, `RowParallelLinear` and `VocabParallelEmbedding`. vLLM is not needed.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import torchrelay as tr
from tests.weights.test_mapping import TIMEOUT, assert_exact, blank
from torchrelay.errors import MismatchError, UsageError
from torchrelay.weights.mapping import (
    MappedDestination,
    WeightMapping,
    llama_to_vllm,
    qwen_to_vllm,
)

LAYERS, HIDDEN, INNER, HEADS, KV_HEADS, VOCABULARY = 2, 32, 48, 4, 2, 100
PADDED = 128  # the next multiple of 64

COMMON = {
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "num_hidden_layers": LAYERS,
    "vocab_size": VOCABULARY,
}
LLAMA = {**COMMON, "tie_word_embeddings": False}
LLAMA_WITH_BIASES = {**LLAMA, "attention_bias": True, "mlp_bias": True}
QWEN2 = {**COMMON, "tie_word_embeddings": True, "qkv_bias": True}
QWEN3 = {**COMMON, "tie_word_embeddings": False, "head_dim": 16, "norms_of_heads": True}
MODELS = {
    "llama": (llama_to_vllm, LLAMA),
    "llama with biases": (llama_to_vllm, LLAMA_WITH_BIASES),
    "qwen2": (qwen_to_vllm, QWEN2),
    "qwen3": (qwen_to_vllm, QWEN3),
}


def head_dim(config: dict[str, Any]) -> int:
    return int(config.get("head_dim", HIDDEN // HEADS))


def published(config: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The state dict of a model of Transformers."""
    made = torch.Generator().manual_seed(0)
    size = head_dim(config)
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (VOCABULARY, HIDDEN),
        "model.norm.weight": (HIDDEN,),
    }
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (VOCABULARY, HIDDEN)
    biased = {
        "self_attn.q_proj": "attention_bias" in config or "qkv_bias" in config,
        "self_attn.k_proj": "attention_bias" in config or "qkv_bias" in config,
        "self_attn.v_proj": "attention_bias" in config or "qkv_bias" in config,
        "self_attn.o_proj": "attention_bias" in config,
        **dict.fromkeys(("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"), "mlp_bias" in config),
    }
    for layer in range(LAYERS):
        linears = {
            "self_attn.q_proj": (HEADS * size, HIDDEN),
            "self_attn.k_proj": (KV_HEADS * size, HIDDEN),
            "self_attn.v_proj": (KV_HEADS * size, HIDDEN),
            "self_attn.o_proj": (HIDDEN, HEADS * size),
            "mlp.gate_proj": (INNER, HIDDEN),
            "mlp.up_proj": (INNER, HIDDEN),
            "mlp.down_proj": (HIDDEN, INNER),
        }
        for name, shape in linears.items():
            shapes[f"model.layers.{layer}.{name}.weight"] = shape
            if biased[name]:
                shapes[f"model.layers.{layer}.{name}.bias"] = shape[:1]
        for name in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"model.layers.{layer}.{name}.weight"] = (HIDDEN,)
        for name in ("q_norm", "k_norm") if "norms_of_heads" in config else ():
            shapes[f"model.layers.{layer}.self_attn.{name}.weight"] = (size,)
    return {name: torch.randn(shape, generator=made).bfloat16() for name, shape in shapes.items()}


def engine_shapes(config: dict[str, Any], ranks: int) -> dict[str, tuple[int, ...]]:
    """The parameters of vLLM's model on each rank, without those that are tied."""
    size = head_dim(config)
    kv_heads = max(1, KV_HEADS // ranks)
    rows = (HEADS // ranks + 2 * kv_heads) * size
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (PADDED // ranks, HIDDEN),
        "model.norm.weight": (HIDDEN,),
    }
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (PADDED // ranks, HIDDEN)
    for layer in range(LAYERS):
        at = f"model.layers.{layer}"
        shapes[f"{at}.self_attn.qkv_proj.weight"] = (rows, HIDDEN)
        shapes[f"{at}.self_attn.o_proj.weight"] = (HIDDEN, HEADS * size // ranks)
        shapes[f"{at}.mlp.gate_up_proj.weight"] = (2 * INNER // ranks, HIDDEN)
        shapes[f"{at}.mlp.down_proj.weight"] = (HIDDEN, INNER // ranks)
        shapes[f"{at}.input_layernorm.weight"] = (HIDDEN,)
        shapes[f"{at}.post_attention_layernorm.weight"] = (HIDDEN,)
        if "attention_bias" in config or "qkv_bias" in config:
            shapes[f"{at}.self_attn.qkv_proj.bias"] = (rows,)
        if "attention_bias" in config:
            shapes[f"{at}.self_attn.o_proj.bias"] = (HIDDEN,)
        if "mlp_bias" in config:
            shapes[f"{at}.mlp.gate_up_proj.bias"] = (2 * INNER // ranks,)
            shapes[f"{at}.mlp.down_proj.bias"] = (HIDDEN,)
        if "norms_of_heads" in config:
            shapes[f"{at}.self_attn.q_norm.weight"] = (size,)
            shapes[f"{at}.self_attn.k_norm.weight"] = (size,)
    return shapes


def fused(
    config: dict[str, Any], state: dict[str, torch.Tensor], rank: int, ranks: int
) -> dict[str, torch.Tensor]:
    """The rank's parameters as they must be, by hand from whole tensors."""
    replicas = max(1, ranks // KV_HEADS)

    def vocabulary(table: torch.Tensor) -> torch.Tensor:
        zeros = table.new_zeros(PADDED - VOCABULARY, HIDDEN)
        return torch.cat([table, zeros]).chunk(ranks)[rank]

    found = {}
    for name in engine_shapes(config, ranks):
        start, _, kind = name.rpartition(".")
        if name in ("model.embed_tokens.weight", "lm_head.weight"):
            found[name] = vocabulary(state[name])
        elif start.endswith("qkv_proj"):
            q, k, v = (state[f"{start[:-8]}{one}_proj.{kind}"] for one in "qkv")
            shared = [one.chunk(ranks // replicas)[rank // replicas] for one in (k, v)]
            found[name] = torch.cat([q.chunk(ranks)[rank], *shared])
        elif start.endswith("gate_up_proj"):
            both = [state[f"{start[:-12]}{one}_proj.{kind}"] for one in ("gate", "up")]
            found[name] = torch.cat([one.chunk(ranks)[rank] for one in both])
        elif start.endswith(("o_proj", "down_proj")) and kind == "weight":
            found[name] = state[name].chunk(ranks, 1)[rank]
        else:
            found[name] = state[name]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("model", ["llama", "llama with biases", "qwen2", "qwen3"])
def test_published_names_are_those_of_transformers(model: str) -> None:
    transformers = pytest.importorskip("transformers")
    make, config = MODELS[model]
    kind = model.split(maxsplit=1)[0].capitalize()
    fields = {**config, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    real = getattr(transformers, f"{kind}Config")(**fields)
    with torch.device("meta"):
        made = getattr(transformers, f"{kind}ForCausalLM")(real)
    shapes = {name: one.shape for name, one in made.state_dict().items()}
    if config["tie_word_embeddings"]:
        del shapes["lm_head.weight"]
    assert shapes == {name: one.shape for name, one in published(config).items()}
    assert make(real) == make(config)


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("model", MODELS)
def test_every_rank_has_vllms_parameters(model: str, ranks: int, tmp_path: Path) -> None:
    make, config = MODELS[model]
    state = published(config)
    shapes = engine_shapes(config, ranks)
    mapping = make(SimpleNamespace(**config))
    assert mapping == make(config) == WeightMapping.from_dict(make(config).to_dict())
    with (
        tr.Checkpointer(tmp_path, timeout=TIMEOUT) as there,
        tr.serve(state, step=1, timeout=TIMEOUT) as endpoint,
    ):
        there.save(1, {"model": state, "epoch": 1})
        for rank in range(ranks):
            wanted = fused(config, state, rank, ranks)
            assert {name: tuple(one.shape) for name, one in wanted.items()} == shapes
            needed = sum(one.numel() for one in wanted.values()) * 2
            tables = 1 if config["tie_word_embeddings"] else 2
            rows = PADDED // ranks
            needed -= 2 * tables * HIDDEN * min(max((rank + 1) * rows - VOCABULARY, 0), rows)
            into = blank(wanted)
            got = there.load(
                {"model": MappedDestination(into, mapping, shard=(rank, ranks)), "epoch": 0}
            )
            assert_exact(into, wanted)
            assert got.report.bytes == needed  # nothing but its own pieces
            into = blank(wanted)
            destination = MappedDestination(into, mapping, shard=(rank, ranks))
            got = tr.pull(
                endpoint.url,
                into=destination,
                timeout=TIMEOUT,
                options=tr.options.PullOptions(same_host=False),
            )
            assert_exact(into, wanted)
            assert got.report.bytes == needed


def test_a_publisher_of_another_dtype() -> None:
    state = {name: tensor.float() * 1.001 for name, tensor in published(QWEN3).items()}
    whole = fused(QWEN3, state, 1, 2)
    wanted = {name: tensor.bfloat16() for name, tensor in whole.items()}
    into = blank(wanted)
    with tr.serve(state, step=1, timeout=TIMEOUT) as endpoint:
        mapping = qwen_to_vllm(QWEN3)
        with pytest.raises(MismatchError, match="dtype float32") as caught:
            tr.pull(endpoint.url, into=MappedDestination(into, mapping, shard=(1, 2)))
        assert f"{len(state)} places" in caught.value.message
        mapping = qwen_to_vllm(QWEN3, dtype=torch.float32)
        tr.pull(endpoint.url, into=MappedDestination(into, mapping, shard=(1, 2)))
    assert_exact(into, wanted)


@pytest.mark.parametrize("both", [True, False], ids=["both published", "one published"])
def test_tied_embeddings(both: bool) -> None:
    """A module of vLLM has both names for one parameter; a publisher may have both too."""
    state = published(QWEN2)
    if both:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    wanted = fused(QWEN2, state, 1, 2)
    into = blank(wanted)
    into["lm_head.weight"] = into["model.embed_tokens.weight"]
    with tr.serve(state, step=1, timeout=TIMEOUT) as endpoint:
        tr.pull(endpoint.url, into=MappedDestination(into, qwen_to_vllm(QWEN2), shard=(1, 2)))
    assert_exact(into, {**wanted, "lm_head.weight": wanted["model.embed_tokens.weight"]})
    assert into["lm_head.weight"] is into["model.embed_tokens.weight"]


def test_a_stage_of_a_pipeline_has_some_of_the_layers() -> None:
    state = published(LLAMA)
    wanted = {
        name: tensor
        for name, tensor in fused(LLAMA, state, 0, 1).items()
        if name.startswith(("model.layers.1.", "model.norm", "lm_head"))
    }
    ignored = ("model.layers.0.**", "model.embed_tokens.weight")
    mapping = llama_to_vllm(LLAMA)
    into = blank(wanted)
    with tr.serve(state, step=1, timeout=TIMEOUT) as endpoint:
        with pytest.raises(MismatchError, match="no parameter takes it") as caught:
            tr.pull(endpoint.url, into=MappedDestination(into, mapping))
        names = {line.split(":")[0].strip() for line in caught.value.message.splitlines()[1:]}
        assert names == {name for name in state if name.startswith(("model.layers.0.", "model.e"))}
        mapping = replace(mapping, ignored=(*mapping.ignored, *ignored))
        tr.pull(endpoint.url, into=MappedDestination(into, mapping))
    assert_exact(into, wanted)


def test_heads_that_ranks_cannot_share_are_refused() -> None:
    state = published(LLAMA)
    into = {name: torch.zeros(3, 3).bfloat16() for name in engine_shapes(LLAMA, 1)}
    with tr.serve(state, step=1, timeout=TIMEOUT) as endpoint:
        with pytest.raises(MismatchError, match="3 ranks cannot share 2 pieces") as caught:
            tr.pull(endpoint.url, into=MappedDestination(into, llama_to_vllm(LLAMA), shard=(0, 3)))
    lines = caught.value.message.splitlines()[1:]
    assert {line.split(":")[0].strip() for line in lines} == {
        *(name for name in into if name != "model.norm.weight" and "layernorm" not in name),
        *(name for name in state if name == "model.norm.weight" or "layernorm" in name),
    }


def test_a_configuration_without_a_size_is_refused() -> None:
    with pytest.raises(UsageError, match="vocab_size"):
        llama_to_vllm({"num_attention_heads": 2, "hidden_size": 8})
