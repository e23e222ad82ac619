"""`export_hf`: what Hugging Face loaders look for, from steps of one process and of several."""

from __future__ import annotations

import errno
import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import torchrelay as tr
from tests.support.interrupts import heeding_ctrl_c, press_ctrl_c
from tests.support.ranks import RankPool
from torchrelay.stores.local.draft import LocalSink


def model() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    found = {f"layers.{n}.weight": torch.randn(64, 32) for n in range(6)}
    found["norm.weight"] = torch.randn(32, dtype=torch.bfloat16)
    return found


def check_index(folder: Path, names: list[str]) -> None:
    """Each tensor is in the file that the index says, and in no other."""
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    files = [name for name in names if name.endswith(".safetensors")]
    assert len(files) > 1 and set(index["weight_map"].values()) == set(files)
    assert files == [f"model-{n + 1:05}-of-{len(files):05}.safetensors" for n in range(len(files))]
    expected = model()
    seen = {}
    for name in files:
        for key, tensor in load_file(folder / name).items():
            assert index["weight_map"][key] == name
            seen[key] = tensor
        with safe_open(folder / name, framework="pt") as opened:
            assert opened.metadata() == {"format": "pt"}
    assert seen.keys() == expected.keys()
    assert all(torch.equal(seen[key], tensor) for key, tensor in expected.items())
    total = sum(tensor.nbytes for tensor in expected.values())
    assert index["metadata"]["total_size"] == total


def test_a_small_model_is_one_file(tmp_path: Path) -> None:
    with tr.Checkpointer(tmp_path / "run") as held:
        held.save(1, {"model": model(), "step": 1})
        assert held.export_hf(tmp_path / "hf") == ["model.safetensors"]
    loaded = load_file(tmp_path / "hf" / "model.safetensors")
    assert all(torch.equal(loaded[key], tensor) for key, tensor in model().items())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "run"]


def test_a_large_one_is_split_with_an_index(tmp_path: Path) -> None:
    with tr.Checkpointer(tmp_path / "run") as held:
        held.save(1, {"model": model()})
        names = held.export_hf(tmp_path / "hf", shard_bytes=20_000)
    check_index(tmp_path / "hf", names)


def test_a_state_that_is_the_model_and_tied_weights(tmp_path: Path) -> None:
    tied = model()
    tied["head.weight"] = tied["layers.0.weight"]
    with tr.Checkpointer(tmp_path / "run") as held:
        held.save(1, tied)
        held.export_hf(tmp_path / "hf", key=None)
    assert load_file(tmp_path / "hf" / "model.safetensors").keys() == model().keys()


def test_what_cannot_be_exported_leaves_nothing(tmp_path: Path) -> None:
    with tr.Checkpointer(tmp_path / "run") as held:
        held.save(1, {"model": {"w": torch.ones(2), "s": torch.eye(2).to_sparse()}})
        with pytest.raises(tr.errors.MismatchError, match="not a plain tensor"):
            held.export_hf(tmp_path / "hf")
        with pytest.raises(tr.errors.MismatchError):
            held.export_hf(tmp_path / "hf", key="elsewhere")
        (tmp_path / "full").mkdir()
        (tmp_path / "full" / "file").write_text("mine")
        with pytest.raises(tr.errors.UsageError, match="not overwritten"):
            held.export_hf(tmp_path / "full")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["full", "run"]


def sharded(rank: int, group: Any, place: str) -> list[str]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    state = {name: distribute_tensor(whole, mesh, [Shard(0)]) for name, whole in model().items()}
    with tr.Checkpointer(f"{place}/run", timeout=60) as held:
        held.save(1, {"model": state})
        # One rank of the group does it by itself.
        return held.export_hf(f"{place}/hf", shard_bytes=20_000) if rank == 1 else []


def test_of_a_sharded_step_by_one_rank(pool2: RankPool, tmp_path: Path) -> None:
    _, names = pool2.run(sharded, str(tmp_path), timeout=60)
    check_index(tmp_path / "hf", names)


def test_a_target_that_cannot_be_written_is_told_and_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(sink: LocalSink) -> None:
        raise OSError(errno.ENOSPC, "no space left")

    (tmp_path / "file").touch()
    with tr.Checkpointer(tmp_path / "steps", no_dist=True) as checkpointer:
        checkpointer.save(1, {"model": model()})
        with pytest.raises(tr.errors.CheckpointError, match="cannot export"):
            checkpointer.export_hf(tmp_path / "file" / "hf")
        monkeypatch.setattr(LocalSink, "finish", full)
        with pytest.raises(tr.errors.CheckpointError, match="no space left"):
            checkpointer.export_hf(tmp_path / "hf")
        opened = [str(link.resolve()) for link in Path("/proc/self/fd").iterdir()]
    assert not [path for path in opened if "hf.tmp" in path]
    assert {path.name for path in tmp_path.iterdir()} == {"file", "steps"}


def test_an_export_that_nobody_waits_for_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Ctrl-C while a piece is written: what was written goes, and nothing takes the name later.
    write, once, told = LocalSink.write, threading.Lock(), threading.Event()

    def interrupted(sink: Any, position: int, buffers: Any) -> None:
        write(sink, position, buffers)
        if once.acquire(blocking=False):
            press_ctrl_c()
        assert told.wait(20)

    with tr.Checkpointer(tmp_path / "steps", no_dist=True) as checkpointer:
        checkpointer.save(1, {"model": model()})
        monkeypatch.setattr(LocalSink, "write", interrupted)
        with heeding_ctrl_c(), pytest.raises(KeyboardInterrupt):
            checkpointer.export_hf(tmp_path / "hf")
        told.set()
        deadline = time.monotonic() + 20  # for the thread that was left behind
        while list(tmp_path.glob("hf.tmp-*")):
            assert time.monotonic() < deadline
            time.sleep(0.01)
    assert [path.name for path in tmp_path.iterdir()] == ["steps"]
