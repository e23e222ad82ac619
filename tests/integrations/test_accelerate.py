"""Accelerate, the real one, with `use_torchrelay`."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.framework_jobs import check_exact_resume, run_job
from torchrelay.errors import CheckpointError, StepNotFoundError, UsageError

accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
pytest.importorskip("torchdata", reason="torchdata is not installed")

from tests.integrations import accelerate_job as job  # noqa: E402
from torchrelay.integrations.accelerate import use_torchrelay  # noqa: E402


@pytest.mark.timeout(420)
def test_a_killed_job_continues_exactly(tmp_path: Path) -> None:
    done = run_job(Path(job.__file__), tmp_path)
    assert done.code == 0, done.output
    check_exact_resume(tmp_path, last=job.STEPS, saved=8, near=0.25)


def prepared(seed: int = 0) -> tuple[Any, Any, Any]:
    accelerator = accelerate.Accelerator(cpu=True)
    torch.manual_seed(seed)
    model: Any = nn.Linear(4, 4)
    optimizer: Any = torch.optim.AdamW(model.parameters())
    return accelerator, *accelerator.prepare(model, optimizer)


def step_of(model: Any, optimizer: Any) -> None:
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def test_steps_are_numbered_by_their_directories_or_in_order(tmp_path: Path) -> None:
    accelerator, model, optimizer = prepared()
    relay = use_torchrelay(accelerator, tmp_path, timeout=60)
    assert relay.resume() is None
    step_of(model, optimizer)
    assert accelerator.save_state(tmp_path / "checkpoint-7").endswith("/step-7")
    relay.checkpointer.wait(60)
    seven = model.weight.detach().clone()
    step_of(model, optimizer)
    assert accelerator.save_state().endswith("/step-8")
    relay.checkpointer.wait(60)
    step_of(model, optimizer)
    assert accelerator.load_state() == 8
    assert accelerator.load_state("checkpoint-7") == 7
    assert torch.equal(model.weight, seven)
    with pytest.raises(StepNotFoundError):
        accelerator.load_state("checkpoint-9")
    with pytest.raises(UsageError, match="no step number"):
        accelerator.save_state("latest")
    relay.checkpointer.close()


def test_saves_that_follow_each_other_have_numbers_of_their_own(tmp_path: Path) -> None:
    """The one before may not be committed yet."""
    accelerator, model, optimizer = prepared()
    relay = use_torchrelay(accelerator, tmp_path, timeout=60)
    for number in range(3):
        step_of(model, optimizer)
        assert accelerator.save_state().endswith(f"/step-{number}")
    relay.checkpointer.close()
    accelerator, _, _ = prepared()
    relay = use_torchrelay(accelerator, tmp_path, timeout=60)
    assert accelerator.save_state().endswith("/step-3")
    relay.checkpointer.close()
    assert relay.checkpointer.steps() == [0, 1, 2, 3]


def test_random_numbers_continue_at_the_first_training_step(tmp_path: Path) -> None:
    accelerator, model, optimizer = prepared()
    step_of(model, optimizer)
    relay = use_torchrelay(accelerator, tmp_path, timeout=60)
    accelerator.save_state()
    relay.checkpointer.wait(60)
    expected = torch.rand(3)
    accelerator.load_state()
    torch.rand(100)  # somebody makes an iterator
    model(torch.ones(2, 4))
    assert torch.equal(torch.rand(3), expected)
    model(torch.ones(2, 4))
    assert not torch.equal(torch.rand(3), expected), "only once"
    relay.checkpointer.close()


def spoil(steps: Path) -> None:
    """Have every later save fail."""
    steps.rename(steps.parent / "gone")
    steps.write_text("a file")


def test_a_save_that_fails_in_the_background_fails_the_next_call(tmp_path: Path) -> None:
    accelerator, _, _ = prepared()
    relay = use_torchrelay(accelerator, tmp_path / "steps", timeout=60)
    accelerator.save_state()
    relay.checkpointer.wait(60)
    spoil(tmp_path / "steps")
    with pytest.raises(CheckpointError):
        accelerator.save_state()
        relay.checkpointer.wait(60)


def test_or_is_only_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    accelerator, _, _ = prepared()
    relay = use_torchrelay(accelerator, tmp_path / "steps", timeout=60, on_error="warn")
    accelerator.save_state()
    relay.checkpointer.wait(60)
    spoil(tmp_path / "steps")
    accelerator.save_state("step_5")
    relay.checkpointer.close()
    assert relay.checkpointer.failures == 1
    assert any(record.name == "torchrelay" for record in caplog.records)


def test_hooks_of_save_state_are_refused(tmp_path: Path) -> None:
    accelerator, _, _ = prepared()
    relay = use_torchrelay(accelerator, tmp_path, timeout=60)
    accelerator.register_save_state_pre_hook(lambda models, weights, directory: None)
    with pytest.raises(UsageError, match="hooks"):
        accelerator.save_state()
    relay.checkpointer.close()


def test_without_accelerate_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "torchrelay.integrations.accelerate"
    monkeypatch.setitem(sys.modules, "accelerate", None)
    monkeypatch.delitem(sys.modules, name)
    with pytest.raises(ImportError, match=r"torchrelay\[accelerate\]"):
        importlib.import_module(name)
    importlib.import_module("torchrelay")
