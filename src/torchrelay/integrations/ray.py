"""Ray Train: all workers save together, into the experiment's storage, and report the step.

relay = RelayReports()
done = relay.resume(state) or 0
relay.report({"loss": loss}, step, state)   # in place of ray.train.report(..., checkpoint=...)
"""

from __future__ import annotations

import json
import logging
import time
from typing import Any, Literal

from torchrelay.checkpointer.front import Checkpointer
from torchrelay.errors import CheckpointError, DamagedError, StepNotFoundError, UsageError
from torchrelay.integrations.extras import extra
from torchrelay.pending import Pending
from torchrelay.stores.locate import split_step

with extra("ray"):
    import ray.train
    from ray.train import Checkpoint, CheckpointUploadMode

logger = logging.getLogger("torchrelay")

_METRICS = "ray_metrics"  # in each step, next to the caller's state
_SCHEMES = {"local": "", "s3": "s3://", "gcs": "gs://", "abfs": "az://"}


class RelayReports:
    """Made by each worker in its training function; all make the same calls in the same order.

    A step is `steps/step-N` in the experiment's directory or bucket. Ray counts it as a checkpoint
    once it is committed, and `CheckpointConfig` says how many stay. `on_error="raise"`: `report`
    returns when the state is copied, and a save that fails later fails the run. "warn": `report`
    waits for the commit, and if it fails, logs that and reports the metrics alone. `options` are
    those of `Checkpointer`.
    """

    def __init__(self, *, on_error: Literal["raise", "warn"] = "raise", **options: Any) -> None:
        if on_error not in ("raise", "warn"):
            raise UsageError(f"on_error is 'raise' or 'warn', not {on_error!r}")
        if options.get("keep") is not None:
            raise UsageError("Ray removes checkpoints: use CheckpointConfig(num_to_keep=...)")
        storage = ray.train.get_context().get_storage()
        self._filesystem = storage.storage_filesystem
        self._folder = f"{storage.experiment_fs_path}/steps"
        kind = self._filesystem.type_name
        if kind not in _SCHEMES:
            raise UsageError(f"torchrelay does not write to Ray's storage of type {kind!r}")
        self._on_error = on_error
        self.checkpointer = Checkpointer(_SCHEMES[kind] + self._folder, **options)
        self.stalls: list[float] = []  # seconds that each save kept training waiting

    def resume(self, state: dict[str, Any]) -> int | None:
        """Load the newest step that verifies into `state` and return it; None at the first start.

        Workers may die between the commit of a step and its report. Such steps are reported now,
        with the metrics that they were saved with, so that Ray knows of all that it is to remove.
        """
        known = ray.train.get_checkpoint()
        step = self.checkpointer.restore(state, include=tuple(state))
        if step is None:
            if known is not None:
                raise StepNotFoundError(
                    f"Ray's newest checkpoint is {known.path}, and {self.checkpointer.url} has no "
                    "step: it was not saved by torchrelay",
                    file=known.path,
                )
            return None
        reported = None if known is None else split_step(known.path)[1]
        steps, last = self.checkpointer.steps(), -1 if reported is None else reported
        for one in [one for one in steps if last < one <= step]:
            try:
                metrics = self.checkpointer.load(step=one, key=_METRICS).state
            except DamagedError as fault:
                logger.warning("step %d is not reported: %s", one, fault)
            else:
                ray.train.report(json.loads(metrics), **self._committed(one))
        return step

    def report(self, metrics: dict[str, Any], step: int, state: dict[str, Any]) -> None:
        """Save a state and report it with its metrics, which JSON can hold. All workers call it."""
        begun = time.monotonic()
        try:
            saved = {**state, _METRICS: json.dumps(metrics)}
        except TypeError as fault:
            raise UsageError(f"metrics are numbers and text: {fault}") from fault
        if self._on_error == "raise":
            pending = self.checkpointer.save_async(step, saved, overwrite=True)
            self.stalls.append(time.monotonic() - begun)
            ray.train.report(metrics, **self._when_committed(pending))
            return
        try:
            self.checkpointer.save(step, saved, overwrite=True)
            checkpoint = self._committed(step)
        except CheckpointError as fault:
            logger.warning("step %d is reported without a checkpoint: %s", step, fault)
            checkpoint = {}
        self.stalls.append(time.monotonic() - begun)
        ray.train.report(metrics, **checkpoint)

    def close(self) -> None:
        """Wait for the save in progress and end the writer process."""
        self.checkpointer.close()

    def _at(self, step: int) -> Checkpoint:
        return Checkpoint(f"{self._folder}/step-{step}", self._filesystem)

    def _committed(self, step: int) -> dict[str, Any]:
        return {
            "checkpoint": self._at(step),
            "checkpoint_upload_mode": CheckpointUploadMode.NO_UPLOAD,
        }

    def _when_committed(self, pending: Pending) -> dict[str, Any]:
        """For a report that Ray completes when the step is committed, in the order of reports."""

        def uploaded(checkpoint: Checkpoint, _: str) -> Checkpoint:
            pending.result()  # at most until the deadline of the save
            return checkpoint

        return {
            "checkpoint": self._at(pending.step),
            "checkpoint_upload_mode": CheckpointUploadMode.ASYNC,
            "checkpoint_upload_fn": uploaded,
            "delete_local_checkpoint_after_upload": False,  # it is the step itself
        }
