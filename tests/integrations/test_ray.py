"""Ray Train, the real one, with torchrelay."""

from __future__ import annotations

import importlib
import sys
import threading
from pathlib import Path

import pytest
import torch

import torchrelay as tr
from tests.support.framework_jobs import run_job
from torchrelay.errors import CheckpointError

pytest.importorskip("ray.train", reason="ray is not installed", exc_type=ImportError)

from pyarrow.fs import LocalFileSystem

from tests.integrations import ray_job as job
from torchrelay.integrations.ray import RelayReports
from torchrelay.pending import Pending


def model_at(folder: Path, step: int) -> dict[str, torch.Tensor]:
    steps = folder / "experiment" / "steps"
    model: dict[str, torch.Tensor] = (
        tr.Checkpointer(steps, no_dist=True, options=tr.options.CheckpointerOptions(read_only=True))
        .load(step=step, key="model")
        .state
    )
    return model


def steps_in(folder: Path) -> list[int]:
    steps = (folder / "experiment" / "steps").iterdir()
    return sorted(int(one.name.removeprefix("step-")) for one in steps)


@pytest.mark.slow
@pytest.mark.timeout(620)
def test_a_run_whose_worker_dies_continues_exactly(tmp_path: Path) -> None:
    done = run_job(Path(job.__file__), tmp_path, seconds=600)
    assert done.code == 0, done.output
    told = dict(line.split(": ", 1) for line in done.output.splitlines() if ": " in line)
    last, end = job.STEPS, job.STEPS + job.EVERY
    # The same last loss, of two workers that one of died, the same weights, and as many steps.
    assert told["whole"].replace("whole", "died") == told["died"]
    assert f"'step': {last}" in told["died"] and f"/step-{last} {job.KEPT}" in told["died"]
    whole, died = model_at(tmp_path / "whole", last), model_at(tmp_path / "died", last)
    assert all(torch.equal(whole[key], died[key]) for key in whole)
    # On one worker it continues, and Ray keeps three steps: it knows of all that were committed.
    assert f"'step': {end}" in told["alone"]
    assert steps_in(tmp_path / "whole") == [last - 4, last - 2, last]
    assert steps_in(tmp_path / "died") == [last - 2, last, end]
    # A save that fails; Ray's result has the metrics of the last checkpoint.
    assert told["warned"] == "{'step': 1}"
    assert "step 2 is reported without a checkpoint" in done.output
    assert told["raised"] == "True"


def test_ray_gets_a_checkpoint_when_it_is_committed() -> None:
    relay = object.__new__(RelayReports)  # whose constructor wants a worker of Ray
    relay._folder, relay._filesystem = "/run/steps", LocalFileSystem()
    good, bad = Pending(1, "saving"), Pending(2, "saving")
    words = relay._when_committed(good)
    assert words["delete_local_checkpoint_after_upload"] is False
    checkpoint = words["checkpoint"]
    assert checkpoint.path == "/run/steps/step-1"
    threading.Timer(0.2, good.end, (None, None)).start()
    assert words["checkpoint_upload_fn"](checkpoint, "any") is checkpoint
    assert good.done() and good.seen
    bad.end(None, CheckpointError("the disk is full"))
    with pytest.raises(CheckpointError, match="full"):
        relay._when_committed(bad)["checkpoint_upload_fn"](checkpoint, "any")


def test_without_ray_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "torchrelay.integrations.ray"
    for module in [one for one in sys.modules if one.split(".")[0] == "ray"]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, name)
    with pytest.raises(ImportError, match=r"torchrelay\[ray\]"):
        importlib.import_module(name)
    importlib.import_module("torchrelay")
