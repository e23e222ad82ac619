"""Lightning resumes with the losses of a run that was never interrupted, whatever its options."""

from __future__ import annotations

import itertools
import random
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

pytest.importorskip("lightning", reason="lightning is not installed")
pytest.importorskip("torchdata", reason="torchdata is not installed")

import lightning as L
from lightning.pytorch.callbacks import ModelCheckpoint
from torchdata.stateful_dataloader import StatefulDataLoader

from torchrelay.integrations.lightning import RandomNumbers, RelayCheckpointIO

EPOCHS, BATCHES = 4, 5


class Killed(Exception):
    pass


class Case(NamedTuple):
    """The options of a job; as they are here, each of them alone makes a difference."""

    shuffle: bool = True
    validate: str = "shuffled"  # or "ordered", or "none"
    accumulate: int = 2
    dropout: float = 0.3
    workers: int = 0
    noise: float = 0.0  # that the dataset adds when it is read
    persistent: bool = False
    stateful: bool = False  # torchdata's loader
    at_validation: bool = False  # checkpoints are made at the end of the validation
    generator: bool = False  # the loader has one of its own


class Data(torch.utils.data.Dataset):  # type: ignore[type-arg]
    def __init__(self, noise: float) -> None:
        draw = torch.Generator().manual_seed(3)
        self.points, self.noise = torch.randn(4 * BATCHES, 16, generator=draw), noise

    def __len__(self) -> int:
        return len(self.points)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        points = self.points[index]
        target = points[:4].argmax()
        return (points + self.noise * torch.rand(16) if self.noise else points), target


class Model(L.LightningModule):
    def __init__(self, dropout: float, die_at: tuple[int, int] | None) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net = nn.Sequential(nn.Linear(16, 32), nn.Dropout(dropout), nn.Linear(32, 4))
        self.losses: list[tuple[int, int, float]] = []
        self.die_at = die_at

    def on_train_batch_start(self, batch: Any, index: int) -> None:
        if (self.current_epoch, index) == self.die_at:
            raise Killed

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        points, target = batch
        loss = nn.functional.cross_entropy(self.net(points), target)
        self.losses.append((self.current_epoch, index, loss.item()))
        return loss

    def validation_step(self, batch: Any, index: int) -> None:
        points, target = batch
        self.log("loss", nn.functional.cross_entropy(self.net(points), target))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS * BATCHES)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def losses(
    folder: Path, case: Case, die_at: tuple[int, int] | None = None, **options: Any
) -> list[tuple[int, int, float]]:
    """A run continues from `last.ckpt`, if there is one."""
    validates = case.validate != "none"
    kept = ModelCheckpoint(
        folder / "steps",
        save_last=True,
        save_on_train_epoch_end=False if case.at_validation else None,
        **({"monitor": "loss", "save_top_k": 2} if validates else {}),
    )
    model = Model(case.dropout, die_at)
    kind = StatefulDataLoader if case.stateful else torch.utils.data.DataLoader
    loader: Any = kind(
        Data(case.noise),
        batch_size=4,
        shuffle=case.shuffle,
        num_workers=case.workers,
        persistent_workers=case.persistent,
        generator=torch.Generator().manual_seed(8) if case.generator else None,
    )
    checked = torch.utils.data.DataLoader(
        Data(case.noise), batch_size=10, shuffle=case.validate == "shuffled"
    )
    runs = L.Trainer(
        accelerator="cpu",
        max_epochs=EPOCHS,
        accumulate_grad_batches=case.accumulate,
        callbacks=[RandomNumbers(), kept],
        plugins=[RelayCheckpointIO(timeout=60)],
        default_root_dir=folder,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    last = folder / "steps" / "last.ckpt"
    torch.rand(11 if last.exists() else 3)  # processes draw other numbers while they start
    with pytest.raises(Killed) if die_at else warnings.catch_warnings():
        runs.fit(
            model,
            loader,
            checked if validates else None,
            ckpt_path=str(last) if last.exists() else None,
        )
    return model.losses


def check(folder: Path, case: Case, die_at: tuple[int, int]) -> None:
    torch.manual_seed(0)
    whole = losses(folder / "whole", case)
    torch.manual_seed(0)
    first = losses(folder / "killed", case, die_at)
    assert first == whole[: len(first)] and len(first) == BATCHES * die_at[0] + die_at[1]
    second = losses(folder / "killed", case)
    assert len(second) == BATCHES * (EPOCHS - die_at[0])
    assert second == whole[-len(second) :]


@pytest.mark.parametrize(
    "case",
    [
        Case(),
        Case(workers=2, validate="none", accumulate=1, noise=0.1),
        Case(at_validation=True, generator=True, accumulate=3),
        Case(stateful=True, generator=True, noise=0.1),
    ],
    ids=["plain", "workers", "at-validation", "stateful"],
)
def test_a_run_continues_exactly(tmp_path: Path, case: Case) -> None:
    check(tmp_path, case, (2, 1))


def possible(case: Case) -> bool:
    if case.persistent and (not case.workers or case.noise):
        return False  # persistent workers continue their own random numbers
    return not (case.at_validation and case.validate == "none")


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("stateful", [False, True], ids=["plain", "stateful"])
@pytest.mark.parametrize("at_validation", [False, True], ids=["epoch", "validation"])
def test_combinations(tmp_path: Path, workers: int, stateful: bool, at_validation: bool) -> None:
    """A sample of all of them."""
    both = [False, True]
    checks = ["none", "ordered", "shuffled"]
    every = itertools.product(
        both, checks, [1, 2, 3], [0.0, 0.3], [workers], [0.0, 0.1], both, [stateful]
    )
    found = [Case(*one, at_validation, own) for one in every for own in both]
    chosen = random.Random(4).sample([case for case in found if possible(case)], 16)
    for number, case in enumerate(chosen):
        print(case)
        check(tmp_path / str(number), case, ((1, 0), (2, 1))[number % 2])


class Saves(L.Callback):
    """Saves after the batch with this number."""

    def __init__(self, path: Path, index: int) -> None:
        self.path, self.index = path, index

    def on_train_batch_end(
        self, trainer: Any, module: Any, outputs: Any, batch: Any, i: int
    ) -> None:
        if i == self.index:
            trainer.save_checkpoint(self.path)


@pytest.mark.parametrize("index", [0, 1], ids=["within", "between"])
def test_a_save_between_two_updates_is_warned_of(tmp_path: Path, index: int) -> None:
    runs = L.Trainer(
        accelerator="cpu",
        max_epochs=1,
        accumulate_grad_batches=2,
        callbacks=[RandomNumbers(), Saves(tmp_path / "one.ckpt", index)],
        plugins=[RelayCheckpointIO(timeout=60)],
        default_root_dir=tmp_path,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        runs.fit(Model(0.0, None), torch.utils.data.DataLoader(Data(0.0), batch_size=4))
    texts = [str(one.message) for one in seen if "between two updates" in str(one.message)]
    assert len(texts) == (index == 0)
