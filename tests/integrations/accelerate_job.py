"""A small model in a loop of one's own with Accelerate, saved by torchrelay."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, DataLoaderConfiguration
from torch import nn

from tests.support.framework_jobs import Losses, die, run_phases, save_weights
from torchrelay.integrations.accelerate import use_torchrelay

EPOCHS, STEPS, EVERY = 3, 15, 2


class Counter:
    """An object that is registered for checkpointing."""

    def __init__(self) -> None:
        self.epoch = self.step = 0

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch, self.step = state["epoch"], state["step"]


def data() -> torch.utils.data.TensorDataset:
    draw = torch.Generator().manual_seed(3)
    points = torch.randn(20, 16, generator=draw)
    return torch.utils.data.TensorDataset(points, points[:, :4].argmax(1))


def train(folder: Path, name: str, die_at: int | None, **options: Any) -> Any:
    config = DataLoaderConfiguration(use_stateful_dataloader=True, use_seedable_sampler=True)
    # Step 8, which is resumed, is saved between two updates.
    accelerator = Accelerator(cpu=True, dataloader_config=config, gradient_accumulation_steps=2)
    torch.manual_seed(1)
    model: Any = nn.Sequential(nn.Linear(16, 32), nn.Dropout(0.2), nn.Linear(32, 4))
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule: Any = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 2 * STEPS)
    per_rank = 4 // int(os.environ.get("WORLD_SIZE", "1"))
    loader: Any = torch.utils.data.DataLoader(data(), batch_size=per_rank, shuffle=True)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    counter = Counter()
    accelerator.register_for_checkpointing(counter)
    relay = use_torchrelay(accelerator, folder / "steps", keep=3, timeout=60, **options)
    if relay.resume() is None:
        torch.manual_seed(accelerator.process_index)  # each rank has its own dropout
    losses = Losses(folder, name)
    while counter.epoch < EPOCHS:
        loader.set_epoch(counter.epoch)
        for points, classes in loader:
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(points), classes)
                accelerator.backward(loss)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            counter.step += 1
            losses.add(counter.step, accelerator.reduce(loss.detach(), "mean").item())
            if counter.step == die_at:
                relay.checkpointer.wait(60)
                accelerator.wait_for_everyone()
                die()
            if counter.step % EVERY == 0:
                accelerator.save_state(f"step_{counter.step}")
        counter.epoch += 1
    relay.checkpointer.close()
    save_weights(folder, name, accelerator.unwrap_model(model).state_dict())
    return accelerator, relay


if __name__ == "__main__":
    run_phases(train)
