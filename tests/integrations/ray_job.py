"""Runs of Ray Train with torchrelay, one after the other: `fit` of each takes Ray half a minute."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import ray
import torch
from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

from examples.ray.train import train
from torchrelay.integrations.ray import RelayReports

STEPS, EVERY, DIES_AT, KEPT = 10, 2, 7, 3


def fitted(folder: Path, function: Any, workers: int, failures: int = 0, **config: Any) -> Any:
    where = RunConfig(
        storage_path=str(folder),
        name="experiment",
        checkpoint_config=CheckpointConfig(num_to_keep=KEPT),
        failure_config=FailureConfig(max_failures=failures),
    )
    scaling = ScalingConfig(num_workers=workers)
    trainer = TorchTrainer(
        function, train_loop_config=config, scaling_config=scaling, run_config=where
    )
    return trainer.fit()


def report_and_spoil(config: dict[str, Any]) -> None:
    """The second save fails."""
    relay = RelayReports(on_error=config["on_error"], timeout=60)
    state = {"weight": torch.ones(4)}
    relay.report({"step": 1}, 1, state)
    relay.checkpointer.wait(60)
    steps = Path(relay.checkpointer.url.removeprefix("file://"))
    steps.rename(steps.parent / "gone")
    steps.write_text("a file")
    relay.report({"step": 2}, 2, state)
    relay.close()


def main(folder: Path) -> None:
    ray.init(num_cpus=2, include_dashboard=False)
    for name, die_at in (("whole", None), ("died", DIES_AT)):
        config = {"steps": STEPS, "every": EVERY, "die_at": die_at}
        result = fitted(folder / name, train, 2, failures=1, **config)
        kept = [checkpoint.path for checkpoint, _ in result.best_checkpoints]
        print(f"{name}: {result.metrics} {result.checkpoint.path} {len(kept)}", flush=True)
    config = {"steps": STEPS + EVERY, "every": EVERY, "die_at": None}
    print(f"alone: {fitted(folder / 'died', train, 1, **config).metrics}", flush=True)
    print(f"warned: {fitted(folder / 'warned', report_and_spoil, 1, on_error='warn').metrics}")
    try:
        fitted(folder / "raised", report_and_spoil, 1, on_error="raise")
    except ray.train.TrainingFailedError as fault:
        print(f"raised: {'CheckpointError: cannot' in str(fault)}", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
