"""torchtitan's checkpoint manager, on the real base class, with torchrelay."""

from __future__ import annotations

import dataclasses
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.framework_jobs import check_exact_resume, run_job
from tests.support.ranks import run_ranks
from torchrelay.errors import (
    CheckpointError,
    MismatchError,
    RelayError,
    StepNotFoundError,
    StepOrderError,
    UsageError,
)

pytest.importorskip(
    "torchtitan.components.checkpointer", reason="torchtitan is missing", exc_type=ImportError
)

import tyro
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torchtitan.components.checkpointer import BaseCheckpointManager, CheckpointManager

from tests.integrations import torchtitan_job as job
from tests.integrations.torchtitan_job import Run
from torchrelay.integrations.torchtitan import RelayCheckpointManager


@pytest.mark.timeout(420)
def test_a_killed_job_continues_exactly(tmp_path: Path) -> None:
    done = run_job(Path(job.__file__), tmp_path)
    assert done.code == 0, done.output
    check_exact_resume(tmp_path, last=job.STEPS, saved=8, near=0.25)


@pytest.fixture(autouse=True)
def _group() -> Iterator[None]:
    """`Run` makes a group of one rank, if it is made in this process."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def trained(folder: Path, steps: int, **options: Any) -> Run:
    run = Run(folder, **options)
    run.manager.load()
    for _loss in run.steps(steps):
        pass
    return run


def saved(run: Run) -> list[int]:
    run.manager.maybe_wait_for_saving()
    return run.manager.checkpointer.steps()


def same(these: dict[str, torch.Tensor], those: dict[str, torch.Tensor]) -> bool:
    return set(these) == set(those) and all(torch.equal(these[key], those[key]) for key in these)


def damage(step: Path) -> None:
    file = next(step.glob("model*.safetensors"))
    with file.open("r+b") as data:
        data.seek(-4, 2)
        last = data.read(4)
        data.seek(-4, 2)
        data.write(bytes(byte ^ 0xFF for byte in last))


# Saving.


@pytest.mark.parametrize("asynchronous", [True, False])
def test_interval_first_step_and_retention(tmp_path: Path, asynchronous: bool) -> None:
    options = {"asynchronous": asynchronous, "interval": 3, "keep_latest_k": 2}
    run = trained(tmp_path, 5, enable_first_step_checkpoint=True, **options)
    assert saved(run) == [3, 5]  # step 1 was there, too
    assert len(run.manager.stalls) == 3
    run.manager.close()
    assert (tmp_path / "steps" / "step-5" / "manifest.json").is_file()


def test_everything_stays_with_keep_0(tmp_path: Path) -> None:
    run = trained(tmp_path, 5, interval=1, keep_latest_k=0)
    assert saved(run) == [1, 2, 3, 4, 5]
    run.manager.close()


def test_a_manager_that_is_not_enabled_does_nothing(tmp_path: Path) -> None:
    manager = RelayCheckpointManager.Config(enable=False).build(
        dataloader=None,
        model_parts=[],
        optimizers=None,
        lr_schedulers=None,
        states={},
        sd_adapter=None,
        base_folder=str(tmp_path),
    )
    assert manager.load() is False and manager.save(1, last_step=True) is False
    manager.maybe_wait_for_saving()
    manager.maybe_wait_for_staging()
    manager.close()
    assert list(tmp_path.iterdir()) == []


def test_the_last_step_has_the_model_alone(tmp_path: Path) -> None:
    run = trained(tmp_path, 3, last_save_model_only=True, export_dtype="bfloat16")
    state = run.manager.checkpointer.load(step=3).state
    assert set(state) == {"model"}
    assert {value.dtype for value in state["model"].values()} == {torch.bfloat16}
    run.manager.close()
    other = Run(tmp_path)
    with pytest.raises(MismatchError):
        other.manager.load()
    assert other.manager.load(2) and other.step == 2
    other.manager.close()


# Loading.


def test_the_newest_step_that_verifies_is_loaded(tmp_path: Path) -> None:
    run = trained(tmp_path, 4)
    run.manager.close()
    damage(tmp_path / "steps" / "step-4")
    again = Run(tmp_path, seed=2)
    assert again.manager.load() and again.step == 2
    for _loss in again.steps(4):
        pass
    assert same(again.weights(), run.weights())
    assert saved(again) == [2, 4]
    again.manager.close()


def test_a_step_is_loaded_by_its_number(tmp_path: Path) -> None:
    trained(tmp_path, 4).manager.close()
    run = Run(tmp_path, seed=2)
    assert run.manager.load(2) and run.step == 2
    with pytest.raises(StepNotFoundError):
        run.manager.load(3)
    with pytest.raises(StepOrderError):
        run.manager.save(3, last_step=True)  # a restart would take step 4
    run.manager.close()


def test_load_only(tmp_path: Path) -> None:
    run = Run(tmp_path, load_only=True)
    assert run.manager.load() is False
    run.manager.close()
    first = trained(tmp_path, 2)
    first.manager.close()
    run = Run(tmp_path, seed=2, load_only=True)
    assert run.manager.load() and same(run.weights(), first.weights())
    assert list(run.steps(4)) and saved(run) == [2]
    run.manager.close()


def test_states_that_are_excluded_stay(tmp_path: Path) -> None:
    trained(tmp_path, 2).manager.close()
    run = Run(tmp_path, exclude_from_loading=["dataloader", "train_state"])
    assert run.manager.load() and run.step == 0
    assert run.schedulers.schedulers[0].last_epoch == 2
    run.manager.close()
    with pytest.raises(UsageError, match="lr_schedule;"):
        Run(tmp_path, exclude_from_loading=["lr_schedule"])


def test_a_loader_without_a_position_in_the_step_is_refused(tmp_path: Path) -> None:
    trained(tmp_path, 2).manager.close()
    run = Run(tmp_path, seed=2)
    before = run.weights()
    run.loader._rank_id = "dp_rank_1"
    with pytest.raises(RelayError, match="no dp_rank_1 of the data loader"):
        run.manager.load()
    assert run.step == 0 and same(run.weights(), before)
    run.manager.close()


def test_a_seed_has_the_model_alone(tmp_path: Path) -> None:
    seed = Run(tmp_path, seed=5, last_save_model_only=True)
    assert seed.manager.save(0, last_step=True)
    seed.manager.close()
    run = Run(tmp_path, seed=6)
    assert run.manager.load() and run.step == 0
    assert same(run.weights(), seed.weights())
    run.manager.close()


def moments(run: Run) -> dict[str, torch.Tensor]:
    """The tensors of the optimizers."""
    state = run.optimizers.state_dict()
    return {key: job.whole(one) for key, one in state.items() if key.startswith("state.")}


def train_a_stage(rank: int, _group: Any, folder: Path) -> Any:
    """Each stage trains alone; in a pipeline the gradient would come from the next one."""
    run = Run(folder, stages=True)
    for step in (1, 2):
        points = torch.ones(2, 16 if rank == 0 else 32)
        run.parts[0](points).square().sum().backward()
        run.optimizers.step()
        run.schedulers.step()
        run.step = step
        run.manager.save(step)
    run.manager.close()
    trained = run.weights(), moments(run)
    run = Run(folder, seed=2, stages=True)
    assert run.manager.load() and run.step == 2
    assert same(run.weights(), trained[0]) and same(moments(run), trained[1])
    run.manager.close()
    return trained


def test_stages_of_a_pipeline_are_loaded_on_one_rank(tmp_path: Path) -> None:
    stages = run_ranks(train_a_stage, 2, tmp_path)
    run = Run(tmp_path, seed=3)
    assert run.manager.load() and run.step == 2
    assert same(run.weights(), {**stages[0][0], **stages[1][0]})
    assert same(moments(run), {**stages[0][1], **stages[1][1]})
    rate = run.optimizers.optimizers[1].param_groups[0]["lr"]
    assert rate == run.schedulers.schedulers[1].get_last_lr()[0]
    run.manager.close()


# The first start.


@pytest.mark.parametrize("model_only", [True, False])
def test_it_starts_from_a_step_of_another_run(tmp_path: Path, model_only: bool) -> None:
    other = trained(tmp_path / "other", 2)
    other.manager.close()
    path = str(tmp_path / "other" / "steps" / "step-2")
    options = {"initial_load_path": path, "initial_load_model_only": model_only}
    run = Run(tmp_path / "run", seed=2, **options)
    assert run.manager.load() and run.step == (0 if model_only else 2)
    assert same(run.weights(), other.weights())
    run.manager.close()
    with pytest.raises(UsageError, match="name a step"):
        wrong = Run(tmp_path / "run", initial_load_path=str(tmp_path))
        wrong.manager.load()
    wrong.manager.close()


@pytest.mark.parametrize("model_only", [True, False])
def test_it_starts_from_a_checkpoint_of_torchtitan(tmp_path: Path, model_only: bool) -> None:
    other = Run(tmp_path / "other")
    theirs = other.managed(CheckpointManager, last_save_model_only=False)
    for _loss in other.steps(2):
        pass
    theirs.save(2, last_step=True)
    theirs.close()
    other.manager.close()
    path = str(tmp_path / "other" / "steps" / "step-2")
    options = {"initial_load_path": path, "initial_load_model_only": model_only}
    run = Run(tmp_path / "run", seed=2, **options)
    assert run.manager.load() and run.step == (0 if model_only else 2)
    assert same(run.weights(), other.weights())
    assert same(moments(run), moments(other)) is not model_only
    run.manager.close()


class Adapter:
    """An adapter as torchtitan's models have one: other names."""

    hf_assets_path: str | None = None

    def to_hf(self, model: dict[str, Any]) -> dict[str, Any]:
        return {f"hf.{name}": value for name, value in model.items()}

    def from_hf(self, model: dict[str, Any]) -> dict[str, Any]:
        return {name.removeprefix("hf."): value for name, value in model.items()}

    def get_hf_storage_reader(self, path: str, quantized: bool) -> Any:
        assert not quantized
        return HuggingFaceStorageReader(path)


