"""Train adapters on a model that rests: each step is complete, and costs what changed.

python examples/lora/train.py --folder run            # and again: it continues
"""

import argparse

import torch
from torch import nn

import torchrelay as tr


class Adapted(nn.Module):
    """A linear layer that is not trained, and a product of two small matrices that is."""

    def __init__(self, base: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.lora_a = nn.Parameter(torch.randn(rank, base.in_features) / base.in_features)
        self.lora_b = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + x @ self.lora_a.T @ self.lora_b.T


parser = argparse.ArgumentParser()
parser.add_argument("--folder", required=True)
parser.add_argument("--steps", type=int, default=5)
parser.add_argument("--width", type=int, default=1024)
chosen = parser.parse_args()

torch.manual_seed(0)
model = nn.Sequential(*[Adapted(nn.Linear(chosen.width, chosen.width)) for _ in range(8)])
optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=1e-3)
state = {"model": model, "optimizer": optimizer}

with tr.Checkpointer(chosen.folder, keep=3) as checkpointer:
    done = checkpointer.restore(state) or 0
    for step in range(done + 1, done + chosen.steps + 1):
        loss = (model(torch.ones(4, chosen.width)) - 1).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        report = checkpointer.save(step, state)
        print(
            f"step {step}: loss {loss:.6f}, {report.bytes_written / 1e6:.1f} MB written,"
            f" {report.bytes_reused / 1e6:.1f} MB reused"
        )
