"""`examples/fsdp`: eight lines for saves, another number of ranks, preemption and a keeper."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import torchrelay as tr
from tests.support.forks import Done, in_process, run_program
from tests.support.ranks import run_ranks
from torchrelay.keeper.process import KeeperName

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "fsdp" / "train.py"
STEPS, EVERY, HIT_AT, SECONDS = 60, 5, 30, 150

# Runs the example. Rank 1 gets a signal in the first start, when it prints a step.
HIT = f"""
import builtins, os, runpy, signal, sys

show = builtins.print

def hit(text, **options):
    show(text, **options)
    first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    if first and text.startswith("rank 1/2 step {HIT_AT} "):
        os.kill(os.getpid(), getattr(signal, os.environ["HIT"]))

builtins.print = hit
runpy.run_path({str(EXAMPLE)!r}, run_name="__main__")
"""

Losses = dict[tuple[int, int], set[str]]


def losses_in(output: str) -> Losses:
    found: Losses = {}
    for rank, step, loss in re.findall(r"rank (\d+)/2 step (\d+) loss (\S+)", output):
        found.setdefault((int(rank), int(step)), set()).add(loss)
    return found


def under_agent(script: Path, *words: str) -> Done:
    agent = Path(__file__).parents[1] / "support" / "agent.py"
    return run_program(str(agent), str(script), *words, folder=script.parent, seconds=SECONDS)


def under_torchrun(script: Path, *words: str) -> Done:
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    launch += ["--nproc-per-node", "2", "--max-restarts", "1", str(script), *words]
    done = subprocess.run(
        launch,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    return Done(done.returncode, done.stdout)


LAUNCHERS = [under_agent, pytest.param(under_torchrun, marks=pytest.mark.slow)]


def run_example(folder: str, job: str, steps: int = STEPS) -> str:
    spec = importlib.util.spec_from_file_location("fsdp_example", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with contextlib.redirect_stdout(io.StringIO()) as output:
        module.train(folder, job, steps, EVERY)
    return output.getvalue()


def undisturbed(rank: int, group: Any, folder: str, job: str) -> str:
    tr.init_process_group = lambda backend: None  # type: ignore[assignment]  # there is one
    return run_example(folder, job)


def alone(folder: str, job: str, steps: int) -> str:
    """The same on one rank."""
    store = dist.TCPStore("127.0.0.1", 0, 1, True, wait_for_workers=False)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(store.port))
    os.environ.update(RANK="0", WORLD_SIZE="1")
    del store
    try:
        return run_example(folder, job, steps)
    finally:
        dist.destroy_process_group()


def end_keepers(job: str) -> None:
    for name in KeeperName.all():
        if name.job == job:
            with tr.Keeper(f"{job}@{name.host}", no_dist=True) as keeper:
                keeper.end()


def test_eight_lines() -> None:
    lines = EXAMPLE.read_text().splitlines()
    added = [line for line in lines if line.endswith("# +")]
    assert len(added) == 8
    used = [line for line in lines if re.search(r"\b(tr\.|ckpt\.)|torchrelay as tr", line)]
    assert set(used) <= set(added), "no other line uses the library"


@pytest.mark.timeout(2 * SECONDS + 20)
@pytest.mark.parametrize("launched", LAUNCHERS)
@pytest.mark.slow
def test_a_killed_worker_comes_back_from_the_keeper(
    launched: Callable[..., Done], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "job.py").write_text(HIT)
    monkeypatch.setenv("HIT", "SIGKILL")
    job, folder = f"killed-{os.getpid()}", str(tmp_path / "run")
    words = ("--folder", folder, "--job", job, "--steps", str(STEPS), "--every", str(EVERY))
    try:
        done = launched(tmp_path / "job.py", *words)
    finally:
        end_keepers(job)
    assert done.code == 0, done.output
    found = losses_in(done.output)
    try:
        calm = run_ranks(undisturbed, 2, str(tmp_path / "calm"), f"{job}-calm", timeout=SECONDS)
    finally:
        end_keepers(f"{job}-calm")
    expected = losses_in("\n".join(calm))
    assert set(expected) == {(r, s) for r in (0, 1) for s in range(EVERY, STEPS + 1, EVERY)}
    assert found == expected, "also the steps that were done twice have one loss"


@pytest.mark.timeout(2 * SECONDS + 20)
@pytest.mark.parametrize("launched", LAUNCHERS)
def test_a_preempted_job_resumes_on_another_number_of_ranks(
    launched: Callable[..., Done], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "job.py").write_text(HIT)
    monkeypatch.setenv("HIT", "SIGTERM")
    job, folder = f"preempted-{os.getpid()}", str(tmp_path / "run")
    words = ("--folder", folder, "--job", job, "--steps", "100000", "--every", str(EVERY))
    try:
        done = launched(tmp_path / "job.py", *words)
    finally:
        end_keepers(job)
    assert done.code == 0, done.output
    last = {rank: max(s for r, s in losses_in(done.output) if r == rank) for rank in (0, 1)}
    with tr.Checkpointer(
        folder, no_dist=True, options=tr.options.CheckpointerOptions(read_only=True)
    ) as ckpt:
        (newest,) = {*last.values(), ckpt.latest()}
        assert newest is not None and HIT_AT < newest < 100_000
        position = ckpt.load(key="data").state
    assert position == {"position": newest}
    try:
        output = in_process(alone, folder, f"{job}-alone", newest + 12)
    finally:
        end_keepers(f"{job}-alone")
    shown = [int(step) for step in re.findall(r"rank 0/1 step (\d+) loss", output)]
    expected = [step for step in range(newest + 1, newest + 12) if step % EVERY == 0]
    assert shown == [*expected, newest + 12], "it resumes with the next step"
