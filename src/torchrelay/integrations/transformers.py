"""Hugging Face's `Trainer` saves through torchrelay and resumes exactly.

relay = RelayCallback("runs/a", every=100)
trainer = Trainer(..., callbacks=[relay])
trainer.train(resume_from_checkpoint=relay.checkpoint)
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import tempfile
import time
import weakref
from pathlib import Path
from typing import Any, Literal

from torchrelay.checkpointer.front import Checkpointer
from torchrelay.checkpointer.keep import Keep, KeepBest, policy
from torchrelay.errors import UsageError
from torchrelay.integrations.extras import extra
from torchrelay.integrations.pretrained import is_pretrained, write_pretrained
from torchrelay.integrations.random_state import RandomState
from torchrelay.integrations.resume import best_step, step_to_resume
from torchrelay.options import CheckpointerOptions

with extra("transformers"):
    import torch
    from safetensors.torch import save_file
    from transformers import TrainerCallback

Kept = dict[str, Any]
logger = logging.getLogger("torchrelay")
trainer_logger = logging.getLogger("transformers.trainer")


class RelayCallback(TrainerCallback):  # type: ignore[misc, unused-ignore]
    """Saves model, optimizer, scheduler, random numbers and the trainer's state every `every`
    steps, in the background; when the job is asked to stop (SIGTERM); and at the end of training.
    The metrics of an evaluation at that step are saved with it, for policies such as
    `keep=KeepBest("eval_loss") | KeepLast(3)`.

    `load_best=KeepBest("eval_loss")` keeps the best step, too, and the model has its weights when
    training has ended, as with the trainer's `load_best_model_at_end`. For that, evaluate at steps
    that are saved.

    Use it with `save_strategy="no"`. `keep`, `keeper`, `timeout` and other arguments are those of
    `Checkpointer`. `on_error="raise"`: a save that failed in the background fails the run at the
    next save; "warn": it is logged, and training continues.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        every: int,
        keep: Keep | int | None = 3,
        load_best: KeepBest | None = None,
        on_error: Literal["raise", "warn"] = "raise",
        **options: Any,
    ) -> None:
        if every < 1:
            raise UsageError(f"every is a positive number of steps, not {every}")
        self._root, self._every, self._on_error = root, every, on_error
        if load_best is not None and not isinstance(load_best, KeepBest):
            raise UsageError(f'load_best is tr.KeepBest("eval_loss"), say, not {load_best!r}')
        self._best = load_best
        both = keep if load_best is None else policy(keep) | load_best
        self._options = {"keep": both, **options}
        self._timeout = options.get("timeout", 1800.0)
        self._checkpointer: Checkpointer | None = None
        self._directory: tempfile.TemporaryDirectory[str] | None = None
        self._resumed: int | None = None  # the step that training continues from
        self._random: dict[str, Any] | None = None  # for the first step after that
        self._saved: int | None = None
        self._due = self._stopping = False
        self.stalls: list[float] = []  # seconds that each save kept training waiting
        self._logs: weakref.ref[Any] | None = None  # the trainer, which has this callback

    @property
    def checkpointer(self) -> Checkpointer:
        """The steps. Made when it is first used, because the process group must exist by then."""
        if self._checkpointer is None:
            has_group = torch.distributed.is_available() and torch.distributed.is_initialized()
            if int(os.environ.get("WORLD_SIZE", "1")) > 1 and not has_group:
                raise UsageError("make TrainingArguments first: they create the process group")
            self._checkpointer = Checkpointer(self._root, **self._options)
        return self._checkpointer

    @property
    def checkpoint(self) -> str | None:
        """The argument for `train(resume_from_checkpoint=)`: None at the first start, else a
        directory with the trainer's state at the newest step that verifies. All ranks call it."""
        step = self._resumed = step_to_resume(self.checkpointer)
        if step is None:
            return None
        trainer = self.checkpointer.load(step=step, key="trainer").state
        self._directory = tempfile.TemporaryDirectory(prefix="torchrelay-")
        folder = Path(self._directory.name)
        (folder / "trainer_state.json").write_text(trainer)
        # The trainer wants weights before it has an optimizer. They come with it, once, below.
        save_file({}, folder / "model.safetensors")
        trainer_logger.addFilter(_not_of_missing_weights)
        return str(folder)

    def export(self, target: str | os.PathLike[str], *, step: int | None = None) -> None:
        """Write the model of a step (the newest, by default) to a new directory, as its
        `from_pretrained` opens it: of a PEFT model the adapters. One process does it."""
        model = self._model
        with Checkpointer(
            self._root,
            no_dist=True,
            timeout=self._timeout,
            options=CheckpointerOptions(read_only=True),
        ) as steps:
            if is_pretrained(model):
                weights = steps.load(step=step, key="model", device="cpu").state
                write_pretrained(model, weights, target)
                return
            steps.export_hf(target, step=step)
        if (config := getattr(model, "config", None)) is not None:
            config.save_pretrained(target)

    def log_stalls(self, trainer: Any) -> None:
        """Have the trainer log `save_stall_seconds` after each save, to all that it reports to
        (TensorBoard, W&B). Its callbacks cannot log without it."""
        self._logs = weakref.ref(trainer)

    # The trainer's events

    def on_init_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        if str(getattr(args, "save_strategy", "no")).rpartition(".")[2].lower() != "no":
            raise UsageError('RelayCallback saves instead of the trainer: use save_strategy="no"')
        if getattr(args, "load_best_model_at_end", False):
            raise UsageError(
                "the trainer has no checkpoints to load the best of: instead of "
                'load_best_model_at_end use RelayCallback(load_best=tr.KeepBest("eval_loss"))'
            )
        if getattr(args, "fsdp", None) or getattr(args, "deepspeed", None):
            raise UsageError("RelayCallback works with one process or DDP, not FSDP or DeepSpeed")
        self._model = model
        if not hasattr(model, "_keys_to_ignore_on_save"):
            model._keys_to_ignore_on_save = None  # the trainer reads it, also of a plain module

    def on_train_begin(self, args: Any, state: Any, control: Any, **kept: Any) -> None:
        trainer_logger.removeFilter(_not_of_missing_weights)
        self._due = self._stopping = False
        self._saved = state.global_step
        if self._resumed is None:
            if state.global_step:
                raise UsageError("resume from RelayCallback.checkpoint, and from nothing else")
            return
        if state.global_step != self._resumed:
            raise UsageError(
                f"step {self._resumed} should be resumed, and the trainer is at step "
                f"{state.global_step}: use train(resume_from_checkpoint=relay.checkpoint)"
            )
        into = _training_state(kept)
        self.checkpointer.load(into, step=self._resumed, include=tuple(into))
        # Other callbacks and the data loader use random numbers before the first step.
        self._random = self.checkpointer.load(step=self._resumed, key="random").state
        if self._directory is not None:
            self._directory.cleanup()
        self._resumed = self._directory = None

    def on_step_end(self, args: Any, state: Any, control: Any, **kept: Any) -> None:
        if self._stopping:
            return  # the step before was saved, and this one is trained again
        self._stopping = self.checkpointer.reached_preemption(state.global_step)
        self._due = self._stopping or state.global_step % self._every == 0

    def on_step_begin(self, args: Any, state: Any, control: Any, **kept: Any) -> None:
        # A step is saved when the next one begins: by then it was evaluated and logged, and the
        # next batch is here, so a resumed run takes its random numbers at the same place.
        if self._random is not None:
            RandomState().load_state_dict(self._random)
            self._random = None
        if self._due:
            self._save(state, kept)
        if self._stopping:
            control.should_training_stop = True

    def on_train_end(self, args: Any, state: Any, control: Any, **kept: Any) -> None:
        if self._due or (self._saved != state.global_step and not self._stopping):
            self._save(state, kept)
        if self._best is not None and not self._stopping:
            self._load_best(self._best, kept["model"])
        checkpointer, self._checkpointer = self._checkpointer, None
        if checkpointer is not None:
            checkpointer.close()

    def _load_best(self, best: KeepBest, model: Any) -> None:
        self.checkpointer.wait()
        step = best_step(self.checkpointer, best, self._timeout)
        if step is None:
            logger.warning("no step has the metric %s: the model stays as it is", best.metric)
            return
        self.checkpointer.load({"model": model}, step=step, include="model")

    def _save(self, state: Any, kept: Kept) -> None:
        self._due, self._saved = False, state.global_step
        begun = time.monotonic()
        self.checkpointer.save_async(
            state.global_step,
            {
                **_training_state(kept),
                "random": RandomState(),
                "trainer": json.dumps(dataclasses.asdict(state)),
            },
            overwrite=True,
            metrics=_evaluated(state),
            on_error=self._on_error,
        )
        self.stalls.append(time.monotonic() - begun)
        if self._logs is not None and (trainer := self._logs()) is not None:
            trainer.log({"save_stall_seconds": self.stalls[-1]})


def _not_of_missing_weights(record: logging.LogRecord) -> bool:
    """The trainer warns of every weight that is not in its directory: none of them is, and all of
    them come from the step."""
    return not record.getMessage().startswith("There were missing keys in the checkpoint model")


def _training_state(kept: Kept) -> Kept:
    """The trainer's objects that have state."""
    optimizer = kept["optimizer"]
    state = {
        "model": kept["model"],
        "optimizer": getattr(optimizer, "optimizer", optimizer),
        "scheduler": kept["lr_scheduler"],
    }
    scaler = getattr(optimizer, "scaler", None)
    return state if scaler is None else {**state, "scaler": scaler}


def _evaluated(state: Any) -> dict[str, float]:
    """The evaluation of the step that is saved, for `KeepBest("eval_loss")`."""
    logs = [log for log in state.log_history if log.get("step") == state.global_step]
    return {
        name: value
        for log in logs
        for name, value in log.items()
        if name.startswith("eval_") and isinstance(value, (int, float))
    }
