"""torchtitan's trainer saves through torchrelay: a checkpoint manager that its config selects.

def my_run() -> Trainer.Config:
    config = llama3_debugmodel()
    config.checkpoint = RelayCheckpointManager.Config(enable=True, interval=100)
    return config
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict_loader import load as load_dcp

from torchrelay.checkpointer.front import Checkpointer
from torchrelay.coordination.coordinator import Coordinator
from torchrelay.errors import MismatchError, UsageError
from torchrelay.integrations.extras import extra
from torchrelay.integrations.random_state import RandomState, set_at_first_forward
from torchrelay.integrations.resume import newest_step
from torchrelay.options import CheckpointerOptions
from torchrelay.pending import Pending
from torchrelay.stores.locate import split_step

with extra("torchtitan"):
    from torchtitan.components.checkpointer import (
        DATALOADER,
        LR_SCHEDULER,
        MODEL,
        OPTIMIZER,
        BaseCheckpointManager,
        ModelWrapper,
    )
    from torchtitan.config import TORCH_DTYPE_MAP
    from torchtitan.tools import filesystem
    from torchtitan.tools.logging import logger

RANDOM = "random"


class RelayCheckpointManager(BaseCheckpointManager):  # type: ignore[misc, unused-ignore]
    """Saves model parts, optimizers, schedulers, the data loader, the trainer's state and every
    rank's random numbers, and loads the newest step that verifies, on any mesh.

    The options of torchtitan's base class mean what they mean there. `stalls` has the seconds that
    each save kept training waiting; `checkpointer` has the steps.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseCheckpointManager.Config):  # type: ignore[misc, unused-ignore]
        """The options of the base class, and those of torchrelay."""

        asynchronous: bool = True
        """Whether another process writes a step while training continues. The last step is always
        committed when `save` returns."""

        on_error: Literal["raise", "warn"] = "raise"
        """Whether a save that failed in the background fails the run at the next one, or is only
        logged."""

        stage_on: Literal["auto", "host", "device"] = "auto"
        """Where a state is copied to while training waits."""

        timeout: float = 1800.0
        """Seconds that a save or a load may take."""

    def __init__(
        self,
        config: Config,
        *,
        dataloader: Any,
        model_parts: list[nn.Module],
        optimizers: Any,
        lr_schedulers: Any,
        states: dict[str, Any],
        sd_adapter: Any,
        base_folder: str = "",
    ) -> None:
        self.enable = config.enable
        self.save_future: Pending | None = None  # `maybe_wait_for_saving` waits for it
        if not self.enable:
            return
        self._config, self._adapter, self._parts = config, sd_adapter, model_parts
        # Their state dicts are flat, by names of parameters, so that stages of a pipeline fit
        # together: entries are loaded one by one.
        self._flat = {MODEL: ModelWrapper(model_parts), OPTIMIZER: optimizers}
        self._others = {**states, LR_SCHEDULER: lr_schedulers, RANDOM: RandomState()}
        if dataloader is not None:
            self._others[DATALOADER] = _Position(dataloader)
        known = {OPTIMIZER, *self._others}
        if unknown := set(config.exclude_from_loading) - known:
            raise UsageError(
                f"exclude_from_loading has {', '.join(sorted(unknown))}; there are "
                f"{', '.join(sorted(known))}"
            )
        if sd_adapter is None and (config.last_save_in_hf or config.initial_load_in_hf):
            raise UsageError("the model has no adapter for Hugging Face's format (sd_adapter)")
        self.folder = filesystem.join(base_folder, config.folder)
        self.checkpointer = Checkpointer(
            self.folder,
            keep=config.keep_latest_k or None,
            timeout=config.timeout,
            options=CheckpointerOptions(stage_on=config.stage_on, read_only=config.load_only),
        )
        self.stalls: list[float] = []

    # Saving.

    @torch.no_grad()
    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        config = self._config
        first = curr_step == 1 and config.enable_first_step_checkpoint
        if config.load_only or not (last_step or first or curr_step % config.interval == 0):
            return False
        begun = time.monotonic()
        if last_step and config.last_save_model_only:
            self._export(curr_step)
        elif last_step or not config.asynchronous:
            self.checkpointer.save(curr_step, self._state(), overwrite=True)
        else:
            self.save_future = self.checkpointer.save_async(
                curr_step, self._state(), overwrite=True, on_error=config.on_error
            )
        self.stalls.append(time.monotonic() - begun)
        return True

    def _export(self, step: int) -> None:
        """Save the model alone, in the dtype and under the names that others want it in."""
        dtype = TORCH_DTYPE_MAP[self._config.export_dtype]
        model = {
            name: value.to(dtype)
            if isinstance(value, torch.Tensor) and value.is_floating_point()
            else value
            for name, value in self._flat[MODEL].state_dict().items()
        }
        hf = self._config.last_save_in_hf
        state = {MODEL: self._adapter.to_hf(model) if hf else model}
        self.checkpointer.save(step, state, overwrite=True)
        if hf and Coordinator.of(None, "torchtitan", self.folder).coordinates:
            self.checkpointer.export_hf(filesystem.join(self.folder, f"hf-{step}"), step=step)

    def _maybe_wait_for_staging(self) -> None:
        """A state is staged when `save` returns."""

    def _wait_for_saving(self) -> None:
        saving, self.save_future = self.save_future, None
        if saving is not None and saving.exception() and self._config.on_error == "raise":
            saving.result()

    # Loading.

    @torch.no_grad()
    def _load(self, step: int = -1) -> bool:
        newest = newest_step(self.checkpointer, self._config.timeout)
        if step == -1 and newest is None:
            return self._load_initial()
        # Step 0 is a seed: a model that was never trained.
        model_only = (newest if step == -1 else step) == 0
        self._load_step(self.checkpointer, None if step == -1 else step, model_only)
        return True

    def _load_initial(self) -> bool:
        config, path = self._config, self._config.initial_load_path
        if config.initial_load_in_hf:
            self._load_hf(path or self._adapter.hf_assets_path)
        elif path is None:
            logger.info("%s has no step: this is a fresh start.", self.folder)
            return False
        elif filesystem.isfile(filesystem.join(path, ".metadata")):
            self._load_dcp(path)
        else:
            root, step = split_step(path)
            if step is None:
                raise UsageError(
                    f"initial_load_path is {path}: name a step, as in /runs/a/checkpoint/step-100"
                )
            with Checkpointer(
                root, timeout=config.timeout, options=CheckpointerOptions(read_only=True)
            ) as other:
                self._load_step(other, step, config.initial_load_model_only)
        return True

    def _load_step(self, source: Checkpointer, step: int | None, model_only: bool) -> None:
        into = self._state(model_only, self._config.exclude_from_loading)
        loaded = source.load(into, step=step, include=tuple(into))
        self._take(loaded.state)
        if RANDOM in into:
            set_at_first_forward(RandomState().state_dict(), self._parts)
        logger.info("Loaded step %s of %s.", loaded.step, source.url)

    def _load_hf(self, path: str) -> None:
        model = self._adapter.to_hf(self._flat[MODEL].state_dict())
        reader = self._adapter.get_hf_storage_reader(
            path, self._config.initial_load_in_hf_quantized
        )
        load_dcp(model, storage_reader=reader)
        self._flat[MODEL].load_state_dict(self._adapter.from_hf(model))

    def _load_dcp(self, path: str) -> None:
        """A checkpoint of torchtitan's own manager has the model's tensors at its root."""
        without = [RANDOM, *self._config.exclude_from_loading]
        state = self._state(self._config.initial_load_model_only, without)
        model = state.pop(MODEL)
        at_root = {**state, **model}
        load_dcp(at_root, checkpoint_id=path)
        self._take({name: at_root[name] for name in state} | {MODEL: at_root})

    def _state(self, model_only: bool = False, without: list[str] | None = None) -> dict[str, Any]:
        left_out = {*(without or ()), *((OPTIMIZER, *self._others) if model_only else ())}
        flat = {name: one.state_dict() for name, one in self._flat.items() if name not in left_out}
        others = {name: one for name, one in self._others.items() if name not in left_out}
        return {**flat, **others}

    def _take(self, state: dict[str, Any]) -> None:
        """Tensors were loaded in place. Options of the optimizers were not, and neither was what a
        hook of a module has made for its state dict."""
        for name, one in self._flat.items():
            if name in state:
                one.load_state_dict(state[name])

    def _close(self) -> None:
        if hasattr(self, "checkpointer"):  # absent if the constructor has failed
            self.checkpointer.close()


class _Position:
    """The data loader. torchtitan's only warns if its rank has no position in a step, and would
    start at the beginning of the data."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def state_dict(self) -> Any:
        return self._loader.state_dict()

    def load_state_dict(self, state: Any) -> None:
        if missing := set(self._loader.state_dict()) - set(state):
            raise MismatchError(
                f"the step has no {', '.join(sorted(missing))} of the data loader, because it was "
                "saved on other ranks: use exclude_from_loading=['dataloader'] to start at the "
                "beginning of the data"
            )
        self._loader.load_state_dict(state)
