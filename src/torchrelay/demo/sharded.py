"""The training job, sharded over ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from torchrelay.demo.job import DemoJob, Settings, fingerprint, leaves


class ShardedJob(DemoJob):
    """The same, by FSDP2 on all ranks: each has its own batches and its own random numbers."""

    def __init__(self, settings: Settings, rank: int, world: int) -> None:
        super().__init__(settings, seed=0)
        self._rank, self._world = rank, world
        fully_shard(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        torch.manual_seed(1 + rank)

    def _seed_of(self, position: int) -> int:
        return position * self._world + self._rank

    def live_state(self) -> dict[str, Any]:
        """The state as it is handed to torchrelay: the objects themselves."""
        return {
            "model": self.model,
            "optimizer": self.optimizer,
            "random": torch.get_rng_state(),
            "position": self.position,
        }

    def take(self, state: dict[str, Any]) -> None:
        """Apply the values that no object takes: random state and position."""
        torch.set_rng_state(state["random"])
        self.position = state["position"]

    def weights(self) -> str:
        """A digest of this rank's part of the weights and of the optimizer."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        found = leaves({"model": model, "optimizer": optimizer})
        return fingerprint(
            {path: x.to_local() if isinstance(x, DTensor) else x for path, x in found}
        )
