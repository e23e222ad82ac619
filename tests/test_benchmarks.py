"""The benchmarks run, move the right bits and write a whole record. Seconds are not judged here."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.plot import plot
from benchmarks.workloads import suite

ROOT = Path(__file__).resolve().parent.parent
SECONDS = 200  # a machine that is busy takes long to start the processes

pytestmark = pytest.mark.timeout(SECONDS + 20)


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    out = tmp_path_factory.mktemp("benchmarks") / "small.json"
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", "--small", "--out", str(out)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(out.read_text())
    return found


def test_every_workload_is_there_in_every_mode(result: dict[str, Any]) -> None:
    rows = [(row["workload"], row["mode"]) for row in result["rows"]]
    assert rows == [(w.name, mode) for w in suite(small=True) for mode in w.modes]


def test_both_moved_the_right_bits(result: dict[str, Any]) -> None:
    for row in result["rows"]:
        assert row["torch"]["bit_exact"] and row["torchrelay"]["bit_exact"], row


def test_a_row_tells_what_was_measured(result: dict[str, Any]) -> None:
    repeats = {w.name: w.repeats for w in suite(small=True)}
    for row in result["rows"]:
        for side in (row["torch"], row["torchrelay"]):
            assert len(side["seconds"]) == repeats[row["workload"]]
            assert all(lap > 0 for lap in side["seconds"])
            assert side["sender_bytes"] > 0 and side["sender_messages"] > 0
        assert row["torchrelay"]["sender_bytes"] >= row["state_bytes"] * 0.99
        assert set(row["torchrelay"]["sender_phases"]) >= {"capture", "data"}
        assert set(row["torchrelay"]["receiver_phases"]) >= {"join", "data", "commit"}


def test_bytes_keep_their_bars(result: dict[str, Any]) -> None:
    for row in result["rows"]:
        assert row["passed"] is not False, row
    by_name = {row["workload"]: row for row in result["rows"]}
    assert by_name["views"]["fewer_bytes"] >= 50
    assert by_name["fan-out"]["sent_per_state"] <= 1.1


def test_the_machine_is_described(result: dict[str, Any]) -> None:
    machine = result["machine"]
    keys = {"cores", "cpu", "memory_gib", "kernel", "transparent_hugepages"}
    assert set(machine) == keys | {"python", "torch", "torchrelay"}
    assert machine["cores"] >= 1


def test_a_plot_can_be_made_of_it(result: dict[str, Any], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "group.png"
    assert plot(result, picture)
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here: run it for real")
def test_gpu_benchmark_says_that_it_needs_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["staging"])
    with pytest.raises(SystemExit, match="needs one"):
        importlib.import_module("benchmarks.gpu.staging").main()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_gpu_benchmark_runs_small() -> None:
    command = [sys.executable, "-m", "benchmarks.gpu.staging", "--megabytes", "8", "--repeats", "1"]
    subprocess.run(command, check=True, timeout=110)
