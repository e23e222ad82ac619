"""Lightning saves through torchrelay: a `CheckpointIO`, a strategy for FSDP2, callbacks.

Trainer(plugins=[RelayCheckpointIO()], callbacks=[RandomNumbers(), ModelCheckpoint(...)])
Trainer(strategy=RelayStrategy(), callbacks=[RandomNumbers(), ModelCheckpoint(...)])

A checkpoint `DIR/NAME.ckpt` is a link to a step of the directory, `DIR/step-N`: it appears, or
is exchanged, when the step is committed.
"""

from __future__ import annotations

import logging
import os
import sys
import time
import warnings
from collections import OrderedDict, defaultdict
from functools import partial
from pathlib import Path
from typing import Any, Literal

import msgspec
import torch

from torchrelay.checkpointer.front import Checkpointer
from torchrelay.coordination.coordinator import Coordinator
from torchrelay.deadlines import Deadline, seconds_of
from torchrelay.errors import CheckpointError, StepNotFoundError, UsageError
from torchrelay.files import is_dir, is_symlink
from torchrelay.integrations.extras import extra
from torchrelay.integrations.loader_iterators import begin_at_the_first_sample
from torchrelay.integrations.random_state import RandomState, unchanged
from torchrelay.landing.packed import pack, unpack
from torchrelay.memory import threads
from torchrelay.pending import Pending
from torchrelay.stores.locate import split_step

with extra("lightning"):
    from lightning.fabric.plugins import CheckpointIO
    from lightning.pytorch.callbacks import Callback
    from lightning.pytorch.strategies import ModelParallelStrategy

logger = logging.getLogger("torchrelay")

Checkpoint = dict[str, Any]
Where = str | os.PathLike[str]


class StepLinks:
    """Checkpoints as links to steps: saved in the background, removed when no save is under way.

    One for each process. Without `no_dist` all ranks save and load together; rank 0 has the links.
    """

    def __init__(
        self, no_dist: bool, on_error: Literal["raise", "warn"], options: dict[str, Any]
    ) -> None:
        self._no_dist, self._on_error, self._options = no_dist, on_error, options
        # Longer than a save, which has its own deadline.
        self._seconds = seconds_of(options.get("timeout", 1800.0)) + 60.0
        self._roots: dict[Path, Checkpointer] = {}
        self._pending: Pending | None = None
        self._linking: threads.Running | None = None
        self._link_fault: OSError | None = None
        self._failed = False  # whether the last save has failed, or got no link
        self._removed: list[Path] = []  # once a later save is committed
        self._unlinked: list[Path] = []  # steps that have lost a link
        self.stalls: list[float] = []  # seconds that each save kept training waiting
        self.steps: list[int] = []  # of these saves

    def save(self, state: object, path: Where, step: int, *, links: bool) -> None:
        link = _local(path)
        # In a round: rank 0 alone has the links, and all ranks stop if one cannot be made.
        ranks = Coordinator.of(None, "links", str(link.parent), no_dist=self._no_dist)
        ranks.call("links").together("begin", self.settle, Deadline(self._seconds))
        begun = time.monotonic()
        self._pending = self._root(link.parent).save_async(
            step, state, overwrite=True, on_error=self._on_error
        )
        self.stalls.append(time.monotonic() - begun)
        self.steps.append(step)
        if links:
            act = partial(self._link_when_saved, self._pending, link, step)
            self._linking = threads.run_anyway(act, "link")

    def _link_when_saved(self, pending: Pending, link: Path, step: int) -> None:
        """A step of this number may be an older one, which a save that failed has left there."""
        pending.ends_within(float("inf"))
        if not pending.succeeded():
            return
        before = link.resolve()
        fresh = link.with_name(f".{link.name}.{os.getpid()}")
        try:
            fresh.unlink(missing_ok=True)
            fresh.symlink_to(f"step-{step}")
            fresh.replace(link)
        except OSError as fault:
            self._link_fault = fault
        else:
            self._unlinked.append(before)

    def load(self, path: Where, into: object = None, **options: Any) -> Any:
        self.settle()
        link = _local(path)
        target, step = link.resolve(), _step_at(link.resolve())
        if step is None:
            raise StepNotFoundError(f"{link} is not a checkpoint of torchrelay", file=str(link))
        return self._root(target.parent).load(into, step=step, **options).state

    def remove(self, path: Where) -> None:
        """The last good checkpoint may be the one that is removed: the new one comes first."""
        self._removed.append(_local(path))
        if self._pending is None or self._pending.done():
            self.settle()

    def close(self) -> None:
        self.settle()
        roots, self._roots = self._roots, {}
        for root in roots.values():
            root.close()

    def settle(self) -> None:
        """Wait for the save under way; then remove what was to be removed. A save that failed, or
        got no link, leaves the checkpoints that it was to replace."""
        pending, self._pending = self._pending, None
        linking, self._linking = self._linking, None
        if pending is not None:
            pending.ends_within(float("inf"))  # its deadline is the checkpointer's
        if linking is not None:
            linking.wait()
        fault, self._link_fault = self._link_fault, None
        if pending is not None:
            self._failed = fault is not None or not pending.succeeded()
        if fault is not None:
            self._no_link(pending, fault)
        if self._failed:
            return
        removed, self._removed = self._removed, []
        for link in removed:
            self._unlinked.append(link.resolve())
            link.unlink(missing_ok=True)
        unlinked, self._unlinked = self._unlinked, []
        for target in unlinked:
            links = {one.resolve() for one in target.parent.glob("*") if is_symlink(one)}
            step = _step_at(target)
            if step is not None and target not in links:
                self._root(target.parent).delete(step)

    def _no_link(self, pending: Pending | None, fault: OSError) -> None:
        step = None if pending is None else pending.step
        lost = CheckpointError(
            f"the step is saved, and no link to it can be made: {fault.strerror or fault}",
            step=step,
            file=fault.filename2 or fault.filename,
        )
        if self._on_error == "raise":
            raise lost from fault
        logger.warning("%s", lost)

    def _root(self, folder: Path) -> Checkpointer:
        folder = folder.resolve()
        if folder not in self._roots:
            self._roots[folder] = Checkpointer(folder, no_dist=self._no_dist, **self._options)
        return self._roots[folder]


