"""`Encoding`: how published weights are kept and sent. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from torchrelay.errors import UsageError

HISTORY = 4
MAX_HISTORY = 1000


@dataclass(frozen=True)
class Encoding:
    """How `serve` keeps and sends the steps that are published.

    - `history`: for how many steps the server remembers which elements changed. A subscriber that
      has one of them receives changed elements alone; any other receives everything. Each step
      takes a bit of host memory for each element. 0 turns it off.
    """

    history: int = HISTORY

    def __post_init__(self) -> None:
        count = self.history
        if isinstance(count, bool) or not isinstance(count, int) or not 0 <= count <= MAX_HISTORY:
            raise UsageError(f"history is a number of steps from 0 to {MAX_HISTORY}, not {count!r}")
