"""Positions in data on another number of ranks: every sample once."""

from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

import torchrelay as tr
from torchrelay.errors import MismatchError, UsageError

torchdata = pytest.importorskip("torchdata.stateful_dataloader", reason="torchdata is not there")

from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler  # noqa: E402

from torchrelay.integrations.data_position import DataPosition  # noqa: E402

SAMPLES = 240


class Ranks:
    """The loaders of all ranks of a job, in one process."""

    def __init__(self, count: int, batch: int, workers: int = 0, **options: Any) -> None:
        data = range(SAMPLES)
        self.loaders, self.positions = [], []
        for rank in range(count):
            sampler = StatefulDistributedSampler(data, count, rank, **{"seed": 7, **options})  # type: ignore[arg-type]
            loader = torchdata.StatefulDataLoader(
                data, batch_size=batch, sampler=sampler, num_workers=workers
            )
            self.loaders.append(loader)
            self.positions.append(DataPosition(loader))
        self.iterators: list[Any] = []

    def take(self, batches: int | None = None) -> Counter[int]:
        """The samples of so many batches of each rank, or of all that are left."""
        if not self.iterators:
            self.iterators = [iter(loader) for loader in self.loaders]
        return Counter(
            int(sample)
            for iterator in self.iterators
            for got in itertools.islice(iterator, batches)
            for sample in got
        )

    def epoch(self, number: int) -> None:
        self.iterators = []
        for loader in self.loaders:
            loader.sampler.set_epoch(number)

    def save(self, folder: Path) -> None:
        """All ranks have one position, but for what is each loader's own."""
        with tr.Checkpointer(folder, no_dist=True) as steps:
            steps.save(1, {"data": self.positions[0]}, overwrite=True)

    def load(self, folder: Path) -> None:
        with tr.Checkpointer(folder, no_dist=True) as steps:
            for position in self.positions:
                steps.load({"data": position})


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_every_sample_comes_once_on_another_number_of_ranks(
    tmp_path: Path, ranks: int, workers: int
) -> None:
    before, after = Ranks(2, 6, workers), Ranks(ranks, 6, workers)
    before.epoch(3)
    taken = before.take(5)
    assert len(taken) == 60
    before.save(tmp_path)
    after.load(tmp_path)
    assert all(position.epoch == 3 for position in after.positions)
    rest = after.take()
    assert set((taken + rest).values()) == {1} and len(taken + rest) == SAMPLES
    after.epoch(4)
    assert len(after.take()) == SAMPLES, "the next epoch is whole"


def test_twice_within_an_epoch(tmp_path: Path) -> None:
    first, second, third = Ranks(2, 6), Ranks(3, 4), Ranks(1, 12)
    taken = first.take(3)
    first.save(tmp_path)
    second.load(tmp_path)
    taken += second.take(2)
    second.save(tmp_path)
    third.load(tmp_path)
    taken += third.take()
    assert set(taken.values()) == {1} and len(taken) == SAMPLES


def test_after_a_whole_epoch(tmp_path: Path) -> None:
    before, after = Ranks(2, 6), Ranks(3, 6)
    assert len(before.take()) == SAMPLES
    before.save(tmp_path)
    after.load(tmp_path)
    after.epoch(1)
    assert len(after.take()) == SAMPLES


def test_what_cannot_be_divided_is_refused(tmp_path: Path) -> None:
    before = Ranks(2, 5)
    before.take(1)
    before.save(tmp_path)
    with pytest.raises(MismatchError, match="3 ranks cannot skip alike"):
        Ranks(3, 5).load(tmp_path)


@pytest.mark.parametrize("other", [{"seed": 8}, {"shuffle": False}])
def test_other_data_are_refused(tmp_path: Path, other: dict[str, Any]) -> None:
    before = Ranks(2, 6)
    before.take(1)
    before.save(tmp_path)
    with pytest.raises(MismatchError):
        Ranks(3, 6, **other).load(tmp_path)


def test_a_loader_that_cannot_begin_anywhere_is_refused() -> None:
    class Stream(torch.utils.data.IterableDataset):  # type: ignore[type-arg]
        def __iter__(self) -> Any:
            return iter(range(4))

    with pytest.raises(UsageError, match="StatefulDistributedSampler"):
        DataPosition(torchdata.StatefulDataLoader(Stream(), batch_size=2))
    with pytest.raises(UsageError, match="StatefulDistributedSampler"):
        DataPosition(torchdata.StatefulDataLoader(range(4), batch_size=2, shuffle=True))
