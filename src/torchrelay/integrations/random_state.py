"""The random numbers of a process: Python's, numpy's, torch's, and those of its GPUs."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.hooks import RemovableHandle


class RandomState:
    """An object for a state: each rank gets its own generators back, where its rank was there."""

    def state_dict(self) -> dict[str, Any]:
        version, words, gauss = random.getstate()
        numpy_state: Any = np.random.get_state(legacy=True)
        name, keys, position, has_gauss, cached = numpy_state
        return {
            # As one tensor: hundreds of plain numbers would be hundreds of leaves.
            "python": [version, torch.tensor(words, dtype=torch.int64), gauss],
            "numpy": [name, torch.from_numpy(keys.astype(np.int64)), position, has_gauss, cached],
            "torch": torch.get_rng_state(),
            "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        version, words, gauss = state["python"]
        random.setstate((version, tuple(words.tolist()), gauss))
        name, keys, *rest = state["numpy"]
        np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
        torch.set_rng_state(state["torch"])
        # Only those that exist here: a job may resume on a host with other GPUs.
        if torch.cuda.is_available():
            for device, generator in enumerate(state["cuda"][: torch.cuda.device_count()]):
                torch.cuda.set_rng_state(generator, device)


@contextmanager
def unchanged(*generators: torch.Generator | None) -> Iterator[None]:
    """Within: random numbers are drawn. Afterwards all of them, also those of `generators`, are as
    they were before."""
    before = RandomState().state_dict()
    own = [(one, one.get_state()) for one in generators if one is not None]
    try:
        yield
    finally:
        RandomState().load_state_dict(before)
        for generator, state in own:
            generator.set_state(state)


def set_at_first_forward(random: dict[str, Any], models: list[nn.Module]) -> None:
    """Set random numbers once more when one of the models is first trained on: whoever iterates
    over a data loader before that, draws from them."""
    hooks: list[RemovableHandle] = []

    def before_forward(model: nn.Module, _: Any) -> None:
        if model.training:
            RandomState().load_state_dict(random)
            for hook in hooks:
                hook.remove()

    hooks += [model.register_forward_pre_hook(before_forward) for model in models]
