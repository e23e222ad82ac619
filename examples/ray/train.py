"""Train with Ray Train; the lines marked `# +` are what torchrelay needs.

python examples/ray/train.py --folder run --workers 2

Let a worker die (--die-at 7), or start it again with more steps: it continues where it was.
"""

import argparse
import os
from pathlib import Path
from typing import Any

import torch
from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig, get_context
from ray.train.torch import TorchTrainer, prepare_model
from torch import nn

from torchrelay.integrations.ray import RelayReports  # +


def train(config: dict[str, Any]) -> None:
    torch.manual_seed(0)
    rank, ranks = get_context().get_world_rank(), get_context().get_world_size()
    model = prepare_model(nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    state = {"model": model, "optimizer": optimizer}
    relay = RelayReports()  # +
    done = relay.resume(state) or 0  # +
    for step in range(done + 1, config["steps"] + 1):
        points = torch.randn(8, 16, generator=torch.Generator().manual_seed(step))[rank::ranks]
        loss = nn.functional.cross_entropy(model(points), points[:, :4].argmax(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step == config["die_at"] and done == 0 and rank == 0:
            os._exit(1)
        if step % config["every"] == 0:
            relay.report({"step": step, "loss": loss.item()}, step, state)  # +
    relay.close()  # +


if __name__ == "__main__":
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--folder", type=Path, required=True, help="where steps are saved")
    options.add_argument("--steps", type=int, default=20)
    options.add_argument("--every", type=int, default=2)
    options.add_argument("--workers", type=int, default=2)
    options.add_argument("--die-at", type=int, help="a worker dies at this step, once")
    given = options.parse_args()
    where = RunConfig(
        storage_path=str(given.folder.absolute()),
        name="experiment",
        checkpoint_config=CheckpointConfig(num_to_keep=3),
        failure_config=FailureConfig(max_failures=1),
    )
    config = {"steps": given.steps, "every": given.every, "die_at": given.die_at}
    scaling = ScalingConfig(num_workers=given.workers)
    result = TorchTrainer(train, train_loop_config=config, scaling_config=scaling, run_config=where)
    print(result.fit().metrics)
