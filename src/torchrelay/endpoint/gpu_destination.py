"""Whether a state lands on a GPU, so that it may come from one."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from torchrelay.memory.gpu.side import in_use


def wants_gpu(into: object, device: torch.device | str | None = None) -> bool:
    """Whether some of a state lands on a GPU; `device` is that of new tensors, without `into`.
    Quick, so it does not look into objects that have their own `state_dict`, other than modules."""
    if not in_use():
        return False
    if into is None:
        return torch.device(device or "cpu").type == "cuda"
    todo = [into]
    while todo:
        one = todo.pop()
        if isinstance(one, torch.Tensor):
            if one.is_cuda:
                return True
        elif isinstance(one, torch.nn.Module):
            todo.extend(one.parameters())
        elif isinstance(one, Mapping):
            todo.extend(one.values())
        elif isinstance(one, (list, tuple)):
            todo.extend(one)
    return False
