"""The examples of the frameworks: short, with few lines that adoption adds, and they resume."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tests.support.forks import run_program

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
JOBS = {
    "huggingface": ("transformers", ("--steps", "15"), ("--steps", "25")),
    "accelerate": ("accelerate", ("--epochs", "1"), ("--epochs", "2")),
    "lightning": ("lightning", ("--epochs", "1"), ("--epochs", "2")),
}


# tests/integrations/test_ray.py runs Ray's example: Ray takes half a minute to start.
@pytest.mark.parametrize("name", [*JOBS, "ray"])
def test_few_lines_are_added(name: str) -> None:
    lines = (EXAMPLES / name / "train.py").read_text().splitlines()
    assert len(lines) <= 60
    added = [line for line in lines if line.endswith("# +")]
    assert 1 <= len(added) <= 5
    assert all("torchrelay" not in line for line in lines[7:] if line not in added)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] * (name == "huggingface")) for name in JOBS],
)
def test_it_runs_and_continues(name: str, tmp_path: Path) -> None:
    package, first, second = JOBS[name]
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    script = str(EXAMPLES / name / "train.py")
    for words in (first, second):
        done = run_program(script, "--folder", "run", *words, folder=tmp_path, seconds=100)
        assert done.code == 0, done.output
    steps = sorted(
        int(one.name.removeprefix("step-")) for one in (tmp_path / "run" / "steps").glob("step-*")
    )
    assert steps and steps[-1] >= 20


def test_lora_writes_what_changed(tmp_path: Path) -> None:
    script = EXAMPLES / "lora" / "train.py"
    assert len(script.read_text().splitlines()) <= 60
    words = ("--folder", "run", "--width", "512", "--steps")
    first, second = (
        run_program(str(script), *words, steps, folder=tmp_path, seconds=100) for steps in "52"
    )
    assert first.code == second.code == 0, first.output + second.output
    lines = [line for line in (first.output + second.output).splitlines() if "reused" in line]
    assert [int(line.split()[1].rstrip(":")) for line in lines] == [1, 2, 3, 4, 5, 6, 7]
    reused = [float(line.split()[-3]) for line in lines]
    assert reused[0] == 0 and all(one > 8 for one in reused[1:]), lines
