"""The files of a step: ordinary safetensors."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import safetensors
import torch
from safetensors.torch import load_file
from torch import nn

import torchrelay as tr
from tests.support.states import STRIDED_DTYPES, assert_same, bits, storage_of, strided
from torchrelay.planning.stored import stored_tensors

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
    with tr.Checkpointer(
        tmp_path, timeout=30, options=tr.options.CheckpointerOptions(file_bytes=1000)
    ) as there:
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
    sizes = {file.name: file.nbytes for file in record.volumes}
    on_disk = {f.name: f.stat().st_size for f in (tmp_path / "step-0").iterdir()}
    assert on_disk.pop("manifest.json")
    assert sizes == on_disk
    for stored in stored_tensors(record):
        for shard in stored.shards:
            assert shard.start % getattr(torch, stored.dtype).itemsize == 0
