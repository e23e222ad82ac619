"""A small model trained by Lightning with torchrelay: DDP, or FSDP2 by `ModelParallelStrategy`."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.distributed.fsdp import fully_shard

from tests.support.framework_jobs import Losses, die, run_phases, save_weights
from torchrelay.integrations.lightning import RandomNumbers, RelayCheckpointIO, RelayStrategy

EPOCHS, STEPS = 3, 15
SHARDED = "--sharded" in sys.argv


class Model(L.LightningModule):
    def __init__(self, losses: Losses | None = None, die_at: int | None = None) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net = nn.Sequential(nn.Linear(16, 32), nn.Dropout(0.05), nn.Linear(32, 4))
        self.losses, self.die_at = losses, die_at
        self.save_hyperparameters({"width": 32})

    def configure_model(self) -> None:
        if SHARDED:
            fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        points, classes = batch
        loss = nn.functional.cross_entropy(self.net(points), classes)
        if self.losses is not None:
            mean = self.trainer.strategy.reduce(loss.detach().clone(), reduce_op="mean")
            self.losses.add(self.global_step + 1, float(mean))
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        if self.global_step == self.die_at:
            strategy = self.trainer.strategy
            (strategy if SHARDED else strategy.checkpoint_io).links.settle()
            strategy.barrier()
            die()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 2 * STEPS)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def data() -> torch.utils.data.TensorDataset:
    draw = torch.Generator().manual_seed(3)
    points = torch.randn(20, 16, generator=draw)
    return torch.utils.data.TensorDataset(points, points[:, :4].argmax(1))


def trainer(folder: Path, kept: ModelCheckpoint, **options: Any) -> L.Trainer:
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if SHARDED:
        options["strategy"] = RelayStrategy(world, 1, checkpoints={"timeout": 60})
    else:
        options.setdefault("plugins", []).append(RelayCheckpointIO(timeout=60))
        if world > 1:
            options["strategy"] = DDPStrategy(process_group_backend="gloo")
    return L.Trainer(
        accelerator="cpu",
        devices=world,
        callbacks=[RandomNumbers(), kept],
        default_root_dir=folder,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **{"max_epochs": EPOCHS, **options},
    )


def train(folder: Path, name: str, die_at: int | None) -> None:
    model = Model(Losses(folder, name), die_at)
    kept = ModelCheckpoint(folder / "steps", every_n_epochs=1, save_last=True)
    per_rank = 4 // int(os.environ.get("WORLD_SIZE", "1"))
    loader = torch.utils.data.DataLoader(data(), batch_size=per_rank, shuffle=True)
    runs = trainer(folder, kept)
    if runs.global_rank:
        torch.manual_seed(99)
    last = folder / "steps" / "last.ckpt"
    runs.fit(model, loader, ckpt_path=str(last) if last.exists() else None)
    if not SHARDED:
        save_weights(folder, name, model.state_dict())
    else:
        full = {key: one.full_tensor() for key, one in model.state_dict().items()}
        save_weights(folder, name, full)


if __name__ == "__main__":
    run_phases(train)
