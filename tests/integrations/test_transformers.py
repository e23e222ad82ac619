"""Hugging Face's `Trainer`, the real one, with `RelayCallback`."""

from __future__ import annotations

import importlib
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import torchrelay as tr
from tests.support.framework_jobs import Losses, check_exact_resume, losses_of, run_job
from torchrelay.errors import CheckpointError, MismatchError, UsageError

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
import safetensors.torch as safetensors  # noqa: E402

from tests.integrations import trainer_job as job  # noqa: E402
from torchrelay.integrations.transformers import RelayCallback  # noqa: E402


@pytest.mark.timeout(420)
def test_a_killed_job_continues_exactly(tmp_path: Path) -> None:
    done = run_job(Path(job.__file__), tmp_path)
    assert done.code == 0, done.output
    check_exact_resume(tmp_path, last=job.STEPS, saved=8)


class At(transformers.TrainerCallback):  # type: ignore[misc, name-defined]
    """Does something after a step."""

    def __init__(self, step: int, act: Any) -> None:
        self.step, self.act = step, act

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.step:
            self.act()


def trained(
    folder: Path, name: str, *others: Any, model: Any = None, **options: Any
) -> tuple[Any, RelayCallback]:
    folder.mkdir(exist_ok=True)
    args = job.settings(folder)
    relay = RelayCallback(folder / "steps", **{"every": 2, "timeout": 60, **options})
    trainer = transformers.Trainer(
        model=job.model() if model is None else model,
        args=args,
        train_dataset=job.Texts(20),
        eval_dataset=job.Texts(4),
        callbacks=[relay, job.Watched(Losses(folder, name), None, relay), *others],
    )
    trainer.train(resume_from_checkpoint=relay.checkpoint)
    return trainer, relay


def test_a_job_that_is_asked_to_stop_saves_and_continues_exactly(tmp_path: Path) -> None:
    calm, _ = trained(tmp_path / "calm", "whole")
    signals = At(7, lambda: os.kill(os.getpid(), signal.SIGTERM))
    before = signal.getsignal(signal.SIGTERM)
    stopped, relay = trained(tmp_path / "stopped", "first", signals, every=1000)
    assert signal.getsignal(signal.SIGTERM) is before
    saved = relay.checkpointer.latest()
    assert saved is not None and 7 <= saved < job.STEPS == calm.state.max_steps
    assert stopped.state.global_step == saved + 1  # this one is trained again
    again, _ = trained(tmp_path / "stopped", "second", every=1000)
    whole = losses_of(tmp_path / "calm", "whole")
    assert losses_of(tmp_path / "stopped", "first") == whole[: saved + 1]
    assert losses_of(tmp_path / "stopped", "second") == whole[saved:]
    ours, theirs = calm.model.state_dict(), again.model.state_dict()
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)


@pytest.mark.slow
def test_the_trainer_logs_the_stalls(tmp_path: Path) -> None:
    """To what it reports to: callbacks that come before ours, as TensorBoard's does."""
    calm, _ = trained(tmp_path / "calm", "whole")
    seen: list[tuple[int, float]] = []

    class Reporter(transformers.TrainerCallback):  # type: ignore[misc, name-defined]
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            if "save_stall_seconds" in logs:
                seen.append((state.global_step, logs["save_stall_seconds"]))

    relay = RelayCallback(tmp_path / "steps", every=4, timeout=60)
    trainer = transformers.Trainer(
        model=job.model(),
        args=job.settings(tmp_path),
        train_dataset=job.Texts(20),
        eval_dataset=job.Texts(4),
        callbacks=[Reporter(), relay],
    )
    relay.log_stalls(trainer)
    trainer.train(resume_from_checkpoint=relay.checkpoint)
    assert [step for step, _ in seen] == [4, 8, 12, job.STEPS]
    assert [stall for _, stall in seen] == relay.stalls and min(relay.stalls) > 0
    history = trainer.state.log_history
    assert [one["step"] for one in history if "save_stall_seconds" in one] == [4, 8, 12, job.STEPS]
    # Nothing else of the run is changed by it.
    losses = [one["loss"] for one in history if "loss" in one]
    assert losses == [one["loss"] for one in calm.state.log_history if "loss" in one]


