"""The check of one machine: two processes that it starts itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parents[2] / "src"
LAUNCHERS = ("RANK", "WORLD_SIZE", "SLURM_NTASKS")
pytestmark = pytest.mark.timeout(240)


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name not in LAUNCHERS}
    environment["PYTHONPATH"] = str(SOURCE)
    command = [sys.executable, "-m", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)


def test_it_ends_well_and_leaves_nothing(tmp_path: Path) -> None:
    ended = run("torchrelay.check", "--json", "--folder", str(tmp_path / "run"))
    assert ended.returncode == 0, ended.stdout + ended.stderr
    found = json.loads(ended.stdout)
    assert found["ok"]
    subjects = {row["subject"] for row in found["rows"]}
    assert "same host, CPU, rank 0 to 1, tcp" in subjects
    assert f"save, kill, recover in {tmp_path / 'run'}" in subjects
    assert list((tmp_path / "run").iterdir()) == []


@pytest.mark.slow
def test_the_command_prints_a_table_and_fails_for_a_folder_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    ended = run("torchrelay", "check", "--folder", str(tmp_path / "file" / "run"))
    assert ended.returncode == 1, ended.stderr
    assert "problem" in ended.stdout and "cannot be written" in ended.stdout
