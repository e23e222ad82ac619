"""The files of a step: ordinary safetensors, by whatever planner they were laid out."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner

import torchrelay as tr
from tests.support.states import STRIDED_DTYPES, assert_same, bits, storage_of, strided

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


@pytest.fixture
def there(tmp_path: Path) -> Iterator[tr.Checkpointer]:
    with tr.Checkpointer(tmp_path, timeout=30) as made:
        yield made


def model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    layers = nn.ModuleList(nn.Linear(16, 16, dtype=torch.bfloat16) for _ in range(6))
    return nn.ModuleDict({"model": layers, "head": nn.Linear(16, 3), "norm": nn.BatchNorm1d(3)})


def same(mine: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return set(mine) == set(other) and all(
        mine[key].dtype == other[key].dtype
        and mine[key].shape == other[key].shape
        and bits(mine[key]) == bits(other[key])
        for key in mine
    )


@pytest.mark.parametrize("shape", ["module", "flat", "under model", "beside others"])
def test_a_model_is_an_ordinary_file(there: tr.Checkpointer, tmp_path: Path, shape: str) -> None:
    """Also one whose own names start with "model.", as those of transformers do."""
    made = model()
    state = {
        "module": made,
        "flat": made.state_dict(),
        "under model": {"model": made},
        "beside others": {"model": made.state_dict(), "epoch": 3, "rng": torch.get_rng_state()},
    }[shape]
    there.save(5, state)
    file = tmp_path / "step-5" / "model.safetensors"
    assert same(load_file(file), made.state_dict())
    with safetensors.safe_open(file, framework="pt") as opened:
        assert opened.metadata() == {"format": "pt"}
        assert set(opened.keys()) == set(made.state_dict())
        part = opened.get_slice("head.weight")[1:2]
        assert torch.equal(part, made.state_dict()["head.weight"][1:2])


@pytest.mark.parametrize("flat", [True, False])
def test_a_model_in_several_files(tmp_path: Path, flat: bool) -> None:
    """Laid out as transformers reads it: an index beside numbered files."""
    made = model()
    whole = dict(made.state_dict())
    with tr.Checkpointer(tmp_path, file_bytes=1000, timeout=30) as there:
        there.save(0, whole if flat else {"model": made, "other": {"x": torch.ones(3)}})
        index = json.loads((tmp_path / "step-0" / "model.safetensors.index.json").read_text())
        files = sorted(tmp_path.glob("step-0/model-*.safetensors"))
        assert len(files) > 2
        count = f"{len(files):05}"
        assert [f.name for f in files] == [
            f"model-{n:05}-of-{count}.safetensors" for n in range(1, len(files) + 1)
        ]
        assert index["metadata"]["total_size"] == sum(x.nbytes for x in whole.values())
        assert set(index["weight_map"]) == set(whole)
        found = {}
        for file in files:
            with safetensors.safe_open(file, framework="pt") as opened:
                assert opened.metadata() == {"format": "pt"}
                for key in opened.keys():  # noqa: SIM118 - not a dict
                    assert index["weight_map"][key] == file.name
                    found[key] = opened.get_tensor(key)
        assert same(found, whole)
        got = there.load().state
        assert same(got if flat else got["model"], whole)
        there.verify(0)


def test_names_with_odd_characters(there: tr.Checkpointer, tmp_path: Path) -> None:
    keys = ["a b", "ü.ß", "/etc/passwd", "..", "\n", "__metadata__", "x@0,0", '"', "\\", "", "😀"]
    state = {key: torch.full((2,), float(n)) for n, key in enumerate(keys)}
    nested = {top: {k: v.clone() for k, v in state.items()} for top in ["top", "../up", "1", "con"]}
    there.save(0, state)
    there.save(1, nested)
    assert_same(state, there.load(step=0).state)
    assert_same(nested, there.load(step=1).state)
    found = load_file(tmp_path / "step-0" / "model.safetensors")
    assert len(found) == len(keys)
    for key in set(keys) - {"", "__metadata__"}:
        assert torch.equal(found[key], state[key]), key
    names = {file.name for file in tmp_path.rglob("*") if file.is_file()}
    assert names == {
        *("manifest.json", "model.safetensors"),
        *("0.safetensors", "top.safetensors", "con.safetensors"),
    }


@pytest.mark.parametrize("dtype", STRIDED_DTYPES, ids=str)
def test_dtypes(there: tr.Checkpointer, tmp_path: Path, dtype: torch.dtype) -> None:
    """What safetensors has no name for is kept as its bytes."""
    tensor = strided(storage_of(6 * dtype.itemsize, 1), dtype, 0, (2, 3), (3, 1))
    there.save(0, {"w": tensor})
    found = load_file(tmp_path / "step-0" / "model.safetensors")["w"]
    assert found.shape[:2] == (2, 3)
    assert bits(found) == bits(tensor)
    assert found.dtype == dtype or found.dtype in (torch.uint8, torch.int16)


def test_every_file_is_aligned_and_accounted_for(there: tr.Checkpointer, tmp_path: Path) -> None:
    state = {
        "a": {"x": torch.ones(3, dtype=torch.uint8), "y": torch.ones(5, dtype=torch.float64)},
        "b": {"z": torch.ones(1, dtype=torch.int16), "w": torch.tensor(1.0)},
        "c": torch.ones(2),
    }
    there.save(0, state)
    record = there.record(0)
    sizes = {file.name: file.nbytes for file in record.files}
    on_disk = {f.name: f.stat().st_size for f in (tmp_path / "step-0").iterdir()}
    assert on_disk.pop("manifest.json")
    assert sizes == on_disk
    for stored in record.tensors:
        for shard in stored.shards:
            assert shard.start % getattr(torch, stored.dtype).itemsize == 0


# Planners of torch, and of the user's own.


class RecordingSave(DefaultSavePlanner):
    def __init__(self) -> None:
        super().__init__()
        self.asked: list[str] = []

    def set_up_planner(self, state_dict: Any, *args: Any, **kwargs: Any) -> None:
        self.asked.append("set up")
        self.names = list(state_dict)
        super().set_up_planner(state_dict, *args, **kwargs)

    def create_global_plan(self, all_plans: Any) -> Any:
        self.asked.append("global plan")
        return super().create_global_plan(all_plans)

    def resolve_data(self, write_item: Any) -> Any:
        self.asked.append(write_item.index.fqn)
        return super().resolve_data(write_item)


class RecordingLoad(DefaultLoadPlanner):
    def __init__(self) -> None:
        super().__init__()
        self.asked: list[str] = []

    def resolve_tensor(self, read_item: Any) -> Any:
        self.asked.append(read_item.dest_index.fqn)
        return super().resolve_tensor(read_item)

    def commit_tensor(self, read_item: Any, tensor: torch.Tensor) -> None:
        self.asked.append(f"commit {read_item.dest_index.fqn} {tensor.sum().item():g}")


def state_of(value: float) -> dict[str, Any]:
    return {"model": {"w": torch.full((2, 3), value), "n": torch.tensor([7])}, "epoch": 2}


def test_planners_are_asked(tmp_path: Path) -> None:
    save, load = RecordingSave(), RecordingLoad()
    with tr.Checkpointer(tmp_path, planner=(save, load), timeout=30) as there:
        there.save(0, state_of(1))
        assert save.names == ["model.w", "model.n"]
        assert save.asked == ["set up", "global plan", "model.w", "model.n"]
        there.save_async(1, state_of(2)).result(30)
        assert save.asked[4:] == save.asked[:4]
        into = state_of(0)
        there.load(into=into)
        assert_same(state_of(2), into)
        assert load.asked == ["model.w", "model.n", "commit model.w 12", "commit model.n 7"]
    with pytest.raises(tr.UsageError, match="SavePlanner"):
        tr.Checkpointer(tmp_path, planner=(save, RecordingSave()))
    with pytest.raises(tr.UsageError, match="SavePlanner"):
        tr.Checkpointer(tmp_path, planner="default")  # type: ignore[arg-type]


class Halving(DefaultSavePlanner):
    """Keeps floating point tensors as bfloat16."""

    def set_up_planner(self, state_dict: Any, *args: Any, **kwargs: Any) -> None:
        cast = {k: v.bfloat16() if v.is_floating_point() else v for k, v in state_dict.items()}
        super().set_up_planner(cast, *args, **kwargs)


class Widening(DefaultLoadPlanner):
    """Nothing but torch's planner: its destinations have a dtype of their own."""


