"""`Encoding`: how published weights are kept and sent. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torchrelay.errors import UsageError

if TYPE_CHECKING:
    import torch

HISTORY = 4
MAX_HISTORY = 1000


@dataclass(frozen=True)
class Encoding:
    """How `serve` keeps and sends the steps that are published.

    - `dtype`: floating tensors are published in this dtype, with the bits of `tensor.to(dtype)`.
      All else is published as it is.
    - `history`: for how many steps the server remembers which elements changed, once a subscriber
      reads over a network. One that has such a step receives changed elements alone; any other
      receives everything. Each step takes a bit of host memory for each element. 0 turns it off.
    """

    dtype: torch.dtype | None = None
    history: int = HISTORY

    def __post_init__(self) -> None:
        if self.dtype is not None and not getattr(self.dtype, "is_floating_point", False):
            raise UsageError(f"dtype is a floating dtype of torch, not {self.dtype!r}")
        count = self.history
        if isinstance(count, bool) or not isinstance(count, int) or not 0 <= count <= MAX_HISTORY:
            raise UsageError(f"history is a number of steps from 0 to {MAX_HISTORY}, not {count!r}")
