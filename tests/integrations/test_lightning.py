"""Lightning, the real one, with torchrelay."""

from __future__ import annotations

import csv
import importlib
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.framework_jobs import check_exact_resume, run_job
from torchrelay.errors import CheckpointError, StepNotFoundError, UsageError

pytest.importorskip("lightning", reason="lightning is not installed")

import lightning.pytorch as lightning
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger

from tests.integrations import lightning_job as job
from torchrelay.integrations.lightning import RelayCheckpointIO, SaveStalls


@pytest.mark.timeout(420)
@pytest.mark.parametrize("words", [(), ("--sharded",)], ids=["ddp", "fsdp2"])
def test_a_killed_job_continues_exactly(tmp_path: Path, words: tuple[str, ...]) -> None:
    done = run_job(Path(job.__file__), tmp_path, *words)
    assert done.code == 0, done.output
    check_exact_resume(tmp_path, last=job.STEPS, saved=5, near=0.25)


def fitted(folder: Path, kept: Any, resume: str | None = None, **options: Any) -> Any:
    runs = job.trainer(folder, kept, **options)
    model = job.Model()
    loader = torch.utils.data.DataLoader(job.data(), batch_size=4)
    runs.fit(model, loader, ckpt_path=resume)
    return runs, model


def names(folder: Path) -> set[str]:
    return {one.name for one in folder.iterdir()}


def test_model_checkpoint_keeps_the_best_and_the_last(tmp_path: Path) -> None:
    steps = tmp_path / "steps"
    kept = ModelCheckpoint(
        steps, every_n_train_steps=2, save_top_k=2, monitor="step", mode="max", save_last=True
    )
    _runs, _model = fitted(tmp_path, kept)
    best = {Path(path).name for path in kept.best_k_models}
    assert len(best) == 2 and names(steps) == best | {"last.ckpt", "step-12", "step-14"}
    assert (steps / "last.ckpt").resolve().name == "step-14"
    assert not any(one.is_symlink() and not one.exists() for one in steps.iterdir())
    loaded = RelayCheckpointIO().load_checkpoint(steps / "last.ckpt")
    assert loaded["global_step"] == 14 and loaded["hyper_parameters"] == {"width": 32}


def test_steps_without_a_name_are_removed(tmp_path: Path) -> None:
    steps = tmp_path / "steps"
    fitted(tmp_path, ModelCheckpoint(steps, save_last=True))
    assert names(steps) == {"epoch=2-step=15.ckpt", "last.ckpt", "step-15"}


def test_a_run_continues_from_its_last_checkpoint(tmp_path: Path) -> None:
    kept = ModelCheckpoint(tmp_path / "steps", save_last=True)
    _, whole = fitted(tmp_path, kept, max_epochs=4)
    other = tmp_path / "other"
    fitted(other, ModelCheckpoint(other / "steps", save_last=True), max_epochs=2)
    again = ModelCheckpoint(other / "steps", save_last=True)
    runs, model = fitted(other, again, "last", max_epochs=4)
    assert runs.current_epoch == 4
    ours, theirs = whole.state_dict(), model.state_dict()
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)


def test_what_is_removed_goes_when_the_new_one_is_there(tmp_path: Path) -> None:
    plugin = RelayCheckpointIO(timeout=60)
    weights = {"state_dict": {"a": torch.ones(4)}, "global_step": 1}
    plugin.save_checkpoint(weights, tmp_path / "one.ckpt")
    plugin.links.settle()
    plugin.save_checkpoint({**weights, "global_step": 2}, tmp_path / "two.ckpt")
    plugin.remove_checkpoint(tmp_path / "one.ckpt")
    plugin.teardown()
    assert names(tmp_path) == {"two.ckpt", "step-2"}


def test_two_names_of_one_step(tmp_path: Path) -> None:
    plugin = RelayCheckpointIO(timeout=60)
    weights = {"state_dict": {"a": torch.ones(4)}, "global_step": 1}
    plugin.save_checkpoint(weights, tmp_path / "one.ckpt")
    plugin.save_checkpoint(weights, tmp_path / "last.ckpt")
    plugin.remove_checkpoint(tmp_path / "one.ckpt")
    plugin.links.settle()
    assert names(tmp_path) == {"last.ckpt", "step-1"}
    assert torch.equal(
        plugin.load_checkpoint(tmp_path / "last.ckpt")["state_dict"]["a"], torch.ones(4)
    )
    plugin.teardown()


def test_what_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    plugin = RelayCheckpointIO(timeout=60)
    with pytest.raises(StepNotFoundError):
        plugin.load_checkpoint(tmp_path / "none.ckpt")
    with pytest.raises(UsageError, match="links"):
        plugin.save_checkpoint({"global_step": 1}, "s3://bucket/one.ckpt")