def test_a_planner_that_converts(tmp_path: Path) -> None:
    torch.manual_seed(0)
    wide = {"model": {"w": torch.randn(4, 5), "t": torch.randn(3, 2).t(), "n": torch.ones(2).int()}}
    narrow = {"model": {k: v.bfloat16() if k != "n" else v for k, v in wide["model"].items()}}
    with tr.Checkpointer(tmp_path, planner=Halving(), timeout=30) as there:
        there.save(0, wide)
        assert same(load_file(tmp_path / "step-0" / "model.safetensors"), narrow["model"])
        got = there.load().state
        assert same(got["model"], narrow["model"])
        with pytest.raises(tr.MismatchError, match="dtype"):
            there.load(into=wide)
        there.load(into=got)
    into = {"model": {k: torch.zeros_like(v) for k, v in wide["model"].items()}}
    with tr.Checkpointer(tmp_path, planner=Widening(), timeout=30) as there:
        there.load(into=into)
    for key, value in into["model"].items():
        assert torch.equal(value, narrow["model"][key].to(value.dtype)), key


class Renaming(DefaultSavePlanner):
    def set_up_planner(self, state_dict: Any, *args: Any, **kwargs: Any) -> None:
        named = {key.replace("model.", "model.base."): v for key, v in state_dict.items()}
        super().set_up_planner(named, *args, **kwargs)


def test_a_planner_that_renames(tmp_path: Path) -> None:
    """Other names in the files; the state knows its tensors by their paths all the same."""
    with tr.Checkpointer(tmp_path, planner=Renaming(), timeout=30) as there:
        there.save(0, state_of(3))
        there.save_async(1, state_of(4)).result(30)
    assert {tensor.name for tensor in there.record(0).tensors} == {"model.base.w", "model.base.n"}
    with tr.Checkpointer(tmp_path, timeout=30) as there:
        assert_same(state_of(3), there.load(step=0).state)
        into = state_of(0)
        assert_same(state_of(4), there.load(into=into).state)


class Forgetful(DefaultSavePlanner):
    def set_up_planner(self, state_dict: Any, *args: Any, **kwargs: Any) -> None:
        kept = {key: value for key, value in state_dict.items() if "w" not in key}
        super().set_up_planner(kept, *args, **kwargs)


def test_a_planner_that_leaves_tensors_out(tmp_path: Path) -> None:
    """No step is committed that could not be loaded."""
    with tr.Checkpointer(tmp_path, planner=Forgetful(), timeout=30) as there:
        with pytest.raises(tr.CheckpointError, match="left a tensor out") as caught:
            there.save(0, state_of(1))
        assert caught.value.path == "model.w"
        assert there.steps() == []
        pending = there.save_async(0, state_of(1))
        assert isinstance(pending.exception(30), tr.CheckpointError)
        assert there.steps() == []
    assert [file for file in tmp_path.rglob("*") if file.is_file()] == []
