"""`examples/elastic`: killed once, started again by torchrun, it goes on with the same losses."""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.forks import Done, run_program
from tests.support.ranks import run_ranks
from torchrelay.keeper.process import KeeperName

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "elastic"
STEPS, SAVE_EVERY, DIE_AT = 10, 3, 8
SECONDS = 150

Losses = dict[tuple[int, int], set[str]]


def losses_in(output: str) -> Losses:
    """What each rank printed for each step, as often as it came there."""
    found: Losses = {}
    for rank, step, loss in re.findall(r"rank (\d+) step (\d+) loss (\S+)", output):
        found.setdefault((int(rank), int(step)), set()).add(loss)
    return found


def undisturbed(rank: int, group: Any, folder: str) -> str:
    sys.path.insert(0, str(EXAMPLE))
    train = importlib.import_module("train")
    with contextlib.redirect_stdout(io.StringIO()) as output:
        train.train(rank, 2, f"calm-{os.getppid()}", folder, STEPS, SAVE_EVERY, 0)
    return output.getvalue()


def under_agent(folder: Path, *words: str) -> Done:
    agent = EXAMPLE.parents[1] / "tests" / "support" / "agent.py"
    script = str(EXAMPLE / "train.py")
    return run_program(str(agent), script, *words, folder=folder, seconds=SECONDS)


def under_torchrun(folder: Path, *words: str) -> Done:
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    launch += ["--nproc-per-node", "2", "--max-restarts", "2", str(EXAMPLE / "train.py")]
    done = subprocess.run(
        [*launch, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=SECONDS,
        cwd=folder,
        check=False,
    )
    return Done(done.returncode, done.stdout)


@pytest.mark.timeout(2 * SECONDS + 20)
@pytest.mark.slow  # the tests of examples/fsdp kill workers every day
@pytest.mark.parametrize("launched", [under_agent, under_torchrun])
def test_a_worker_is_killed_and_the_losses_are_those_of_an_undisturbed_run(
    launched: Callable[..., Done], tmp_path: Path
) -> None:
    """By the agent that torchrun runs, with workers that are forked; by torchrun as it is."""
    options = ["--folder", str(tmp_path / "killed"), "--steps", str(STEPS)]
    options += ["--save-every", str(SAVE_EVERY), "--die-at", str(DIE_AT)]
    options += ["--job", f"killed-{os.getpid()}"]
    done = launched(tmp_path, *options)
    assert done.code == 0, done.output
    assert re.search(r"keeper killed-\d+: step [78]; step [78] was taken", done.output)
    deadline = time.monotonic() + 20  # a keeper that was told to end is a process of its own
    while [name for name in KeeperName.all() if name.job.startswith(("killed-", "calm-"))]:
        assert time.monotonic() < deadline, "a keeper has not ended"
        time.sleep(0.05)
    found = losses_in(done.output)
    expected = losses_in(
        "\n".join(run_ranks(undisturbed, 2, str(tmp_path / "calm"), timeout=SECONDS))
    )
    assert set(expected) == {(rank, step) for rank in (0, 1) for step in range(1, STEPS + 1)}
    assert found == expected, "also the steps that were done twice have one loss"
