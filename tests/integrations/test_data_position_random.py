"""A loop of one's own with dropout and torchdata's loader continues with the losses of a run that
was never interrupted."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import torchrelay as tr
from tests.support.ranks import RankPool
from torchrelay.integrations.random_state import RandomState, set_at_first_forward

torchdata = pytest.importorskip("torchdata.stateful_dataloader", reason="torchdata is not there")

from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler  # noqa: E402

from torchrelay.integrations.data_position import DataPosition  # noqa: E402

EPOCHS, BATCHES = 3, 4


class Noisy(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """Samples to which noise is added when they are read."""

    def __init__(self, noise: float) -> None:
        self.noise = noise
        self.points = torch.arange(4.0 * 2 * BATCHES).reshape(-1, 4)

    def __len__(self) -> int:
        return len(self.points)

    def __getitem__(self, index: int) -> torch.Tensor:
        points = self.points[index]
        return points + self.noise * torch.rand(4) if self.noise else points


class Job:
    """A model, a loader, and a loop over its epochs that can begin anywhere."""

    def __init__(
        self,
        *,
        shuffle: bool = True,
        workers: int = 0,
        generator: bool = False,
        persistent: bool = False,
        noise: float = 0.0,
        random_first: bool = False,
    ) -> None:
        torch.manual_seed(5)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        data = Noisy(noise)
        self.sampler = StatefulDistributedSampler(data, 1, 0, shuffle=shuffle, seed=3)
        self.loader = torchdata.StatefulDataLoader(
            data,
            batch_size=2,
            sampler=self.sampler,
            num_workers=workers,
            persistent_workers=persistent,
            generator=torch.Generator().manual_seed(9) if generator else None,
        )
        self.position = DataPosition(self.loader)
        self.step = 0
        parts: dict[str, Any] = {"data": self.position, "random": RandomState()}
        order = sorted(parts, reverse=random_first)
        self.state = {name: parts[name] for name in order} | {
            "model": self.model,
            "optimizer": self.optimizer,
        }

    def train(self, save: Callable[[int, bool], None] | None = None) -> list[float]:
        """The losses up to the end. `save` is called after each step, and after each epoch."""
        losses: list[float] = []
        first = self.step // BATCHES if self.step else 0
        for epoch in range(first, EPOCHS):
            self.sampler.set_epoch(epoch)
            for points in self.loader:
                loss = self.model(points).square().mean()
                loss.backward()
                self.optimizer.step()
                self.optimizer.zero_grad()
                self.step += 1
                losses.append(loss.item())
                if save is not None:
                    save(self.step, False)
            if save is not None:
                save(self.step, True)
        return losses


def check(folder: Path, saved: list[tuple[int, bool]], **options: Any) -> None:
    """A job that continues from each of these steps has the losses of the one that saved them."""
    with tr.Checkpointer(folder, no_dist=True) as steps:
        calm = Job(**options)

        def save(step: int, ended: bool) -> None:
            if (step, ended) in saved:
                steps.save(2 * step + ended, calm.state)

        whole = calm.train(save)
        assert len(whole) == EPOCHS * BATCHES
        for step, ended in saved:
            job = Job(**options)
            torch.rand(7)  # another process draws other numbers while it starts
            steps.load(job.state, step=2 * step + ended)
            # The last step of an epoch is saved before the loop over it has ended.
            job.step = step - (step % BATCHES == 0 and not ended)
            rest = job.train()
            assert rest == whole[step:], f"after step {step}, epoch ended: {ended}"


MIDDLE = [(1, False), (BATCHES + 2, False)]
BOUNDARY = [(BATCHES, True), (2 * BATCHES, True), (BATCHES, False)]


@pytest.mark.parametrize("generator", [False, True], ids=["default", "generator"])
@pytest.mark.parametrize("shuffle", [False, True], ids=["ordered", "shuffled"])
@pytest.mark.parametrize("noise", [0.0, 0.1], ids=["exact", "noisy"])
def test_in_this_process(tmp_path: Path, shuffle: bool, generator: bool, noise: float) -> None:
    options: dict[str, Any] = {"shuffle": shuffle, "generator": generator, "noise": noise}
    check(tmp_path, MIDDLE + BOUNDARY, random_first=generator, **options)


def test_with_workers(tmp_path: Path) -> None:
    check(tmp_path, [(BATCHES + 2, False), (BATCHES, True)], workers=2, generator=True)


@pytest.mark.slow
@pytest.mark.parametrize("persistent", [False, True], ids=["ending", "persistent"])
@pytest.mark.parametrize("generator", [False, True], ids=["default", "generator"])
@pytest.mark.parametrize("shuffle", [False, True], ids=["ordered", "shuffled"])
def test_with_workers_of_every_kind(
    tmp_path: Path, shuffle: bool, generator: bool, persistent: bool
) -> None:
    options = {"shuffle": shuffle, "generator": generator, "persistent": persistent}
    check(tmp_path, MIDDLE + BOUNDARY, workers=2, **options)


@pytest.mark.slow
def test_noise_of_workers_continues_at_the_end_of_an_epoch(tmp_path: Path) -> None:
    """In the middle it does not: workers begin with the seeds of their epoch."""
    check(tmp_path, BOUNDARY[:2], workers=2, generator=True, noise=0.1)


def test_a_step_that_is_saved_before_the_loop_goes_on(tmp_path: Path) -> None:
    """A job is stopped again right after it was resumed, twice."""
    with tr.Checkpointer(tmp_path, no_dist=True) as steps:
        calm = Job()

        def save(step: int, ended: bool) -> None:
            if (step, ended) == (BATCHES + 1, False):
                steps.save(99, calm.state)

        whole = calm.train(save)
        for number in (100, 101):
            job = Job()
            steps.load(job.state, step=number - 1)
            steps.save(number, job.state)
        job = Job()
        steps.load(job.state, step=101)
        job.step = BATCHES + 1
        assert job.train() == whole[BATCHES + 1 :]


def test_another_number_of_ranks_draws_nothing_either(tmp_path: Path) -> None:
    with tr.Checkpointer(tmp_path, no_dist=True) as steps:
        before = Job()
        before.sampler.set_epoch(0)
        next(iter(before.loader))
        steps.save(1, before.state)
        expected = torch.rand(3)
        after = Job()
        sampler = StatefulDistributedSampler(before.loader.dataset, 2, 0, seed=3)
        loader = torchdata.StatefulDataLoader(before.loader.dataset, batch_size=2, sampler=sampler)
        steps.load(after.state | {"data": DataPosition(loader)})
        iter(loader)
        assert torch.equal(torch.rand(3), expected)
        iter(loader)  # of the next epoch
        assert torch.equal(torch.rand(1), _after_one_draw(steps))


def _after_one_draw(steps: tr.Checkpointer) -> torch.Tensor:
    RandomState().load_state_dict(steps.load(key="random").state)
    torch.rand(3)
    torch.empty((), dtype=torch.int64).random_()
    return torch.rand(1)


def test_a_step_of_before_has_no_generator() -> None:
    job = Job(generator=True)
    next(iter(job.loader))
    state = job.position.state_dict()
    del state["generator"], state["begun"]
    other = Job(generator=True)
    own = other.loader.generator.get_state()
    other.position.load_state_dict(state)
    assert torch.equal(next(iter(other.loader)), list(job.loader)[1])
    assert torch.equal(other.loader.generator.get_state(), own)


def test_random_numbers_are_set_by_the_model_that_comes_first() -> None:
    models: list[nn.Module] = [nn.Linear(2, 2), nn.Linear(2, 2)]
    random = RandomState().state_dict()
    expected = torch.rand(3)
    set_at_first_forward(random, models)
    models[0].eval()
    models[0](torch.ones(2))
    torch.rand(5)
    models[1](torch.ones(2))
    assert torch.equal(torch.rand(3), expected)
    models[0].train()
    models[0](torch.ones(2))
    assert not torch.equal(torch.rand(3), expected), "only once"


def test_losses_depend_on_what_is_tested() -> None:
    """A test of equal losses shows nothing where no other losses could come."""
    both = itertools.product([False, True], [0.0, 0.1])
    runs = [Job(shuffle=shuffle, noise=noise).train() for shuffle, noise in both]
    assert len({tuple(run) for run in runs}) == len(runs)


def sharded(rank: int, group: Any, folder: str) -> None:
    """The guide's job: FSDP2, dropout, a loader whose samples each rank shuffles alike."""
    mesh = init_device_mesh("cpu", (2,))
    data = Noisy(0.1)

    def made() -> tuple[dict[str, Any], Any]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))
        fully_shard(model, mesh=mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        sampler = StatefulDistributedSampler(data, 2, rank, seed=3)
        loader = torchdata.StatefulDataLoader(data, batch_size=1, sampler=sampler)
        parts = {"model": model, "optimizer": optimizer, "random": RandomState()}
        return {**parts, "data": DataPosition(loader), "step": 0}, loader

    def train(state: dict[str, Any], loader: Any, steps: tr.Checkpointer | None) -> list[float]:
        losses = []
        for epoch in range(state["step"] // BATCHES, 2):
            loader.sampler.set_epoch(epoch)
            for points in loader:
                loss = state["model"](points).square().mean()
                loss.backward()
                state["optimizer"].step()
                state["optimizer"].zero_grad()
                state["step"] += 1
                losses.append(loss.item())
                if steps is not None and state["step"] == BATCHES + 1:
                    steps.save(state["step"], state)
            if steps is not None and epoch == 0:
                steps.save(state["step"], state)
        return losses

    with tr.Checkpointer(folder, group=group, timeout=60) as steps:
        state, loader = made()
        torch.manual_seed(rank)  # each rank has its own dropout
        whole = train(state, loader, steps)
        for saved in (BATCHES, BATCHES + 1):
            state, loader = made()
            torch.manual_seed(77)
            state = steps.load(state, step=saved).state
            assert train(state, loader, None) == whole[saved:], f"rank {rank}, after step {saved}"


@pytest.mark.timeout(320)
def test_sharded_on_two_ranks(pool2: RankPool, tmp_path: Path) -> None:
    pool2.run(sharded, str(tmp_path), timeout=300)