def export(_rank: int, _group: Any, folder: Path) -> dict[str, torch.Tensor]:
    run = trained(folder, 2, adapter=Adapter(), last_save_model_only=True, last_save_in_hf=True)
    run.manager.close()
    return run.weights()


def test_the_last_step_in_hugging_faces_format(tmp_path: Path) -> None:
    weights = run_ranks(export, 2, tmp_path)[0]
    model = load_file(tmp_path / "steps" / "hf-2" / "model.safetensors")
    assert same(Adapter().from_hf(model), weights)
    with pytest.raises(UsageError, match="adapter"):
        Run(tmp_path, last_save_model_only=True, last_save_in_hf=True)


def test_it_starts_from_a_model_in_hugging_faces_format(tmp_path: Path) -> None:
    other = Run(tmp_path / "other", seed=7)
    (tmp_path / "model").mkdir()
    save_file(Adapter().to_hf(other.weights()), tmp_path / "model" / "model.safetensors")
    options = {"initial_load_in_hf": True, "initial_load_path": str(tmp_path / "model")}
    run = Run(tmp_path / "run", adapter=Adapter(), **options)
    assert run.manager.load() and same(run.weights(), other.weights())
    for manager in (run.manager, other.manager):
        manager.close()


# Failures, and what selects the manager.


