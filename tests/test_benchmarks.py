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

from benchmarks.checkpoint.rows import Bar, Entry, Row
from benchmarks.plot import plot, plot_checkpoint
from benchmarks.workloads import suite

ROOT = Path(__file__).resolve().parent.parent
SECONDS = 200  # a machine that is busy takes long to start the processes

pytestmark = pytest.mark.timeout(SECONDS + 20)


def measured(out: Path, *command: str) -> dict[str, Any]:
    """The record that a benchmark writes."""
    done = subprocess.run(
        [sys.executable, "-m", *command, "--small", "--out", str(out)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(out.read_text())
    return found


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return measured(tmp_path_factory.mktemp("benchmarks") / "small.json", "benchmarks")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    pytest.importorskip("safetensors")
    folder = tmp_path_factory.mktemp("checkpoint")
    command = ("benchmarks", "--only", "checkpoint", "--dir", str(folder))
    return measured(folder / "small.json", *command)


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


CHECKPOINT_ROWS = {
    "save-memory": 5,
    "save-disk": 4,
    "load-warm": 3,
    "load-warm-unverified": 2,
    "load-cold": 4,
    "stall-first": 5,
    "stall": 5,
    "async-total": 4,
    "step": 5,
    "save-memory-2": 3,
    "save-disk-2": 3,
    "load-warm-2": 3,
    "memory": 3,
}


def test_every_row_of_checkpoints_is_there(checkpoint: dict[str, Any]) -> None:
    assert {row["key"]: len(row["entries"]) for row in checkpoint["rows"]} == CHECKPOINT_ROWS
    assert checkpoint["machine"]["cores"] >= 1
    for row in checkpoint["rows"]:
        assert row["state_bytes"] > 1_000_000
        for entry in row["entries"]:
            assert entry["laps"] and all(lap > 0 for lap in entry["laps"]), entry


def test_checkpoints_are_loaded_bit_for_bit(checkpoint: dict[str, Any]) -> None:
    looked = {"load-warm", "load-warm-unverified", "load-cold", "stall-first", "load-warm-2"}
    for row in checkpoint["rows"]:
        for entry in row["entries"]:
            assert entry.get("bit_exact") is not False, (row["key"], entry)
            if row["key"] in looked and entry["name"] != "two-thread copy_":
                assert entry["bit_exact"], (row["key"], entry)


def test_checkpoint_rows_tell_where_the_time_goes(checkpoint: dict[str, Any]) -> None:
    rows = {row["key"]: row for row in checkpoint["rows"]}
    for key, phases in (
        ("save-disk", {"plan", "write", "commit"}),
        ("load-warm", {"plan", "verify", "land", "commit"}),
        ("async-total", {"plan", "stage", "write", "commit"}),
    ):
        ours = next(e for e in rows[key]["entries"] if e["name"] == "torchrelay")
        assert set(ours["phases"]) == phases


def test_checkpoints_can_be_plotted(checkpoint: dict[str, Any], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "checkpoint.png"
    assert plot_checkpoint(checkpoint, picture)
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_bar_is_judged_by_medians() -> None:
    entries = [Entry("stock", [4.0, 2.0, 9.0]), Entry("ours", [1.0, 2.0, 8.0])]
    bars = [
        Bar("ours", "stock", least=2),
        Bar("ours", "stock", most=0.4),
        Bar("ours", most=2.0),
        Bar("ours", "not installed", least=1),
    ]
    found = Row("row", "a row", "GB/s", 100, entries, bars).verdicts()
    assert [(verdict.value, verdict.passed) for verdict in found] == [
        (2.0, True),
        (0.5, False),
        (2.0, True),
    ]


def test_gpu_checkpoint_benchmark_runs_on_the_cpu(tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    found = measured(tmp_path / "gpu.json", "benchmarks.gpu.checkpoint", "--device", "cpu")
    assert {row["kind"] for row in found["rows"]} == {"stall", "save", "load"}
    for row in found["rows"]:
        if row["name"].startswith("torchrelay"):
            assert row.get("exact", row["kind"] == "save"), row


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here: run it for real")
def test_gpu_benchmark_says_that_it_needs_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["staging"])
    with pytest.raises(SystemExit, match="needs one"):
        importlib.import_module("benchmarks.gpu.staging").main()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_gpu_benchmark_runs_small() -> None:
    command = [sys.executable, "-m", "benchmarks.gpu.staging", "--megabytes", "8", "--repeats", "1"]
    subprocess.run(command, check=True, timeout=110)
