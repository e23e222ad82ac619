"""`benchmarks.gpu.routes`: its CPU cases here, its GPU cases where there is one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.forks import run_program

ROOT = Path(__file__).resolve().parents[3]
SECONDS = 320  # the cases take about 15; beside fifteen workers of a suite they took over 100

pytestmark = pytest.mark.timeout(SECONDS + 20)


def played(out: Path, *arguments: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.gpu.routes", "--out", str(out), *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(out.read_text())
    return found


@pytest.mark.slow  # what it checks on the CPU, the tests of the relay check too
def test_every_case_that_needs_no_gpu(tmp_path: Path) -> None:
    found = played(tmp_path / "routes.json", "--device", "cpu", "--tiny", "300")
    ran = [row for row in found["rows"] if row["result"] != "skipped"]
    assert {row["result"] for row in ran} == {"ok"}
    assert {row["taken"] for row in ran} >= {"memory", "tcp"}
    assert len(ran) > 50 and found["device"] == "cpu" and found["machine"]["torch"]
    left = [row for row in found["rows"] if row["result"] == "skipped"]
    assert left and all(row["reason"] == "needs a GPU" for row in left)


def test_a_case_that_fails_is_told_and_hides_no_other(tmp_path: Path) -> None:
    """A case that cannot pass: a route that this machine does not have."""
    script = tmp_path / "two_cases.py"
    script.write_text(
        "import sys; from benchmarks.gpu import routes, scenes\n"
        "run = routes.together(scenes.verified, 'cuda_ipc', True, False)\n"
        "bad = routes.Case('bad', 'cuda_ipc', run)\n"
        "good = list(routes._checks(['tcp']))[0]\n"
        "routes.every_case = lambda device, tiny: [bad, good]\n"
        "if __name__ == '__main__':\n    sys.exit(routes.main())"
    )
    out = tmp_path / "routes.json"
    words = ("--device", "cpu", "--out", str(out))
    done = run_program(str(script), *words, folder=ROOT, seconds=SECONDS)
    assert done.code == 1, done.output
    bad, good = json.loads(out.read_text())["rows"]
    assert bad["result"] == "FAILED" and "RouteError" in bad["reason"]
    assert good["result"] == "ok"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here: run it where there is one")
def test_every_case_on_a_gpu(tmp_path: Path) -> None:
    found = played(tmp_path / "routes.json")
    assert {row["result"] for row in found["rows"]} == {"ok"}