class RelayCheckpointIO(CheckpointIO):  # type: ignore[misc, unused-ignore]
    """For strategies whose rank 0 saves the whole state: one device, DDP.

    `on_error="raise"`: a save that failed in the background fails the run at the next one; "warn":
    it is logged. Other arguments are those of `Checkpointer`, but for `keep`: `ModelCheckpoint`
    decides which checkpoints stay.
    """

    def __init__(self, *, on_error: Literal["raise", "warn"] = "raise", **options: Any) -> None:
        self.links = StepLinks(True, on_error, options)

    def save_checkpoint(
        self, checkpoint: Checkpoint, path: Where, storage_options: Any = None
    ) -> None:
        self.links.save(plain(checkpoint), path, checkpoint["global_step"], links=True)

    def load_checkpoint(
        self, path: Where, map_location: Any = None, weights_only: bool | None = None
    ) -> Checkpoint:
        device = map_location if isinstance(map_location, (str, torch.device)) else None
        loaded: Checkpoint = self.links.load(path, device=device)
        return loaded

    def remove_checkpoint(self, path: Where) -> None:
        self.links.remove(path)

    def teardown(self) -> None:
        self.links.close()


class RelayStrategy(ModelParallelStrategy):  # type: ignore[misc, unused-ignore]
    """`ModelParallelStrategy` (FSDP2, tensor parallel): every rank saves its shards, in the
    background, and any number of ranks loads them. Arguments for saving as `RelayCheckpointIO`."""

    def __init__(
        self,
        *sizes: Any,
        on_error: Literal["raise", "warn"] = "raise",
        checkpoints: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(*sizes, save_distributed_checkpoint=True, **options)
        self.links = StepLinks(False, on_error, checkpoints or {})

    def _objects(self) -> Checkpoint:
        return {"model": self.model, "optimizers": list(self.optimizers)}

    def save_checkpoint(
        self, checkpoint: Checkpoint, filepath: Where, storage_options: Any = None
    ) -> None:
        path = self.broadcast(os.fspath(filepath))
        rest = {
            key: value
            for key, value in checkpoint.items()
            if key not in ("state_dict", "optimizer_states")
        }
        state = {**self._objects(), "rest": plain(rest)}
        self.links.save(state, path, checkpoint["global_step"], links=self.is_global_zero)

    def load_checkpoint(
        self, checkpoint_path: Where, weights_only: bool | None = None
    ) -> Checkpoint:
        path = self.broadcast(os.fspath(checkpoint_path))
        into = self._objects()
        self.links.load(path, into, include=("model", "optimizers"))
        rest: Checkpoint = self.links.load(path, key="rest")
        return rest

    def remove_checkpoint(self, filepath: Where) -> None:
        if self.is_global_zero:
            self.links.remove(filepath)

    def teardown(self) -> None:
        self.links.close()
        super().teardown()


class RandomNumbers(Callback):  # type: ignore[misc, unused-ignore]
    """Every rank's random numbers are in the checkpoint, and continue where they were: those of the
    process, and generators of the data loaders for training.

    Making an iterator of a data loader draws from them, once more after a restart than without
    one. So the numbers of an epoch's first batch are those of before its iterator was made. The
    iterator draws the order of shuffled samples: that of the first epoch after a restart is made
    again, once the numbers are there.
    """

    def __init__(self) -> None:
        self._trainer: Any = None
        self._delayed: Checkpoint | None = None  # the numbers that the next batch begins with
        self._generators: list[torch.Tensor | None] | None = None  # from a checkpoint

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self._trainer = trainer

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        if self._generators is not None:  # from a checkpoint of the end of an epoch
            self._continue()
            _begin_again(trainer.fit_loop)
        else:
            self._delayed = RandomState().state_dict()

    def on_train_batch_start(self, *_: Any) -> None:
        self._continue()
        self._delayed = None

    def on_train_epoch_end(self, *_: Any) -> None:
        if self._generators is not None:  # from a checkpoint of the validation in this epoch
            self._continue()

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self._trainer = self._delayed = self._generators = None

    def _continue(self) -> None:
        states, self._generators = self._generators or [], None
        for loader, state in zip(_train_loaders(self._trainer), states, strict=False):
            if state is not None and (generator := getattr(loader, "generator", None)) is not None:
                generator.set_state(state)
        if self._delayed is not None:
            RandomState().load_state_dict(self._delayed)

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: Checkpoint) -> None:
        if pl_module.automatic_optimization and trainer.fit_loop.epoch_loop._should_accumulate():
            warnings.warn(
                f"step {checkpoint['global_step']} is saved between two updates, and Lightning "
                "does not save the gradients that are accumulated there: after a resume, losses "
                "differ. Save at the end of epochs",
                RuntimeWarning,
                stacklevel=2,
            )

    def state_dict(self) -> Checkpoint:
        generators = [getattr(one, "generator", None) for one in _train_loaders(self._trainer)]
        numbers = RandomState().state_dict()
        numbers["generators"] = [one and one.get_state() for one in generators]
        mine = pack(numbers)
        ranks = Coordinator.of(None, "RandomNumbers")
        answer = ranks.call("gather").round(
            "gather",
            lambda: mine,
            lambda text: [msgspec.msgpack.encode(text)] * len(text),
            Deadline(600),
        )
        return {"ranks": [unpack(one) for one in msgspec.msgpack.decode(answer)]}

    def load_state_dict(self, state: Checkpoint) -> None:
        states = state["ranks"]
        rank = Coordinator.of(None, "RandomNumbers").rank
        self._delayed = states[rank if rank < len(states) else 0]
        self._generators = self._delayed.get("generators", [])


