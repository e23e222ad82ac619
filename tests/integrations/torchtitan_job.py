"""The loop of torchtitan's trainer, whose parts are real but for the trainer: it needs triton.

Two model parts with FSDP2, as a pipeline's rank has them, torchtitan's optimizers, schedulers and
data loader, and a checkpoint manager that is built from its config.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torchtitan.components.dataloader import ParallelAwareDataloader
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw

from tests.support.framework_jobs import Losses, die, run_phases, save_weights
from torchrelay.integrations.torchtitan import RelayCheckpointManager

STEPS, EVERY = 15, 2


class Points(torch.utils.data.IterableDataset):  # type: ignore[type-arg]
    """Each rank's share of an endless series; it knows where it is, as torchtitan's datasets do."""

    def __init__(self, rank: int, ranks: int) -> None:
        self._rank, self._ranks, self.taken = rank, ranks, 0

    def __iter__(self) -> Iterator[tuple[torch.Tensor, int]]:
        while True:
            number = self.taken * self._ranks + self._rank
            self.taken += 1
            point = torch.randn(16, generator=torch.Generator().manual_seed(number))
            yield point, int(point[:4].argmax())

    def state_dict(self) -> dict[str, int]:
        return {"taken": self.taken}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.taken = state["taken"]


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.clone()


class Run:
    """The attributes of the trainer, and its loop."""

    def __init__(
        self,
        folder: Path,
        seed: int = 1,
        adapter: Any = None,
        stages: bool = False,
        **options: Any,
    ) -> None:
        if not dist.is_initialized():
            alone = "RANK" not in os.environ
            where = {"store": dist.HashStore(), "rank": 0, "world_size": 1} if alone else {}
            dist.init_process_group("gloo", **where)  # type: ignore[arg-type]
        rank, ranks = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(seed)
        first = OrderedDict(first=nn.Linear(16, 32), act=nn.ReLU(), drop=nn.Dropout(0.05))
        parts = [nn.Sequential(first), nn.Sequential(OrderedDict(last=nn.Linear(32, 4)))]
        if stages:  # of a pipeline, which all take the same data
            parts, rank, ranks = [parts[rank]], 0, 1
        else:
            mesh = dist.device_mesh.init_device_mesh("cpu", (ranks,))
            for part in parts:
                fully_shard(part, mesh=mesh)
        self.parts: list[nn.Module] = list(parts)
        adam = default_adamw(lr=1e-2)
        adam.implementation = "foreach"
        self.optimizers = adam.build(model_parts=parts)
        self.schedulers = LRSchedulersContainer.Config(warmup_steps=3).build(
            optimizers=self.optimizers, training_steps=2 * STEPS
        )
        self.data = Points(rank, ranks)
        self.loader = ParallelAwareDataloader(self.data, rank, ranks, batch_size=4 // ranks)
        self.step = 0
        self._folder, self._adapter = folder, adapter
        options = {"interval": EVERY, "last_save_model_only": False, **options}
        self.manager = self.managed(RelayCheckpointManager, timeout=60.0, **options)

    def managed(self, kind: Any, **options: Any) -> Any:
        return kind.Config(enable=True, folder="steps", **options).build(
            dataloader=self.loader,
            model_parts=self.parts,
            optimizers=self.optimizers,
            lr_schedulers=self.schedulers,
            states={"train_state": self},
            sd_adapter=self._adapter,
            base_folder=str(self._folder),
        )

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step = state["step"]

    def weights(self) -> dict[str, torch.Tensor]:
        states = [part.state_dict() for part in self.parts]
        return {key: whole(one) for state in states for key, one in state.items()}

    def steps(self, last: int) -> Iterator[float]:
        """Trains to `last`, and yields each step's loss before it is saved."""
        batches = iter(self.loader)
        while self.step < last:
            self.step += 1
            points, classes = next(batches)
            loss = nn.functional.cross_entropy(self.parts[1](self.parts[0](points)), classes)
            self.optimizers.zero_grad()
            loss.backward()
            self.manager.maybe_wait_for_staging()
            self.optimizers.step()
            self.schedulers.step()
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            yield mean.item() / dist.get_world_size()
            self.manager.save(self.step, last_step=self.step == last)


def train(folder: Path, name: str, die_at: int | None) -> None:
    # The loader refuses its state on another number of ranks.
    alone = "RANK" not in os.environ
    run = Run(folder, exclude_from_loading=["dataloader"] if alone else [])
    torch.manual_seed(dist.get_rank())  # each rank has its own dropout
    run.manager.load()
    if alone:
        run.data.taken = 4 * run.step
    losses = Losses(folder, name)
    for loss in run.steps(STEPS):
        losses.add(run.step, loss)
        if run.step == die_at:
            run.manager.maybe_wait_for_saving()
            dist.barrier()
            die()
    run.manager.close()
    save_weights(folder, name, run.weights())


if __name__ == "__main__":
    run_phases(train)
