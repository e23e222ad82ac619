"""The training job whose state is passed on: a small transformer, AdamW, dropout."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import xxhash
from torch import nn


@dataclass(frozen=True)
class Settings:
    """How large the job is and how long it runs."""

    width: int = 256
    layers: int = 6
    vocabulary: int = 1024
    tokens: int = 32
    batch: int = 4
    steps: int = 24
    save_every: int = 5  # steps, on disk; each one is staged in memory
    worker_dies: int = 8  # at this step
    host_dies: int = 17
    seconds: float = 300.0  # after which the demo gives up


SMALL = Settings(
    width=64, layers=2, vocabulary=256, tokens=16, steps=9, save_every=2, worker_dies=3, host_dies=6
)


class _Model(nn.Module):
    def __init__(self, settings: Settings) -> None:
        super().__init__()
        width = settings.width
        self.embed = nn.Embedding(settings.vocabulary, width)
        nn.init.normal_(self.embed.weight, std=width**-0.5)
        layers = [
            nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.1, batch_first=True)
            for _ in range(settings.layers)
        ]
        self.layers = nn.Sequential(*layers)
        self.head = nn.Linear(width, settings.vocabulary, bias=False)
        self.head.weight = self.embed.weight  # tied, as in most language models

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.layers(self.embed(tokens)))
        return out


class DemoJob:
    """A model in training. Dropout draws on the random state, so that has to travel as well."""

    def __init__(
        self, settings: Settings, seed: int, rank: int = 0, world: int = 1, device: str = "cpu"
    ) -> None:
        torch.manual_seed(seed)
        self._settings, self._rank, self._world = settings, rank, world
        self._device = device
        # Made on the host: its first weights are then the same on every device.
        self.model = _Model(settings).to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.position = 0

    def step(self) -> float:
        """Train on the next batch; returns the loss."""
        settings = self._settings
        data = torch.Generator().manual_seed(self.position * self._world + self._rank)
        # Each row counts up from a random number: something that can be learned.
        first = torch.randint(settings.vocabulary, (settings.batch, 1), generator=data)
        batch = (first + torch.arange(settings.tokens + 1)) % settings.vocabulary
        batch = batch.to(self._device)
        scores = self.model(batch[:, :-1])
        loss = nn.functional.cross_entropy(scores.flatten(0, 1), batch[:, 1:].flatten())
        self.optimizer.zero_grad()
        torch.autograd.backward(loss)
        self.optimizer.step()
        self.position += 1
        return loss.item()


def leaves(state: object, path: str = "") -> Iterator[tuple[str, object]]:
    """The leaves of a state with their paths."""
    if isinstance(state, dict):
        for key, value in state.items():
            yield from leaves(value, f"{path}/{key}")
    elif isinstance(state, list | tuple):
        for index, value in enumerate(state):
            yield from leaves(value, f"{path}/{index}")
    else:
        yield path, state


def fingerprint(state: object) -> str:
    """A digest of every path, dtype, shape and bit of a state."""
    hasher = xxhash.xxh3_128()
    for path, leaf in leaves(state):
        if isinstance(leaf, torch.Tensor):
            hasher.update(f"{path} {leaf.dtype} {tuple(leaf.shape)} ".encode())
            flat: Any = leaf.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
            hasher.update(flat)
        else:
            hasher.update(f"{path} {leaf!r} ".encode())
    return hasher.hexdigest()
