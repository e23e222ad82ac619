"""A small GPT of characters, the text that it learns, and a digest of its weights."""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional

TEXT = Path(__file__).parents[1] / "elastic" / "sonnets.txt"  # by William Shakespeare, 1609
CHARACTERS, CONTEXT, BATCH = 128, 32, 16
WIDTH, HEADS = 64, 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)])
        self.query, self.key, self.value, self.join = (
            nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4)
        )
        self.widen = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.narrow = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = self.norms[0](x)
        # A rank of a tensor-parallel mesh has some of the heads.
        q, k, v = (
            part(normed).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)
            for part in (self.query, self.key, self.value)
        )
        seen = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.join(seen.transpose(1, 2).flatten(2))
        return x + self.narrow(functional.gelu(self.widen(self.norms[1](x))))


class GPT(nn.Module):
    """Gives the logarithms of the probabilities of each next character."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.characters = nn.Embedding(CHARACTERS, WIDTH)
        self.positions = nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(layers)])
        self.head = nn.Linear(WIDTH, CHARACTERS, bias=False)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        x = self.characters(text) + self.positions(torch.arange(text.shape[1]))
        for block in self.blocks:
            x = block(x)
        return functional.log_softmax(self.head(x), dim=-1)


def batch(step: int, rank: int, world: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A rank's share of the batch of a step: characters, and the ones that follow them."""
    text = torch.frombuffer(bytearray(TEXT.read_bytes()), dtype=torch.uint8).long()
    draw = torch.Generator().manual_seed(step)
    starts = torch.randint(len(text) - CONTEXT, (BATCH,), generator=draw)[rank::world]
    rows = torch.stack([text[start : start + CONTEXT + 1] for start in starts])
    return rows[:, :-1], rows[:, 1:]


def digest(model: nn.Module, dtype: torch.dtype) -> str:
    """The same for the same weights, however ranks have divided them. It gathers whole tensors:
    only a check needs that."""
    hasher = hashlib.blake2b(digest_size=8)
    for weight in model.parameters():
        whole = weight.full_tensor() if isinstance(weight, DTensor) else weight
        hasher.update(whole.detach().to(dtype).contiguous().view(torch.uint8).numpy())
    return hasher.hexdigest()
