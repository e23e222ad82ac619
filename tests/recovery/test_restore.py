"""`Checkpointer.restore`: the newest step on every rank, or None on every rank."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import torchrelay as tr
from tests.recovery.test_recover import Job, damage, saved
from tests.support.late_view import show_late
from tests.support.ranks import RankPool
from torchrelay.loading import loader

ROOT = Path(__file__).parents[2]
LOOKS = 5


def test_none_at_the_first_start_then_the_newest_step(tmp_path: Path) -> None:
    state: dict[str, Any] = {"w": torch.zeros(4), "step": 0, "list": [1, {"a": 2}]}
    with tr.Checkpointer(tmp_path, no_dist=True) as ckpt:
        assert ckpt.restore(state) is None
        assert state["step"] == 0 and not state["w"].any()
        for step in (1, 2):
            ckpt.save(
                step, {"w": torch.full((4,), float(step)), "step": step, "list": [step, {"a": 5}]}
            )
    before = state["w"]
    with tr.Checkpointer(tmp_path, no_dist=True) as ckpt:
        assert ckpt.restore(state) == 2
    assert state["w"] is before and before.eq(2).all()
    assert (state["step"], state["list"]) == (2, [2, {"a": 5}])


def test_a_damaged_step_is_skipped_and_damage_of_all_is_no_first_start(tmp_path: Path) -> None:
    job = Job()
    for _ in range(2):
        job.train(1)
        saved(tmp_path, job)
    damage(tmp_path, 2)
    with tr.Checkpointer(tmp_path, no_dist=True) as ckpt:
        with pytest.warns(RuntimeWarning, match="step 2"):
            assert ckpt.restore(Job().state()) == 1
        damage(tmp_path, 1)
        again = Job()
        before = {name: value.clone() for name, value in again.model.state_dict().items()}
        with (
            pytest.warns(RuntimeWarning),
            pytest.raises(tr.errors.RecoveryError, match="do not start at step 0") as caught,
        ):
            ckpt.restore(again.state())
    assert isinstance(caught.value.__cause__, tr.errors.StepNotFoundError)
    assert all(torch.equal(one, before[name]) for name, one in again.model.state_dict().items())


def test_what_looks_like_a_step_is_no_first_start(tmp_path: Path) -> None:
    saved(tmp_path, Job())
    with (
        tr.Checkpointer(
            tmp_path / "step-0",
            no_dist=True,
            options=tr.options.CheckpointerOptions(read_only=True),
        ) as ckpt,
        pytest.raises(tr.errors.RecoveryError, match="did you mean"),
    ):
        ckpt.restore(Job().state())


def test_a_part_of_a_state(tmp_path: Path) -> None:
    with tr.Checkpointer(tmp_path, no_dist=True) as ckpt:
        ckpt.save(1, {"model": {"w": torch.ones(2), "b": torch.ones(2)}})
        into = {"w": torch.zeros(2), "b": torch.zeros(2)}
        assert ckpt.restore(into, key="model", include="w") == 1
        assert into["w"].eq(1).all() and into["b"].eq(0).all()
        with pytest.raises(tr.errors.MismatchError, match="w"):
            ckpt.restore({"other": torch.zeros(2)})
        with pytest.raises(tr.errors.UsageError, match="state that exists"):
            ckpt.restore(None)


def late(rank: int, group: Any, root: str, lags: int) -> list[tuple[int | None, float, bool]]:
    """A first start; then one at which a rank sees the steps late."""
    found = []
    for start in range(2):
        state = {"w": torch.zeros(4)}
        with tr.Checkpointer(root, group=group, timeout=60) as ckpt:
            looks = show_late(ckpt._store, LOOKS) if start and rank == lags else []
            step = ckpt.restore(state)
            found.append((step, float(state["w"].sum()), len(looks) > LOOKS))
            if step is None:
                ckpt.save(3, {"w": torch.ones(4)})
        dist.barrier(group)
    return found


@pytest.mark.parametrize("lags", [0, 1])
def test_a_rank_that_sees_the_steps_late(pool2: RankPool, tmp_path: Path, lags: int) -> None:
    for rank, found in enumerate(pool2.run(late, str(tmp_path / "run"), lags, timeout=100)):
        assert found == [(None, 0.0, False), (3, 4.0, rank == lags)]


def never(rank: int, group: Any, root: str) -> str:
    """Rank 0, whose listing decides, never sees the step that rank 1 sees."""
    state = {"w": torch.zeros(4)}
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(loader, "VISIBLE_SECONDS", 0.2)
        with tr.Checkpointer(root, group=group, timeout=60) as ckpt:
            ckpt.save(3, {"w": torch.ones(4)})
            if rank == 0:
                show_late(ckpt._store, 10**9)
            dist.barrier(group)
            with pytest.raises(tr.errors.CheckpointError) as caught:
                ckpt.restore(state)
            assert not state["w"].any()
            return str(caught.value)


def test_a_job_does_not_begin_again_because_rank_0_sees_nothing(
    pool2: RankPool, tmp_path: Path
) -> None:
    one, other = pool2.run(never, str(tmp_path / "run"), timeout=100)
    assert one == other and "rank 1 sees steps" in one and "shared file system" in one


# Runs a script on each rank; the one that is named sees the steps late.
LATE = f"""
import os, sys
import torch.distributed as dist
import torchrelay as tr
from tests.support.late_view import show_late
from torchrelay.checkpointer import front

tr.init_process_group("gloo")
open_store = front.open_store

def opened(*words, **options):
    store = open_store(*words, **options)
    if dist.get_rank() == int(os.environ["LAGS"]):
        show_late(store, {LOOKS})
    return store

front.open_store = opened
exec(compile(open(sys.argv[1]).read(), sys.argv[1], "exec"), {{"__name__": "__main__"}})
dist.destroy_process_group()
"""


def newcomers_script() -> str:
    """The first script of the README."""
    (script, *_) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    lines = [line for line in script.splitlines() if line.strip()]
    assert len(lines) <= 20 and "except" not in script and "__main__" in script
    return str(script)


def test_the_script_of_the_readme_resumes_under_torchrun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "train.py").write_text(newcomers_script())
    (tmp_path / "late.py").write_text(LATE)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("LAGS", "1")
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    launch += ["--nproc-per-node", "2", "late.py", "train.py"]
    for expected in (0, 10):
        done = subprocess.run(
            launch, cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert done.stdout.split("\n").count(f"from step {expected}") == 2, done.stdout
