"""A small GPT, and the text that it learns, read by all ranks together."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

TEXT = Path(__file__).parent / "sonnets.txt"  # by William Shakespeare, 1609
CHARACTERS, CONTEXT, BATCH = 128, 32, 8


class Block(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.attend = nn.Linear(width, 3 * width)
        self.join = nn.Linear(width, width)
        self.widen = nn.Linear(width, 4 * width)
        self.narrow = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        some, length, width = x.shape
        q, k, v = (
            part.view(some, length, self.heads, width // self.heads).transpose(1, 2)
            for part in self.attend(self.norms[0](x)).split(width, dim=2)
        )
        seen = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.join(seen.transpose(1, 2).reshape(some, length, width))
        wide = functional.gelu(self.widen(self.norms[1](x)))
        return x + functional.dropout(self.narrow(wide), self.dropout, self.training)


class GPT(nn.Module):
    """Gives the loss of guessing each next character."""

    def __init__(self, width: int = 32, layers: int = 2, dropout: float = 0.1) -> None:
        super().__init__()
        self.characters = nn.Embedding(CHARACTERS, width)
        self.places = nn.Embedding(CONTEXT, width)
        self.blocks = nn.ModuleList([Block(width, 4, dropout) for _ in range(layers)])
        self.head = nn.Linear(width, CHARACTERS)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        given, wanted = text[:, :-1], text[:, 1:]
        x = self.characters(given) + self.places(torch.arange(given.shape[1]))
        for block in self.blocks:
            x = block(x)
        return functional.cross_entropy(self.head(x).flatten(0, 1), wanted.flatten())


class Text:
    """Batches of the text. Its state is the number of bytes that all ranks together have
    read, so a job with any number of ranks can continue from there."""

    def __init__(self, rank: int, world: int) -> None:
        self._text = torch.tensor(list(TEXT.read_bytes()))
        self._rank, self._world = rank, world
        self.position = 0

    def batch(self) -> torch.Tensor:
        room = len(self._text) - CONTEXT - 1
        starts = [(self.position + CONTEXT * place) % room for place in range(BATCH)]
        self.position += CONTEXT * BATCH
        mine = starts[self._rank :: self._world]
        return torch.stack([self._text[start : start + CONTEXT + 1] for start in mine])

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


class RandomNumbers:
    """The state of torch's random numbers, which dropout takes from."""

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"cpu": torch.get_rng_state()}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        torch.set_rng_state(state["cpu"])
