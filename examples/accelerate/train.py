"""Train with Accelerate; the lines marked `# +` are what torchrelay needs.

torchrun --standalone --nproc-per-node 2 examples/accelerate/train.py --folder run

Kill it and start it again, on the same or another number of ranks: it continues where it was.
"""

import argparse

import torch
from accelerate import Accelerator, DataLoaderConfiguration
from torch import nn

from torchrelay.integrations.accelerate import use_torchrelay  # +


class Progress:
    """How far training is."""

    epoch = step = 0

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch, self.step = state["epoch"], state["step"]


def main(folder: str, epochs: int) -> None:
    config = DataLoaderConfiguration(use_stateful_dataloader=True, use_seedable_sampler=True)
    accelerator = Accelerator(cpu=not torch.cuda.is_available(), dataloader_config=config)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    points = torch.randn(400, 16, generator=torch.Generator().manual_seed(0))
    data = torch.utils.data.TensorDataset(points, points[:, :4].argmax(1))
    loader = torch.utils.data.DataLoader(data, batch_size=8, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    progress = Progress()
    accelerator.register_for_checkpointing(progress)
    relay = use_torchrelay(accelerator, f"{folder}/steps", keep=3)  # +
    relay.resume()  # +
    while progress.epoch < epochs:
        loader.set_epoch(progress.epoch)
        for batch, classes in loader:
            loss = nn.functional.cross_entropy(model(batch), classes)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            progress.step += 1
            if progress.step % 10 == 0:
                accelerator.print(f"step {progress.step} loss {loss.item():.4f}")
                accelerator.save_state(f"step_{progress.step}")  # +
        progress.epoch += 1


if __name__ == "__main__":
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--folder", required=True, help="where steps are saved")
    options.add_argument("--epochs", type=int, default=3)
    main(**vars(options.parse_args()))
