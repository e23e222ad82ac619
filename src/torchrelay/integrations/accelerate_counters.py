"""Where an Accelerator is: in its epochs, and in the accumulation of gradients."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from torchrelay.errors import UsageError
from torchrelay.integrations.extras import extra
from torchrelay.integrations.loader_iterators import continue_without_drawing

with extra("accelerate"):
    from accelerate import Accelerator
    from accelerate.utils import DistributedType

Gradients = list[dict[str, torch.Tensor]]  # of each model, by the names of its parameters


class Counters:
    """An object for a state. It has the micro-batches since the last update with the gradients that
    they have left, the epochs and seeds of data loaders, and how often was saved."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self.loaded_within = True  # whether the step that was loaded is one within an epoch

    def check(self) -> None:
        """Raises `UsageError` between two updates if the gradients cannot be saved."""
        accelerator = self._accelerator
        if accelerator.sync_gradients:
            return
        sharded = accelerator.distributed_type == DistributedType.FSDP or any(
            isinstance(one, DTensor) for found in self._gradients() for one in found.values()
        )
        if sharded:
            raise UsageError(
                "gradients of sharded models that are accumulated cannot be saved: save after an "
                "update, when accelerator.sync_gradients is True"
            )

    def state_dict(self) -> dict[str, Any]:
        accelerator = self._accelerator
        return {
            "step": accelerator.step,
            "iteration": accelerator.project_configuration.iteration,
            "loaders": [
                [self._next_epoch(loader), getattr(_sampler(loader), "initial_seed", None)]
                for loader in accelerator._dataloaders
            ],
            "within": self._within(),
            "ranks": accelerator.num_processes,
            "gradients": [] if accelerator.sync_gradients else self._gradients(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        accelerator = self._accelerator
        accelerator.step = state["step"]
        accelerator.project_configuration.iteration = state["iteration"] + 1
        # Steps that were saved before the rest was part of the state have none of it.
        self.loaded_within = state.get("within", True)
        saved = zip(accelerator._dataloaders, state.get("loaders", []), strict=False)
        for loader, (iteration, seed) in saved:
            loader.iteration = iteration
            if getattr(loader, "use_stateful_dataloader", False):
                continue_without_drawing(loader.base_dataloader, _sampler(loader))
            if seed is not None and hasattr(sampler := _sampler(loader), "initial_seed"):
                sampler.initial_seed = seed
        gradients: Gradients = state.get("gradients", [])
        accelerator.sync_gradients = not gradients
        if gradients and state["ranks"] != accelerator.num_processes:
            warnings.warn(
                f"the step was saved between two updates by {state['ranks']} ranks, and is loaded "
                f"by {accelerator.num_processes}: gradients that other ranks had accumulated are "
                "not part of the next update. Save after an update",
                RuntimeWarning,
                stacklevel=2,
            )
        for number, model in enumerate(accelerator._models):
            found = gradients[number] if gradients else {}
            for name, weight in accelerator.unwrap_model(model).named_parameters():
                gradient = found.get(name)
                weight.grad = None if gradient is None else gradient.to(weight.device, copy=True)

    def _next_epoch(self, loader: Any) -> int:
        """The epoch of the loader's next batch."""
        gradients = self._accelerator.gradient_state
        at_the_end = gradients.active_dataloader is loader and gradients.end_of_dataloader
        return getattr(loader, "iteration", 0) + int(at_the_end)

    def _within(self) -> bool:
        """Whether a loader is being read and has more batches, or the job reads others."""
        gradients = self._accelerator.gradient_state
        between = not gradients.in_dataloader or gradients.end_of_dataloader
        return not (self._accelerator._dataloaders and between)

    def _gradients(self) -> Gradients:
        accelerator = self._accelerator
        return [
            {
                name: weight.grad
                for name, weight in accelerator.unwrap_model(model).named_parameters()
                if weight.grad is not None
            }
            for model in accelerator._models
        ]


def _sampler(loader: Any) -> Any:
    """The sampler of a prepared loader, if it has one."""
    try:
        return loader.get_sampler()
    except AttributeError:
        return None