def _train_loaders(trainer: Any) -> list[Any]:
    """The data loaders of the epochs, once Lightning has them."""
    combined = None if trainer is None else trainer.fit_loop._combined_loader
    return [] if combined is None else list(combined.flattened)


def _begin_again(fit_loop: Any) -> None:
    """Have the epoch that starts begin with a new iterator, as Lightning has all but the first of
    a run. Loaders of torchdata get their states first, which Lightning has not used at the end of
    an epoch; others with a state keep the iterator that they have."""
    loader, states = fit_loop._combined_loader, fit_loop._combined_loader_states_to_load
    stateful = [one for one in loader.flattened if hasattr(one, "load_state_dict")]
    torchdata: Any = sys.modules.get("torchdata.stateful_dataloader")
    known = () if torchdata is None else torchdata.StatefulDataLoader
    if not all(isinstance(one, known) for one in stateful):
        return
    if states:
        fit_loop._combined_loader_states_to_load = []
        with unchanged(*(one.generator for one in stateful)):
            loader._load_state_dicts(states)
            for one in stateful:
                iter(one)  # uses the state; the next iterator is that of the next epoch
                begin_at_the_first_sample(one)
    iter(fit_loop._data_fetcher)


class SaveStalls(Callback):  # type: ignore[misc, unused-ignore]
    """The trainer's loggers (TensorBoard, W&B) get `save_stall_seconds`: how long each save kept
    training waiting. A save is logged after the next batch, or at the end, at its own step."""

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        strategy = trainer.strategy
        saves = strategy if isinstance(strategy, RelayStrategy) else strategy.checkpoint_io
        if not isinstance(saves, (RelayStrategy, RelayCheckpointIO)):
            raise UsageError("SaveStalls needs RelayCheckpointIO or RelayStrategy, which save")
        self._links = saves.links
        self._logged = len(saves.links.stalls)

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self._log(trainer)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self._log(trainer)  # a checkpoint of the end of training comes after every other event

    def _log(self, trainer: Any) -> None:
        links, first = self._links, self._logged
        self._logged = len(links.stalls)
        for step, stall in zip(links.steps[first:], links.stalls[first:], strict=True):
            for logger in trainer.loggers:
                logger.log_metrics({"save_stall_seconds": stall}, step=step)


def plain(value: Any) -> Any:
    """A checkpoint in plain containers: Lightning has dicts of its own for hyperparameters."""
    if isinstance(value, (OrderedDict, defaultdict)):
        return value
    if isinstance(value, dict):
        return {key: plain(one) for key, one in value.items()}
    return [plain(one) for one in value] if type(value) is list else value


def _step_at(target: Path) -> int | None:
    return split_step(target)[1] if is_dir(target) else None


def _local(path: Where) -> Path:
    if "://" in os.fspath(path):
        raise UsageError(f"{os.fspath(path)}: checkpoints are links, which only a directory has")
    return Path(path).absolute()
