"""`examples/silent_corruption`: a bit flips, the job stops, and resumes from the step before."""

from __future__ import annotations

import re
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from torchrelay.stores.locate import open_store
from torchrelay.stores.opening import open_step

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "silent_corruption" / "train.py"
SECONDS = 150

pytestmark = pytest.mark.timeout(2 * SECONDS + 20)  # a job starts and restarts two interpreters


def run(folder: Path, *words: str, program: Path = EXAMPLE) -> tuple[int, str]:
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    launch += ["--nproc-per-node", "2", "--max-restarts", "1", str(program), str(folder), *words]
    done = subprocess.run(
        launch,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    return done.returncode, done.stdout


def checksums(output: str) -> set[str]:
    """Two ranks write to one pipe: the line of one may begin before that of the other has ended."""
    return set(
        re.findall(r"rank \d ends after step 30, checksum (-?\d+\.\d+(?:e[+-]\d+)?)", output)
    )


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The output of a run in which no bit flips."""
    code, output = run(tmp_path_factory.mktemp("undisturbed") / "steps", "--flip", "0")
    assert code == 0 and len(checksums(output)) == 1, output
    assert "ReplicaError" not in output
    return output


# Found by the comparison, before a save; and by the save alone.
@pytest.mark.parametrize(
    "words",
    [
        pytest.param([], id="compared"),
        pytest.param(["--compare", "1000"], id="saved", marks=pytest.mark.slow),
    ],
)
def test_the_job_stops_and_resumes(words: list[str], undisturbed: str, tmp_path: Path) -> None:
    assert len(EXAMPLE.read_text().splitlines()) <= 60
    code, output = run(tmp_path / "steps", *words)
    assert code == 0, output
    assert "ReplicaError" in output and "model.0.weight (parameter) on ranks 0, 1" in output
    starts = re.findall(r"rank 1 starts after step (\d+)", output)
    assert starts == ["0", "10"], output
    assert checksums(output) == checksums(undisturbed)
    store = open_store(tmp_path / "steps")
    for step in store.steps():
        with closing(open_step(store, step)) as opened:
            assert opened.record.mark is None


# The example with marks in place of errors. Rank 1 is killed after a marked step was saved.
MARKED = f"""
import os, runpy, signal, sys
import torch
import torchrelay as tr

make, seed = tr.Checkpointer, torch.manual_seed

def killed(number):
    if number == 23_001 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        os.kill(os.getpid(), signal.SIGKILL)
    return seed(number)

torch.manual_seed = killed
tr.Checkpointer = lambda folder, replicas: make(folder)
sys.argv = [*sys.argv, "--compare", "1000"]
runpy.run_path({str(EXAMPLE)!r}, run_name="__main__")
"""


def test_a_killed_job_does_not_resume_from_a_marked_step(undisturbed: str, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(MARKED)
    code, output = run(tmp_path / "marked", program=program)
    assert code == 0, output
    assert "step 20 is saved and marked" in output and "model.0.weight on ranks 0, 1" in output
    assert re.findall(r"rank 1 starts after step (\d+)", output) == ["0", "10"], output
    assert "is marked: replicas differ: model.0.weight on ranks 0, 1" in output
    assert checksums(output) == checksums(undisturbed)
    store = open_store(tmp_path / "marked")
    assert store.steps() == [10, 20, 30]  # step 20 was saved again
    for step in store.steps():
        with closing(open_step(store, step)) as opened:
            assert opened.record.mark is None
