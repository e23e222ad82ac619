"""`Encoding`: how published weights are kept and sent. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torchrelay.errors import UsageError

if TYPE_CHECKING:
    import torch

HISTORY = 4
MAX_HISTORY = 1000
MAX_BLOCK = 1 << 20


@dataclass(frozen=True)
class Encoding:
    """How `serve` keeps and sends the steps that are published.

    - `dtype`: floating tensors are published in this dtype, with the bits of `tensor.to(dtype)`.
      All else is published as it is.
    - `history`: for how many steps the server remembers which elements changed, once a subscriber
      reads over a network. One that has such a step receives changed elements alone; any other
      receives everything. Each step takes a bit of host memory for each element. 0 turns it off.
    - `float8_block`: floating tensors of two or more dimensions are published as float8 (e4m3) with
      a scale for each block of this many elements (`torchrelay.endpoint.float8`). Not with
      `dtype`.
    """

    dtype: torch.dtype | None = None
    history: int = HISTORY
    float8_block: int | None = None

    def __post_init__(self) -> None:
        if self.dtype is not None and not getattr(self.dtype, "is_floating_point", False):
            raise UsageError(f"dtype is a floating dtype of torch, not {self.dtype!r}")
        count = self.history
        if isinstance(count, bool) or not isinstance(count, int) or not 0 <= count <= MAX_HISTORY:
            raise UsageError(f"history is a number of steps from 0 to {MAX_HISTORY}, not {count!r}")
        block = self.float8_block
        if block is None:
            return
        if isinstance(block, bool) or not isinstance(block, int) or not 1 <= block <= MAX_BLOCK:
            raise UsageError(f"float8_block is 1 to {MAX_BLOCK} elements, not {block!r}")
        if self.dtype is not None:
            raise UsageError("dtype and float8_block exclude each other: give one of them")