def logged(folder: Path) -> list[tuple[int, float]]:
    with (folder / "metrics.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row.get("save_stall_seconds")]
    return [(int(row["step"]), float(row["save_stall_seconds"])) for row in rows]


def test_the_loggers_get_the_stalls(tmp_path: Path) -> None:
    plugin = RelayCheckpointIO(timeout=60)
    runs = lightning.Trainer(
        accelerator="cpu",
        max_epochs=3,
        plugins=[plugin],
        logger=[CSVLogger(tmp_path, "a", ""), CSVLogger(tmp_path, "b", "")],
        callbacks=[ModelCheckpoint(tmp_path / "steps", every_n_epochs=1), SaveStalls()],
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    runs.fit(job.Model(), torch.utils.data.DataLoader(job.data(), batch_size=4))
    expected = list(zip([5, 10, 15], plugin.links.stalls, strict=True))
    for name in ("a", "b"):
        assert logged(tmp_path / name) == expected
    assert min(plugin.links.stalls) > 0


def test_stalls_of_other_checkpoints_are_refused(tmp_path: Path) -> None:
    runs = lightning.Trainer(
        accelerator="cpu",
        max_epochs=1,
        logger=False,
        callbacks=[SaveStalls()],
        default_root_dir=tmp_path,
    )
    with pytest.raises(UsageError, match="RelayCheckpointIO"):
        runs.fit(job.Model(), torch.utils.data.DataLoader(job.data(), batch_size=4))


def spoil(plugin: RelayCheckpointIO, steps: Path) -> None:
    """Have every later save fail."""
    plugin.links.settle()
    steps.rename(steps.parent / "gone")
    steps.write_text("a file")


@pytest.mark.parametrize("on_error", ["raise", "warn"])
def test_a_save_that_fails_in_the_background(tmp_path: Path, on_error: Any) -> None:
    plugin = RelayCheckpointIO(timeout=60, on_error=on_error)
    weights = {"state_dict": {"a": torch.ones(4)}, "global_step": 1}
    plugin.save_checkpoint(weights, tmp_path / "steps" / "one.ckpt")
    spoil(plugin, tmp_path / "steps")
    with pytest.raises(CheckpointError) if on_error == "raise" else nullcontext():
        plugin.save_checkpoint({**weights, "global_step": 2}, tmp_path / "steps" / "two.ckpt")
        plugin.teardown()


def fill(steps: Path, plugin: RelayCheckpointIO) -> dict[str, Any]:
    """`one.ckpt` and `step-1`, as a run before has left them."""
    weights = {"state_dict": {"a": torch.ones(4)}, "global_step": 1}
    plugin.save_checkpoint(weights, steps / "one.ckpt")
    plugin.links.settle()
    return weights


def fail_writing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have every commit from now on fail, in the background."""

    def fail(*_: Any) -> None:
        raise CheckpointError("no space is left", file="disk")

    monkeypatch.setattr("torchrelay.shares.step_draft.StepDraft.commit", fail)


@pytest.mark.parametrize("on_error", ["raise", "warn"])
def test_a_failed_save_links_to_nothing(
    tmp_path: Path, on_error: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not to the older step of its number either, which stays."""
    plugin = RelayCheckpointIO(timeout=60, on_error=on_error)
    weights = fill(tmp_path, plugin)
    with monkeypatch.context() as broken:
        fail_writing(broken)
        new = {**weights, "state_dict": {"a": torch.zeros(4)}}
        plugin.save_checkpoint(new, tmp_path / "two.ckpt")
        plugin.links.settle()
    assert names(tmp_path) == {"one.ckpt", "step-1"}
    with pytest.raises(CheckpointError) if on_error == "raise" else nullcontext():
        plugin.teardown()


def test_a_failed_save_replaces_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was to be removed stays until a later save is committed, whatever is called first."""
    plugin = RelayCheckpointIO(timeout=60, on_error="warn")
    weights = fill(tmp_path, plugin)
    with monkeypatch.context() as broken:
        fail_writing(broken)
        plugin.save_checkpoint({**weights, "global_step": 2}, tmp_path / "two.ckpt")
        plugin.remove_checkpoint(tmp_path / "one.ckpt")
        plugin.links.settle()
        plugin.remove_checkpoint(tmp_path / "two.ckpt")
        assert names(tmp_path) == {"one.ckpt", "step-1"}
    plugin.save_checkpoint({**weights, "global_step": 3}, tmp_path / "three.ckpt")
    plugin.teardown()
    assert names(tmp_path) == {"three.ckpt", "step-3"}


@pytest.mark.parametrize("on_error", ["raise", "warn"])
def test_a_link_that_cannot_be_made(tmp_path: Path, on_error: Any) -> None:
    plugin = RelayCheckpointIO(timeout=60, on_error=on_error)
    weights = fill(tmp_path, plugin)
    (tmp_path / "two.ckpt").mkdir()
    (tmp_path / "two.ckpt" / "file").touch()  # a directory in the way
    plugin.save_checkpoint({**weights, "global_step": 2}, tmp_path / "two.ckpt")
    plugin.remove_checkpoint(tmp_path / "one.ckpt")
    with pytest.raises(CheckpointError, match="link") if on_error == "raise" else nullcontext():
        plugin.links.settle()
    plugin.teardown()
    assert {"one.ckpt", "step-1", "step-2"} <= names(tmp_path)


def test_without_lightning_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "torchrelay.integrations.lightning"
    for module in [one for one in sys.modules if one.split(".")[0] == "lightning"]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "lightning", None)
    monkeypatch.delitem(sys.modules, name)
    with pytest.raises(ImportError, match=r"torchrelay\[lightning\]"):
        importlib.import_module(name)
    importlib.import_module("torchrelay")
