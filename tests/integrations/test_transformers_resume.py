"""Hugging Face's `Trainer` resumes with the losses of a run that was never interrupted, whatever
its options and wherever it was killed."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.support.framework_jobs import Losses, losses_of

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from tests.integrations import trainer_job as job  # noqa: E402
from torchrelay.integrations.transformers import RelayCallback  # noqa: E402


class Killed(Exception):
    pass


class Case(NamedTuple):
    accumulate: int = 2
    workers: int = 0
    validate: bool = True
    shuffle: bool = True
    dropout: float = 0.1


class Dies(transformers.TrainerCallback):  # type: ignore[misc, name-defined]
    """Ends the run after a step, once the steps before it are saved."""

    def __init__(self, step: int | None, relay: RelayCallback) -> None:
        self.step, self.relay = step, relay

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.step:
            self.relay.checkpointer.wait(60)
            raise Killed


def train(folder: Path, name: str, case: Case, die_at: int | None = None) -> None:
    folder.mkdir(exist_ok=True)
    options: dict[str, Any] = {
        "gradient_accumulation_steps": case.accumulate,
        "dataloader_num_workers": case.workers,
    }
    if not case.validate:
        options |= {"eval_strategy": "no", "eval_steps": None}
    if not case.shuffle:
        options["train_sampling_strategy"] = "sequential"
    relay = RelayCallback(folder / "steps", every=1, keep=2, timeout=60)
    model = job.model()
    for module in model.modules():
        if hasattr(module, "p") and "Dropout" in type(module).__name__:
            module.p = case.dropout
    trainer = transformers.Trainer(
        model=model,
        args=job.settings(folder, **options),
        train_dataset=job.Texts(20),
        eval_dataset=job.Texts(4),
        callbacks=[relay, job.Watched(Losses(folder, name), None, relay), Dies(die_at, relay)],
    )
    if die_at is None:
        trainer.train(resume_from_checkpoint=relay.checkpoint)
    else:
        with pytest.raises(Killed):
            trainer.train(resume_from_checkpoint=relay.checkpoint)
        relay.checkpointer.close()


def check(folder: Path, case: Case, dies: list[int]) -> None:
    train(folder / "whole", "whole", case)
    whole = losses_of(folder / "whole", "whole")
    for die_at in dies:
        place = folder / str(die_at)
        train(place, "first", case, die_at)
        train(place, "second", case)
        second = losses_of(place, "second")
        assert second == whole[die_at - 1 :], f"{case}, killed after step {die_at}"


# An epoch has five batches: three updates of two batches, or five of one. The step before is saved.
@pytest.mark.parametrize(
    ("case", "dies"),
    [
        pytest.param(Case(), [4], id="plain"),
        pytest.param(Case(1, workers=2, validate=False), [6], id="workers", marks=pytest.mark.slow),
    ],
)
def test_a_run_continues_exactly(tmp_path: Path, case: Case, dies: list[int]) -> None:
    check(tmp_path, case, dies)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("workers", [0, 2])
def test_every_combination(tmp_path: Path, workers: int) -> None:
    both = [False, True]
    every = itertools.product([1, 2, 3], [workers], both, both, [0.0, 0.1])
    for number, case in enumerate([Case(*one) for one in every][:: 3 if workers else 1]):
        print(case)
        (tmp_path / str(number)).mkdir()
        check(tmp_path / str(number), case, [(4, 6)[number % 2]])