def spoil(folder: Path) -> None:
    """Have every later save fail."""
    steps = folder / "steps"
    steps.rename(folder / "gone")
    steps.write_text("a file")


def test_a_save_that_fails_in_the_background_fails_the_run(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError):
        trained(tmp_path / "a", "x", At(5, lambda: spoil(tmp_path / "a")))


@pytest.mark.slow
def test_or_is_only_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trainer, _relay = trained(
        tmp_path / "a", "x", At(5, lambda: spoil(tmp_path / "a")), on_error="warn"
    )
    assert trainer.state.global_step == job.STEPS
    assert any("step" in record.message for record in caplog.records if record.name == "torchrelay")


def test_a_damaged_step_is_skipped(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trained(tmp_path / "a", "first", keep=5)
    newest = tmp_path / "a" / "steps" / f"step-{job.STEPS}"
    file = max(newest.glob("*.safetensors"), key=lambda one: one.stat().st_size)
    data = bytearray(file.read_bytes())
    data[-5] ^= 1
    file.write_bytes(data)
    trained(tmp_path / "a", "second", keep=5)
    first, second = losses_of(tmp_path / "a", "first"), losses_of(tmp_path / "a", "second")
    assert second == first[-1:], "from the step before"
    assert f"step {job.STEPS} of" in caplog.text


def test_the_best_steps_stay(tmp_path: Path) -> None:
    keep = tr.KeepBest("eval_loss") | tr.KeepLast(1)
    trainer, relay = trained(tmp_path / "a", "x", every=3, keep=keep)
    evaluated = {
        log["step"]: log["eval_loss"] for log in trainer.state.log_history if "eval_loss" in log
    }
    best = min(evaluated, key=evaluated.__getitem__)
    assert set(relay.checkpointer.steps()) == {best, job.STEPS}


@pytest.fixture
def printed(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """The log of transformers, which does not reach the root logger otherwise."""
    transformers.utils.logging.enable_propagation()
    yield caplog
    transformers.utils.logging.disable_propagation()


@pytest.mark.slow
def test_a_resume_warns_of_no_weights(tmp_path: Path, printed: pytest.LogCaptureFixture) -> None:
    """They come from the step, after the trainer has looked for them. Other warnings are there."""
    trained(tmp_path, "first")
    trainer, _relay = trained(tmp_path, "second")
    messages = [record.getMessage() for record in printed.records]
    assert not [one for one in messages if "missing keys" in one]
    safetensors.save_file({}, tmp_path / "model.safetensors")
    trainer._load_from_checkpoint(str(tmp_path))
    assert "missing keys" in printed.records[-1].getMessage()


def test_the_best_model_is_there_at_the_end(tmp_path: Path) -> None:
    best = tr.KeepBest("eval_loss")
    trainer, relay = trained(tmp_path, "x", every=3, keep=1, load_best=best)
    evaluated = {
        log["step"]: log["eval_loss"] for log in trainer.state.log_history if "eval_loss" in log
    }
    step = min(evaluated, key=evaluated.__getitem__)
    saved = relay.checkpointer.load(step=step, key="model").state
    assert all(torch.equal(saved[key], one) for key, one in trainer.model.state_dict().items())
    assert trainer.evaluate()["eval_loss"] == evaluated[step]
    assert set(relay.checkpointer.steps()) == {step, job.STEPS}
    assert relay.checkpointer.latest() == job.STEPS


def test_the_best_is_not_the_last(tmp_path: Path) -> None:
    """The highest loss is that of the first evaluation; a job that has ended gives it again."""
    best = tr.KeepBest("eval_loss", mode="max")
    for name in ("first", "again"):
        trainer, relay = trained(tmp_path, name, every=3, load_best=best)
        saved = relay.checkpointer.load(step=3, key="model").state
        assert all(torch.equal(saved[key], one) for key, one in trainer.model.state_dict().items())


def test_without_an_evaluation_the_model_stays(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer, relay = trained(tmp_path, "x", load_best=tr.KeepBest("eval_other"))
    saved = relay.checkpointer.load(step=job.STEPS, key="model").state
    assert all(torch.equal(saved[key], one) for key, one in trainer.model.state_dict().items())
    assert "no step has the metric eval_other" in caplog.text


def test_a_best_model_of_the_trainer_is_refused(tmp_path: Path) -> None:
    args = job.settings(tmp_path)
    args.load_best_model_at_end = True
    args.metric_for_best_model = "loss"
    with pytest.raises(UsageError, match="KeepBest"):
        transformers.Trainer(
            model=job.model(),
            args=args,
            eval_dataset=job.Texts(4),
            callbacks=[RelayCallback(tmp_path / "steps", every=2)],
        )
    with pytest.raises(UsageError, match="load_best"):
        RelayCallback(tmp_path, every=1, load_best="eval_loss")  # type: ignore[arg-type]


def test_the_model_opens_with_from_pretrained(tmp_path: Path) -> None:
    trainer, relay = trained(tmp_path / "a", "x")
    relay.export(tmp_path / "model")
    opened = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "model")
    ours, theirs = trainer.model.state_dict(), opened.state_dict()
    assert set(ours) == set(theirs)
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)


def test_a_model_whose_weights_have_other_names_in_files(tmp_path: Path) -> None:
    """transformers 5 merges the experts of a layer when it loads them; files have each alone."""
    torch.manual_seed(1)
    config = transformers.MixtralConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_local_experts=2,
        tie_word_embeddings=True,
    )
    trainer, relay = trained(tmp_path, "x", model=transformers.MixtralForCausalLM(config))
    relay.export(tmp_path / "model")
    trainer.model.save_pretrained(tmp_path / "own")
    ours, theirs = (
        safetensors.load_file(tmp_path / name / "model.safetensors") for name in ("model", "own")
    )
    assert set(ours) == set(theirs)
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)