def spoil(run: Run, steps: Path) -> None:
    """Have every later save fail."""
    run.manager.maybe_wait_for_saving()
    steps.rename(steps.parent / "gone")
    steps.write_text("a file")


def test_a_save_that_fails_in_the_background_fails_the_run(tmp_path: Path) -> None:
    run = trained(tmp_path, 2)
    spoil(run, tmp_path / "steps")
    with pytest.raises(CheckpointError):
        run.manager.save(4)
        run.manager.maybe_wait_for_saving()


def test_or_is_only_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = trained(tmp_path, 2, on_error="warn")
    spoil(run, tmp_path / "steps")
    assert run.manager.save(4)
    run.manager.maybe_wait_for_saving()
    assert run.manager.checkpointer.failures == 1
    assert any(record.name == "torchrelay" for record in caplog.records)
    run.manager.close()


@dataclasses.dataclass(kw_only=True)
class TrainerConfig:
    """The part of the trainer's config that selects a manager."""

    checkpoint: BaseCheckpointManager.Config = dataclasses.field(
        default_factory=CheckpointManager.Config
    )


def test_the_config_selects_it_and_the_command_line_its_options() -> None:
    default = TrainerConfig(checkpoint=RelayCheckpointManager.Config(enable=True, interval=7))
    words = ["--checkpoint.keep-latest-k", "4", "--checkpoint.on-error", "warn"]
    config = tyro.cli(TrainerConfig, args=words, default=default).checkpoint
    assert isinstance(config, RelayCheckpointManager.Config)
    assert (config.interval, config.keep_latest_k, config.on_error) == (7, 4, "warn")
    assert config._owner is RelayCheckpointManager


def test_without_torchtitan_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "torchrelay.integrations.torchtitan"
    for module in [one for one in sys.modules if one.split(".")[0] == "torchtitan"]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "torchtitan", None)
    monkeypatch.delitem(sys.modules, name)
    with pytest.raises(ImportError, match=r"torchrelay\[torchtitan\]"):
        importlib.import_module(name)
    importlib.import_module("torchrelay")
