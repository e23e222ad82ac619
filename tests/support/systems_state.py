"""The state that a job on another system reads and writes."""

from __future__ import annotations

from typing import Any

import torch


def state_of(step: int) -> dict[str, Any]:
    """Tensors of several sizes and dtypes, one larger than a huge page, and plain values."""
    made = torch.Generator().manual_seed(step)
    model = {
        "large": torch.randn(1 << 20, generator=made),
        "weight": torch.randn(300, 70, generator=made).to(torch.bfloat16),
        "columns": torch.randn(40, 60, generator=made).t(),
        "none": torch.empty(0),
    }
    model["tied"] = model["large"][:100]
    plain = {"lr": 0.1, "name": "run\r\n\x1a", "seed": bytes(range(256))}
    return {"model": model, "step": step, **plain}


def holes() -> dict[str, Any]:
    """A destination for it."""
    state = state_of(0)
    for tensor in state["model"].values():
        tensor.zero_()
    return state


def assert_is_state(found: Any, step: int) -> None:
    wanted = state_of(step)
    assert found.keys() == wanted.keys()
    for name, tensor in wanted["model"].items():
        assert torch.equal(found["model"][name], tensor), name
    for name in wanted.keys() - {"model"}:
        assert found[name] == wanted[name], name