def test_an_export_is_whole_or_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, relay = trained(tmp_path, "x")
    steps = sorted(one.name for one in tmp_path.iterdir())

    def fail(*_: Any, **__: Any) -> None:
        raise OSError(28, "no space left")

    with monkeypatch.context() as broken:
        broken.setattr("torchrelay.stores.local.files.Files.rename", fail)
        with pytest.raises(CheckpointError, match="no space left"):
            relay.export(tmp_path / "model")
    assert sorted(one.name for one in tmp_path.iterdir()) == steps
    relay.export(tmp_path / "model")
    with pytest.raises(UsageError, match="exists"):
        relay.export(tmp_path / "model")
    trainer.model.add_module("more", nn.Linear(2, 2))
    with pytest.raises(MismatchError, match="different weights"):
        relay.export(tmp_path / "other")


class Plain(nn.Module):
    """No model of transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Embedding(64, 8), nn.Dropout(0.1), nn.Linear(8, 64))

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.inner(input_ids)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return {"loss": loss, "logits": logits}


def test_a_module_of_ones_own(tmp_path: Path) -> None:
    torch.manual_seed(0)
    trained(tmp_path / "calm", "whole", model=Plain())
    torch.manual_seed(0)
    signals = At(7, lambda: os.kill(os.getpid(), signal.SIGTERM))
    trained(tmp_path / "a", "first", signals, model=Plain())
    trained(tmp_path / "a", "second", model=Plain())
    second = losses_of(tmp_path / "a", "second")
    assert second == losses_of(tmp_path / "calm", "whole")[-len(second) :]


@pytest.mark.parametrize("others", [{"save_strategy": "steps"}, {"fsdp": "full_shard"}])
def test_what_it_cannot_do_is_refused(tmp_path: Path, others: dict[str, Any]) -> None:
    with pytest.raises((UsageError, ValueError, RuntimeError), match=r"RelayCallback|fsdp|FSDP"):
        transformers.Trainer(
            model=job.model(),
            args=job.settings(tmp_path, **others),
            eval_dataset=job.Texts(4),
            callbacks=[RelayCallback(tmp_path / "steps", every=2)],
        )


def test_a_checkpoint_of_another_kind_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="every is a positive number"):
        RelayCallback(tmp_path, every=0)


def test_without_transformers_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "torchrelay.integrations.transformers"
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.delitem(sys.modules, name)
    with pytest.raises(ImportError, match=r"torchrelay\[transformers\]"):
        importlib.import_module(name)
    importlib.import_module("torchrelay")
