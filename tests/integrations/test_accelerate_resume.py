"""A loop with Accelerate resumes with the losses of a run that was never interrupted, whatever its
options and wherever it was saved."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from torchrelay.errors import UsageError

accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
pytest.importorskip("torchdata", reason="torchdata is not installed")

from accelerate.utils import DistributedType  # noqa: E402

from torchrelay.integrations.accelerate import use_torchrelay  # noqa: E402

EPOCHS, BATCHES = 3, 10


class Case(NamedTuple):
    shuffle: bool = True
    validate: bool = True
    accumulate: int = 3
    dropout: float = 0.3
    workers: int = 0


class Job:
    """A loop that counts its micro-batches, and is saved after some of them."""

    def __init__(self, folder: Path, case: Case) -> None:
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
        accelerate.state.GradientState._reset_state()
        config = accelerate.DataLoaderConfiguration(
            use_stateful_dataloader=True, use_seedable_sampler=True
        )
        self.accelerator = accelerate.Accelerator(
            cpu=True, dataloader_config=config, gradient_accumulation_steps=case.accumulate
        )
        self.case, self.done = case, 0
        torch.manual_seed(1)
        model: Any = nn.Sequential(nn.Linear(4, 8), nn.Dropout(case.dropout), nn.Linear(8, 1))
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
        schedule: Any = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS * BATCHES)
        points = torch.arange(8.0 * BATCHES).reshape(-1, 4)
        torch.seed()  # a process that sets no seed draws another for its samplers
        loaders = [
            torch.utils.data.DataLoader(
                points, batch_size=2, shuffle=shuffle, num_workers=case.workers
            )
            for shuffle in (case.shuffle, False)
        ]
        prepared = self.accelerator.prepare(model, optimizer, schedule, *loaders)
        self.model, self.optimizer, self.schedule, self.loader, self.checked = prepared
        self.accelerator.register_for_checkpointing(self)
        self.relay = use_torchrelay(self.accelerator, folder, timeout=60)

    def state_dict(self) -> dict[str, int]:
        return {"done": self.done}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.done = state["done"]

    def train(self, save: Callable[[int], None] | None = None) -> list[float]:
        losses = []
        while self.done < EPOCHS * BATCHES:
            self.model.train()
            for points in self.loader:
                with self.accelerator.accumulate(self.model):
                    loss = self.model(points).square().mean()
                    self.accelerator.backward(loss)
                    self.optimizer.step()
                    self.schedule.step()
                    self.optimizer.zero_grad()
                losses.append(loss.item())
                self.done += 1
                if save is not None and (self.done % BATCHES or not self.case.validate):
                    save(self.done)
            if self.case.validate:
                self.model.eval()
                for points in self.checked:
                    self.model(points)
                if save is not None:
                    save(self.done)
        return losses


def check(folder: Path, case: Case, saved: list[int]) -> None:
    torch.manual_seed(0)
    calm = Job(folder, case)

    def save(done: int) -> None:
        if done in saved:
            calm.accelerator.save_state(f"step_{done}")

    whole = calm.train(save)
    calm.relay.checkpointer.close()
    assert len(whole) == EPOCHS * BATCHES
    for done in saved:
        job = Job(folder, case)
        torch.rand(done)  # another process draws other numbers while it starts
        assert job.accelerator.load_state(f"step_{done}") == done
        rest = job.train()
        job.relay.checkpointer.close()
        assert rest == whole[done:], f"saved after {done}"


# Within and between updates, and at the ends of epochs.
SAVED = [4, 6, 10, 20, 25]


@pytest.mark.parametrize(
    "case",
    [Case(), Case(accumulate=1, dropout=0.0, validate=False), Case(workers=2)],
    ids=["plain", "bare", "workers"],
)
def test_a_run_continues_exactly(tmp_path: Path, case: Case) -> None:
    check(tmp_path, case, SAVED[::2] if case.workers else SAVED)


@pytest.mark.parametrize("before", [False, True])
def test_the_first_epoch_has_the_order_of_its_seed(tmp_path: Path, before: bool) -> None:
    """Accelerate asks a new loader for its state, which starts workers that read with another
    sampler."""
    config = accelerate.DataLoaderConfiguration(
        use_stateful_dataloader=True, use_seedable_sampler=True
    )
    accelerator = accelerate.Accelerator(cpu=True, dataloader_config=config)
    points = torch.arange(40.0).reshape(-1, 2)
    plain = torch.utils.data.DataLoader(points, batch_size=2, shuffle=True, num_workers=2)
    loader = None if before else accelerator.prepare(plain)
    relay = use_torchrelay(accelerator, tmp_path, timeout=60)
    loader = accelerator.prepare(plain) if before else loader
    read = [points for batch in loader for points in batch[:, 0].tolist()]
    order = torch.Generator().manual_seed(loader.get_sampler().initial_seed)
    assert read == points[torch.randperm(20, generator=order), 0].tolist()
    relay.checkpointer.close()


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("workers", [0, 2])
def test_every_combination(tmp_path: Path, workers: int) -> None:
    both = [False, True]
    every = [Case(*one, workers) for one in itertools.product(both, both, [1, 2, 3], [0.0, 0.3])]
    chosen = random.Random(5).sample(every, 8 if workers else len(every))
    for number, case in enumerate(chosen):
        print(case)
        check(tmp_path / str(number), case, SAVED)


def test_a_load_in_the_middle_forgets_gradients(tmp_path: Path) -> None:
    """They were accumulated after the step that is loaded."""
    case = Case()
    job = Job(tmp_path, case)

    def save(done: int) -> None:
        if done in (3, 4):
            job.accelerator.save_state(f"step_{done}")
        elif done == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        job.train(save)
    job.relay.checkpointer.wait(60)
    job.accelerator.load_state("step_4")
    assert not job.accelerator.sync_gradients
    assert all(weight.grad is not None for weight in job.model.parameters())
    job.accelerator.load_state("step_3")
    assert job.accelerator.sync_gradients
    assert all(weight.grad is None for weight in job.model.parameters())
    job.relay.checkpointer.close()


def test_sharded_gradients_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No FSDP starts on a CPU: the accelerator says that it is one."""
    job = Job(tmp_path, Case())
    job.accelerator.sync_gradients = False
    with monkeypatch.context() as sharded:
        kind = property(lambda _: DistributedType.FSDP)
        sharded.setattr(type(job.accelerator), "distributed_type", kind)
        with pytest.raises(UsageError, match="sync_gradients"):
            job.accelerator.save_state("step_1")
    job.accelerator.save_state("step_1")
    job.relay.checkpointer.close()


def test_gradients_of_other_ranks_are_warned_of(tmp_path: Path) -> None:
    job = Job(tmp_path, Case())
    job.accelerator.sync_gradients = False
    job.model(torch.ones(2, 4)).sum().backward()
    state = job.relay._state()["counters"].state_dict()
    with pytest.warns(RuntimeWarning, match="by 2 ranks, and is loaded by 1"):
        job.relay._state()["counters"].load_state_dict({**state, "ranks": 2})
    job.relay.checkpointer.close()
