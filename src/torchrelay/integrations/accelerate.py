"""Accelerate's `save_state` and `load_state` go through torchrelay.

relay = use_torchrelay(accelerator, "runs/a", keep=3)
accelerator.save_state()   # in the background
accelerator.load_state()   # the newest step that verifies
"""

from __future__ import annotations

import os
import re
import time
from functools import wraps
from typing import Any, Literal

from torchrelay.checkpointer.front import Checkpointer
from torchrelay.checkpointer.keep import Keep
from torchrelay.errors import UsageError
from torchrelay.integrations.accelerate_counters import Counters
from torchrelay.integrations.extras import extra
from torchrelay.integrations.loader_iterators import begin_with_its_sampler
from torchrelay.integrations.random_state import RandomState, set_at_first_forward
from torchrelay.integrations.resume import newest_step

with extra("accelerate"):
    from accelerate import Accelerator
    from accelerate.utils import DistributedType

Directory = str | os.PathLike[str]


def use_torchrelay(
    accelerator: Accelerator,
    root: Directory,
    *,
    keep: Keep | int | None = None,
    on_error: Literal["raise", "warn"] = "raise",
    **options: Any,
) -> RelayStates:
    """Have `accelerator.save_state` and `accelerator.load_state` save to and load from `root`.

    Call it once. Models, optimizers, schedulers, stateful data loaders, the scaler, objects that
    were registered for checkpointing and random numbers are saved, each rank's own where they
    differ; and between two updates the gradients that are accumulated. The two methods are
    replaced, instead of hooks being added, because accelerate has written its own optimizer files,
    and the models of FSDP, by the time that hooks run.

    `prepare_data_loader` is replaced, too. Accelerate's begins the first epoch of a stateful loader
    with workers before it has the sampler that can be seeded, so nothing gives its order again.
    """
    if accelerator.distributed_type in (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM):
        raise UsageError(
            f"torchrelay does not save {accelerator.distributed_type.value} engines: use their own "
            "checkpoints"
        )
    states = RelayStates(accelerator, Checkpointer(root, keep=keep, **options), on_error)
    accelerator.save_state, accelerator.load_state = states.save, states.load
    prepare = accelerator.prepare_data_loader

    @wraps(prepare)
    def prepare_data_loader(*args: Any, **kwargs: Any) -> Any:
        return _with_its_sampler(prepare(*args, **kwargs))

    accelerator.prepare_data_loader = prepare_data_loader
    for loader in accelerator._dataloaders:
        _with_its_sampler(loader)
    return states


class RelayStates:
    """Replaces `accelerator.save_state` and `load_state`. `checkpointer` has the steps."""

    def __init__(
        self,
        accelerator: Accelerator,
        checkpointer: Checkpointer,
        on_error: Literal["raise", "warn"],
    ) -> None:
        self._accelerator, self._on_error = accelerator, on_error
        self._counters = Counters(accelerator)
        self.checkpointer = checkpointer
        self._last: int | None = None  # the step of the last save, which may not be committed yet
        self.stalls: list[float] = []  # seconds that each save kept training waiting

    def save(self, output_dir: Directory | None = None, *_: Any, **__: Any) -> str:
        """Save in the background, as the step that the number in `output_dir` names, or as the
        next one. Returns where it will be."""
        accelerator = self._accelerator
        self._counters.check()
        if accelerator._save_model_state_pre_hook:
            raise UsageError(
                "hooks of save_state are not called by torchrelay: remove them, and register "
                "objects with register_for_checkpointing"
            )
        if output_dir is not None:
            step = _step_in(output_dir)
        else:  # the next number, the same on all ranks
            last = newest_step(self.checkpointer) if self._last is None else self._last
            step = 0 if last is None else last + 1
        self._last = step
        begun = time.monotonic()
        self.checkpointer.save_async(step, self._state(), overwrite=True, on_error=self._on_error)
        self.stalls.append(time.monotonic() - begun)
        accelerator.project_configuration.iteration += 1
        return f"{self.checkpointer.url}/step-{step}"

    def load(self, input_dir: Directory | None = None, *_: Any, **__: Any) -> int | None:
        """Load the step that the number in `input_dir` names, or the newest that verifies. Returns
        the step."""
        step = None if input_dir is None else _step_in(input_dir)
        loaded = self.checkpointer.load(self._state(), step=step).step
        self._set_random()
        return loaded

    def resume(self) -> int | None:
        """Load the newest step that verifies, if there is any; None: this is the first start."""
        restored = self.checkpointer.restore(self._state())
        if restored is not None:
            self._set_random()
        return restored

    def _set_random(self) -> None:
        if self._counters.loaded_within:
            # Reading the loader up to the next batch may draw random numbers again. At the start
            # of an epoch it draws them for the first time.
            set_at_first_forward(RandomState().state_dict(), self._accelerator._models)

    def _state(self) -> dict[str, Any]:
        accelerator = self._accelerator
        state: dict[str, Any] = {
            "models": list(accelerator._models),
            "optimizers": [_inner(one, "optimizer") for one in accelerator._optimizers],
            "schedulers": [_inner(one, "scheduler") for one in accelerator._schedulers],
            "data": [
                loader
                for loader in accelerator._dataloaders
                if getattr(loader, "use_stateful_dataloader", False)
            ],
            "registered": list(accelerator._custom_objects),
            "counters": self._counters,
            "random": RandomState(),
        }
        return state if accelerator.scaler is None else {**state, "scaler": accelerator.scaler}


def _with_its_sampler(loader: Any) -> Any:
    if getattr(loader, "use_stateful_dataloader", False):
        begin_with_its_sampler(loader.base_dataloader)
    return loader


def _inner(wrapper: Any, name: str) -> Any:
    """The object inside of accelerate's wrapper; its parameters and states have the same names."""
    return getattr(wrapper, name, wrapper)


def _step_in(directory: Directory) -> int:
    number = re.search(r"(\d+)\D*$", os.fspath(directory))
    if number is None:
        raise UsageError(f"no step number in {os.fspath(directory)!r}: name it like 'step_100'")
    return int(number[1])
