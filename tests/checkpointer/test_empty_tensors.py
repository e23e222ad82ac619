"""Tensors without elements are in every file that stands for a model, under their names."""

from __future__ import annotations

import urllib.request
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load, load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import torchrelay as tr
from tests.support.ranks import RankPool
from torchrelay.dcp import Writer


def model() -> dict[str, torch.Tensor]:
    """The first, one between others and the last are empty."""
    return {
        "a.empty": torch.zeros(0, 3),
        "b.weight": torch.arange(6.0).reshape(2, 3),
        "c.none": torch.zeros(2, 0, dtype=torch.float16),
        "d.weight": torch.ones(5, dtype=torch.int64),
        "e.odd": torch.zeros(0, dtype=torch.complex128),  # no dtype of the format
        "z.empty": torch.zeros(0, dtype=torch.bfloat16),
    }


def check(found: dict[str, torch.Tensor]) -> None:
    assert sorted(found) == sorted(model())
    for name, tensor in model().items():
        if tensor.dtype is torch.complex128:
            assert found[name].shape == (0, 16)  # as bytes
        else:
            assert found[name].dtype is tensor.dtype and torch.equal(found[name], tensor), name


@pytest.mark.parametrize("shard_bytes", [None, 40])
def test_exported_files_have_them(tmp_path: Path, shard_bytes: int | None) -> None:
    with tr.Checkpointer(tmp_path / "run") as held:
        held.save(1, {"model": model()})
        names = held.export_hf(tmp_path / "hf", shard_bytes=shard_bytes)
    files = [name for name in names if name.endswith(".safetensors")]
    assert (len(files) > 1) is (shard_bytes is not None)
    check({k: v for name in files for k, v in load_file(tmp_path / "hf" / name).items()})


@pytest.mark.parametrize("root", [True, False])
def test_the_file_of_a_step_has_them(tmp_path: Path, root: bool) -> None:
    with tr.Checkpointer(tmp_path) as held:
        for step in (1, 2):  # the second by the plan of the first
            held.save(step, model() if root else {"model": model(), "step": step})
            check(load_file(tmp_path / f"step-{step}" / "model.safetensors"))
            got = held.load().state
            check_state(got if root else got["model"])
            held.verify(step)
        only = {name: value for name, value in model().items() if not value.numel()}
        held.save(3, {"model": only})
        assert load_file(tmp_path / "step-3" / "model.safetensors").keys() == only.keys()


def check_state(got: dict[str, torch.Tensor]) -> None:
    assert all(torch.equal(got[name], value) for name, value in model().items())
    assert [got[name].dtype for name in model()] == [value.dtype for value in model().values()]


def test_a_plan_of_before_does_not_hide_a_new_one(tmp_path: Path) -> None:
    with tr.Checkpointer(tmp_path) as held:
        for step, name in enumerate(("x", "y")):
            held.save(step, {"model": {"w": torch.ones(2), name: torch.zeros(0)}})
            file = load_file(tmp_path / f"step-{step}" / "model.safetensors")
            assert sorted(file) == sorted(("w", name))


def test_files_of_torchs_own_calls_have_them(tmp_path: Path) -> None:
    dcp.save({"model": model()}, storage_writer=Writer(tmp_path), no_dist=True)
    check(load_file(tmp_path / "step-0" / "model.safetensors"))


def test_the_file_at_an_endpoint_has_them() -> None:
    with tr.serve({"model": model()}, step=1, timeout=60) as endpoint:
        tr.pull(endpoint.url, timeout=60)
        data = urllib.request.urlopen(f"{endpoint.url}/model.safetensors", timeout=30).read()
    check({name.removeprefix("model."): tensor for name, tensor in load(data).items()})


def sharded(rank: int, group: Any, place: str) -> bool:
    mesh = init_device_mesh("cpu", (2,))
    state = {name: distribute_tensor(value, mesh, [Shard(0)]) for name, value in model().items()}
    with tr.Checkpointer(place, group=group, timeout=60) as held:
        held.save(1, {"model": state})
        into = {name: torch.ones_like(value) for name, value in state.items()}
        held.load({"model": into})
        same = [torch.equal(into[name].to_local(), state[name].to_local()) for name in state]
        if rank == 0:
            with tr.Checkpointer(
                place, no_dist=True, options=tr.options.CheckpointerOptions(read_only=True)
            ) as alone:
                alone.export_hf(Path(place) / "hf")
                check_state(alone.load().state["model"])
        dist.barrier(group)
        return all(same)


def test_of_several_ranks(pool2: RankPool, tmp_path: Path) -> None:
    assert pool2.run(sharded, str(tmp_path), timeout=60) == [True, True]
    check(load_file(tmp_path / "hf" / "model.safetensors"))
    found: dict[str, torch.Tensor] = {}
    for file in (tmp_path / "step-1").glob("model*.safetensors"):
        found |= load_file(file)
    assert {"a.empty", "c.none", "e.odd", "z.empty"} <= found.keys()
