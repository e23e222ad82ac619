"""The benchmarks run, move the right bits and write a whole record. Seconds are not judged here."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.checkpoint.background import FAILED
from benchmarks.checkpoint.rows import Bar, Entry, Row
from benchmarks.plot import plot, plot_checkpoint
from benchmarks.rows import NAMES
from benchmarks.workloads import suite
from tests.support.forks import run_program
from torchrelay.demo.job import leaves

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 200  # a machine that is busy takes long to start the processes

pytestmark = pytest.mark.timeout(SECONDS + 20)


def measured(out: Path, *command: str) -> dict[str, Any]:
    """The record that a benchmark writes."""
    module, *words = command
    if module == "benchmarks":
        module = "benchmarks.__main__"
    words += ["--small", "--out", str(out)]
    if module.startswith("benchmarks.gpu"):  # a child of a fork cannot fork again with a GPU
        subprocess.run(
            [sys.executable, "-m", module, *words], cwd=ROOT, check=True, timeout=SECONDS
        )
    else:
        done = run_program(module, *words, folder=ROOT, seconds=SECONDS)
        assert done.code == 0, done.output
    found: dict[str, Any] = json.loads(out.read_text())
    return found


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    out = tmp_path_factory.mktemp("benchmarks") / "small.json"
    return measured(out, "benchmarks", "--cold", "0")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    pytest.importorskip("safetensors")
    folder = tmp_path_factory.mktemp("checkpoint")
    command = ("benchmarks", "--only", "checkpoint", "--dir", str(folder))
    return measured(folder / "small.json", *command)


def test_every_case_of_every_workload_is_there(result: dict[str, Any]) -> None:
    missing = set(result["skipped"])
    expected = []
    for workload in suite(small=True):
        for case in sorted(workload.cases, key=lambda case: case.ours.fresh):
            if NAMES[case.theirs.by] not in missing:
                expected.append((workload.name, "warm" if case.ours.fresh else "in use", case))
        expected += [(workload.name, "cold", None)] * bool(workload.cold_samples)
    assert len(result["rows"]) == len(expected)
    for row, (name, memory, case) in zip(result["rows"], expected, strict=True):
        assert (row["workload"], row["memory"]) == (name, memory)
        if case is not None:
            assert row["against"] == NAMES[case.theirs.by]
            assert row["mode"].startswith(case.ours.mode)
            assert row["asked"] == asdict(case.ours.setup)


def test_all_moved_the_right_bits(result: dict[str, Any]) -> None:
    for row in result["rows"]:
        assert row["theirs"]["bit_exact"] and row["torchrelay"]["bit_exact"], row


def test_a_row_tells_what_was_measured(result: dict[str, Any]) -> None:
    workloads = {w.name: w for w in suite(small=True)}
    for row in result["rows"]:
        workload = workloads[row["workload"]]
        laps = workload.cold_samples if row["memory"] == "cold" else workload.repeats
        for side in (row["theirs"], row["torchrelay"]):
            assert len(side["seconds"]) == laps
            assert all(lap > 0 for lap in side["seconds"])
        assert row["torchrelay"]["sender_bytes"] >= row["state_bytes"] * 0.99
        assert set(row["torchrelay"]["sender_phases"]) >= {"capture", "data"}
        assert set(row["torchrelay"]["receiver_phases"]) >= {"join", "data", "commit"}
        assert row["route"] and row["asked"]["route"] in (None, row["route"])
        assert row["speed_bar"] is None  # seconds of a small run mean nothing


def test_cold_rows_have_evidence_of_the_condition(result: dict[str, Any]) -> None:
    for row in result["rows"]:
        assert ("evidence" in row) == (row["memory"] == "cold")
        for sample in row.get("evidence", []):
            for rates in (
                sample[f"populate_gb_s_{when}"] for when in ("just_freed", "after_pause")
            ):
                assert set(rates) == {"huge", "4K"}
                assert all(rate is None or rate > 0 for rate in rates.values())


def test_bytes_keep_their_bars(result: dict[str, Any]) -> None:
    for row in result["rows"]:
        assert row["passed"] is not False, row
    views = [row for row in result["rows"] if row["workload"] == "views"]
    chained = [row for row in result["rows"] if "sent <=" in row["bar"]]
    assert views and all(row["fewer_bytes"] >= 50 for row in views)
    assert chained and all(row["sent_per_state"] <= 1.1 for row in chained)


def test_the_machine_is_described(result: dict[str, Any]) -> None:
    machine = result["machine"]
    keys = {"cores", "cpu", "memory_gib", "kernel", "transparent_hugepages"}
    assert set(machine) == keys | {"python", "torch", "torchrelay", "commit"}
    assert machine["cores"] >= 1


def test_a_plot_can_be_made_of_it(result: dict[str, Any], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "live.png"
    assert plot(result, picture)
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_the_transformer_is_as_large_as_it_says() -> None:
    with torch.device("meta"):
        state = next(w for w in suite(small=False) if w.name == "transformer").make()
    tensors = [leaf for _, leaf in leaves(state) if isinstance(leaf, torch.Tensor)]
    assert 870 <= len(tensors) <= 900
    assert sum(tensor.nbytes for tensor in tensors) == pytest.approx(4.1e9, rel=0.01)


CHECKPOINT_ROWS = {
    "save-memory": 6,
    "load-memory": 3,
    "save-disk": 4,
    "load-warm": 3,
    "load-warm-unverified": 2,
    "load-cold": 4,
    "stall-first": 4,
    "stall": 4,
    "async-total": 3,
    "step": 4,
    "save-memory-2": 3,
    "save-disk-2": 3,
    "load-warm-2": 3,
    "memory": 3,
}


def test_every_row_of_checkpoints_is_there(checkpoint: dict[str, Any]) -> None:
    found = {
        row["key"]: len(row["entries"]) + row["note"].count(FAILED) for row in checkpoint["rows"]
    }
    assert found == CHECKPOINT_ROWS
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


@pytest.mark.slow
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


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here: run it for real")
@pytest.mark.parametrize("name", ["live", "kernels", "connections", "loaders", "weights"])
def test_gpu_benchmarks_write_nothing_without_a_gpu(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.json"
    monkeypatch.setattr("sys.argv", [name, "--out", str(out)])
    assert importlib.import_module(f"benchmarks.gpu.{name}").main() == 0
    assert "no GPU" in capsys.readouterr().out
    assert not out.exists()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_gpu_kernels_and_connections_run_small(tmp_path: Path) -> None:
    kernels = measured(tmp_path / "kernels.json", "benchmarks.gpu.kernels")
    assert kernels["exact"]
    assert all(row["gb_s"] > 0 for row in kernels["rows"])
    rows = measured(tmp_path / "connections.json", "benchmarks.gpu.connections")["rows"]
    assert rows and all(row["exact"] and row["verified"] for row in rows)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_gpu_weights_run_small(tmp_path: Path) -> None:
    found = measured(tmp_path / "weights.json", "benchmarks.gpu.weights")
    assert found["exact"] and all(row["gb_s"] > 0 for row in found["rows"])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_gpu_benchmark_runs_small() -> None:
    command = [sys.executable, "-m", "benchmarks.gpu.staging", "--megabytes", "8", "--repeats", "1"]
    subprocess.run(command, check=True, timeout=110)


@pytest.mark.slow  # the ranks of each commit are interpreters of their own
def test_two_commits_run_side_by_side(tmp_path: Path) -> None:
    """Here the tree beside itself: what is measured is the same on either side."""
    out = tmp_path / "commits.json"
    words = (".", ".", "--small", "--laps", "1", "--only", "20,000 x 4 KB")
    place = ("--memory", str(tmp_path), "--out", str(out))
    done = run_program("benchmarks.commits", *words, *place, folder=ROOT, seconds=100)
    assert done.code == 0, done.output
    rows = json.loads(out.read_text())["rows"]
    assert len(rows) == 9
    assert all(row["speed"] > 0 and len(row["seconds"][0]) == 1 for row in rows)


def test_resharding_benchmark_runs_small(tmp_path: Path) -> None:
    out = tmp_path / "resharding.json"
    words = ("--small", "--laps", "1", "--out", str(out))
    done = run_program("benchmarks.resharding", *words, folder=ROOT, seconds=100)
    assert done.code == 0, done.output
    rows = json.loads(out.read_text())["rows"]
    assert [row["case"] for row in rows] == ["live, memory", "live, tcp", "dcp in memory"]
    assert all(row["exact"] and row["seconds"] > 0 for row in rows)


def test_endpoint_benchmark_runs_small(tmp_path: Path) -> None:
    if not (Path(sys.prefix) / "torchft-src").is_dir() and find_spec("torchft") is None:
        pytest.skip("torchft is not installed, and its wheel could not be fetched")
    out = tmp_path / "endpoint.json"
    words = ("--small", "--laps", "1", "--out", str(out))
    done = run_program("benchmarks.endpoint", *words, folder=ROOT, seconds=100)
    assert done.code == 0, done.output
    found = json.loads(out.read_text())
    assert [len(state["rows"]) for state in found["states"]] == [7, 7]
    assert all(row["exact"] for state in found["states"] for row in state["rows"])
    assert found["trainer"]["ratio"] > 0 and found["trainer"]["published"] > 0


@pytest.mark.slow
def test_keeper_benchmark_runs_small(tmp_path: Path) -> None:
    out = tmp_path / "keeper.json"
    done = run_program(
        "benchmarks.keeper", "--small", "--out", str(out), folder=ROOT, seconds=SECONDS
    )
    assert done.code == 0, done.output
    found = json.loads(out.read_text())
    assert [row["case"] for row in found["recovery"]["rows"]] == [
        "keeper",
        "live peer",
        "dcp.load, cold",
        "dcp.load, hot",
        "PGTransport",
    ]
    assert all(row["exact"] and row["seconds"] > 0 for row in found["recovery"]["rows"])
    for row in found["staging"]["rows"]:
        assert row["ratio"] > 0 and row["copied_bytes"] > 0
        assert row["keeper_bytes"] < (row["steps_in_memory"] + 0.1) * row["bytes"]
    assert found["growth"]["exact"] and len(found["growth"]["held"]) >= 3


def test_retention_benchmark_runs_small(tmp_path: Path) -> None:
    found = measured(tmp_path / "retention.json", "benchmarks.checkpoint.retention")
    assert [row["retained"] for row in found["rows"]] == [2, 6] and found["ratio"] > 0


def test_mirror_benchmark_runs_small(tmp_path: Path) -> None:
    pytest.importorskip("obstore")
    found = measured(tmp_path / "mirror.json", "benchmarks.checkpoint.mirror")
    assert [row["mirror"].partition(" ")[0] for row in found["rows"]] == [
        "none",
        "directory",
        "bucket",
    ]
    assert all(row["stall_s"] > 0 and row["commit_s"] > 0 for row in found["rows"])


def test_replicas_benchmark_runs_small(tmp_path: Path) -> None:
    found = measured(tmp_path / "replicas.json", "benchmarks.replicas")
    assert [row["tensors"] for row in found["rows"]] == [32, 200]
    assert all(row["hash_s"] > 0 and row["ratio"] > 0 for row in found["rows"])


def test_scale_benchmark_runs_small(tmp_path: Path) -> None:
    out = tmp_path / "scale.json"
    words = ["--ranks", "4,8", "--tensors", "40", "--looks", "2", "--out", str(out)]
    done = run_program("benchmarks.scale", *words, folder=ROOT, seconds=100)
    assert done.code == 0, done.output
    found = json.loads(out.read_text())["ranks"]
    assert set(found) == {"4", "8"} and found["8"]["commit record, bytes"] > 1000


def test_frameworks_benchmark_runs_small(tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    out = tmp_path / "frameworks.json"
    words = ("--only", "accelerate", "--megabytes", "12", "--laps", "1", "--out", str(out))
    done = run_program("benchmarks.frameworks", *words, folder=ROOT, seconds=100)
    assert done.code == 0, done.output
    found = json.loads(out.read_text())["frameworks"]["accelerate"]
    assert found["ratio"] > 0 and len(found["torchrelay"]) == 1


@pytest.mark.parametrize("route", ["memory", "tcp"])
def test_the_timeline_of_a_transfer(route: str) -> None:
    words = ("--small", "--runs", "2", "--route", route)
    done = run_program("benchmarks.timeline", *words, folder=ROOT, seconds=SECONDS)
    assert done.code == 0, done.output
    steps = ["begin", "-> Join", "-> Offer", "-> Accept", "-> Fetched", "-> Confirmed", " end"]
    found = [done.output.find(step) for step in steps]
    assert -1 not in found and found == sorted(found), done.output


def test_reuse_benchmark_runs_small(tmp_path: Path) -> None:
    out = tmp_path / "reuse.json"
    found = measured(out, "benchmarks.reuse", "--dir", str(tmp_path))
    assert out.with_suffix(".png").exists() == bool(find_spec("matplotlib"))
    for row in found["rows"]:
        assert row["exact"]
        if "all" not in row["case"]:
            assert row["written_of_trained"] < 1.1, row["case"]
            assert min(row["written"]["all"]) > 5 * max(row["written"]["reuse"][1:])
