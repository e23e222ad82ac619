"""Train with Lightning; the lines marked `# +` are what torchrelay needs.

torchrun --standalone --nproc-per-node 2 examples/lightning/train.py --folder run

Kill it and start it again, on the same or another number of ranks: it continues where it was.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn

from torchrelay.integrations.lightning import RandomNumbers, RelayCheckpointIO  # +


class Model(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4))

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        if index % 10 == 0:
            print(f"step {self.global_step} loss {loss.item():.4f}")
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def main(folder: str, epochs: int) -> None:
    points = torch.randn(400, 16, generator=torch.Generator().manual_seed(0))
    data = torch.utils.data.TensorDataset(points, points[:, :4].argmax(1))
    trainer = L.Trainer(
        accelerator="auto" if torch.cuda.is_available() else "cpu",
        devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        max_epochs=epochs,
        callbacks=[ModelCheckpoint(f"{folder}/steps", save_last=True), RandomNumbers()],  # +
        plugins=[RelayCheckpointIO()],  # +
        logger=False,
        enable_progress_bar=False,
    )
    last = Path(folder, "steps", "last.ckpt")
    resume = str(last) if last.exists() else None
    loader = torch.utils.data.DataLoader(data, batch_size=8, shuffle=True)
    trainer.fit(Model(), loader, ckpt_path=resume)


if __name__ == "__main__":
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--folder", required=True, help="where steps are saved")
    options.add_argument("--epochs", type=int, default=3)
    given = options.parse_args()
    main(given.folder, given.epochs)
