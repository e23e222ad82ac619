"""Exported files byte by byte, and the memory that it takes to write them."""

from __future__ import annotations

import hashlib
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import torchrelay as tr
from tests.support.held_source import HeldSource
from tests.support.hostile import peak, reset_peak
from tests.support.ranks import RankPool, run_ranks
from torchrelay.checkpointer.export import export_hf
from torchrelay.inspection.safetensors_file import write_safetensors
from torchrelay.loading.loader import Loader

Model = dict[str, torch.Tensor]


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    count = int(torch.Size(shape).numel())
    return (torch.arange(count, dtype=torch.float64) * 37 % 251 - 125).to(dtype).view(shape)


def plain() -> Model:
    """Tensors that the step has as they are exported."""
    found = {f"layers.{n}.weight": numbers(16, 8 + n) for n in range(5)}
    found["half"] = numbers(33, dtype=torch.bfloat16)
    found["tied"] = found["layers.1.weight"]
    found["flags"] = numbers(9) > 0
    found["none"] = torch.empty(0, 7)
    found["scalar"] = torch.tensor(2.5, dtype=torch.float64)
    found["turned"] = numbers(6, 10).t()
    found["double complex"] = torch.complex(*numbers(2, 11, dtype=torch.float64))
    found["eighths"] = numbers(13).to(torch.float8_e4m3fn)
    found["parameter"] = torch.nn.Parameter(numbers(3, 3))
    found["count"] = torch.tensor(7)
    return found


def views() -> Model:
    """And tensors that have to be loaded: parts of one memory, and values that are computed."""
    base = numbers(300)
    return {
        **plain(),
        "base": base,
        "low": base[10:200],
        "every": base[::3],
        "wide": numbers(5, 1).expand(5, 4),
        "conjugate": torch.complex(*numbers(2, 7)).conj(),
        "negative": torch.complex(*numbers(2, 7)).conj().imag,
        "conjugate double": torch.complex(*numbers(2, 5, dtype=torch.float64)).conj(),
        "turned complex": torch.complex(*numbers(2, 4, 6, dtype=torch.float64)).t(),
    }


STATES: dict[str, Callable[[], Model]] = {"plain": plain, "views": views}


def digests(folder: Path) -> dict[str, str]:
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()[:16]
        for path in sorted(folder.iterdir())
    }


# As they were when each model was loaded whole before it was written.
EXPORTED = {
    "plain": {"model.safetensors": "e2ae445017b03fd5"},
    "plain, split": {
        "model-00001-of-00002.safetensors": "bcfdd62b4a9ae347",
        "model-00002-of-00002.safetensors": "6b2bc4d5842531ea",
        "model.safetensors.index.json": "6713d239df39c94d",
    },
    "views": {"model.safetensors": "3d66bf26180139a7"},
    "views, split": {
        "model-00001-of-00003.safetensors": "ff9f992634698518",
        "model-00002-of-00003.safetensors": "323c1bfc0275d9da",
        "model-00003-of-00003.safetensors": "7459bdecb1e5d8f7",
        "model.safetensors.index.json": "4d3254110a872760",
    },
}


@pytest.mark.parametrize("name", STATES)
@pytest.mark.parametrize("split", [False, True])
def test_files_have_the_bytes_that_they_always_had(
    name: str, split: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tr.Checkpointer(tmp_path / "run") as held:
        held.save(1, {"model": STATES[name](), "other": 3})
        if name == "plain":
            monkeypatch.setattr(Loader, "load", not_loaded)
        held.export_hf(tmp_path / "hf", shard_bytes=3000 if split else None)
    assert digests(tmp_path / "hf") == EXPORTED[f"{name}, split" if split else name]


def not_loaded(*_: Any) -> None:
    raise AssertionError("a model that the step has as it is exported is not loaded")


@pytest.mark.parametrize("name", STATES)
def test_a_model_in_memory_has_the_same_files(name: str, tmp_path: Path) -> None:
    export_hf(STATES[name](), tmp_path / "hf", 60.0, shard_bytes=3000)
    assert digests(tmp_path / "hf") == EXPORTED[f"{name}, split"]


def test_files_of_other_writers_have_the_same_data(tmp_path: Path) -> None:
    """That of the command, and that of an endpoint, whose header says the step as well."""
    model = {name: tensor.detach() for name, tensor in plain().items() if name != "tied"}
    source, target = HeldSource(model), tmp_path / "model.safetensors"
    write_safetensors(source, source.contents.tensors, target, lambda progress: None)
    assert digests(tmp_path) == EXPORTED["plain"]
    with tr.serve(model, step=1, no_dist=True, timeout=60) as endpoint:
        served = urllib.request.urlopen(f"{endpoint.url}/model.safetensors", timeout=30).read()
    assert data_of(served) == data_of(target.read_bytes())


def data_of(file: bytes) -> bytes:
    return file[8 + int.from_bytes(file[:8], "little") :]


def saved_sharded(rank: int, group: Any, place: str) -> dict[str, str]:
    """Two ranks save a model by rows, or by columns; one of them exports it."""
    mesh = init_device_mesh("cpu", (2,))
    state = {}
    for name, value in plain().items():
        value = value.detach()
        sharded = [Replicate()] if value.dim() < 2 else [Shard(len(name) % 2)]
        state[name] = distribute_tensor(value, mesh, sharded, src_data_rank=None)
    state["tied"] = state["layers.1.weight"]
    with tr.Checkpointer(f"{place}/run", group=group, timeout=60) as held:
        held.save(1, {"model": state})
        if rank == 0:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(Loader, "load", not_loaded)
                held.export_hf(f"{place}/hf", shard_bytes=3000)
        dist.barrier(group)
    return digests(Path(place) / "hf")


def test_a_sharded_model_has_the_same_files(pool2: RankPool, tmp_path: Path) -> None:
    found = pool2.run(saved_sharded, str(tmp_path), timeout=90)
    assert found == [EXPORTED["plain, split"]] * 2


def test_a_damaged_step_is_not_exported_in_part(tmp_path: Path) -> None:
    with tr.Checkpointer(tmp_path / "run") as held:
        for step in (1, 2):
            held.save(step, {"model": {"w": numbers(4000) + step}})
        file = tmp_path / "run" / "step-2" / "model.safetensors"
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(data)
        with pytest.raises(tr.errors.DamagedError):
            held.export_hf(tmp_path / "hf", step=2)
        assert not (tmp_path / "hf").exists()
        with pytest.warns(RuntimeWarning, match="step 2 .* is skipped"):
            held.export_hf(tmp_path / "hf")
    found = load_file(tmp_path / "hf" / "model.safetensors")
    assert torch.equal(found["w"], numbers(4000) + 1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "run"]


def growth(rank: int, group: Any, place: str) -> tuple[int, int]:
    """By how many bytes this process grew at its peak while it exported, and what it wrote."""
    with tr.Checkpointer(f"{place}/small", no_dist=True) as small:
        small.export_hf(f"{place}/hf-small")  # whatever is imported, and made once
    with tr.Checkpointer(f"{place}/run", no_dist=True) as held:
        before = reset_peak()
        held.export_hf(f"{place}/hf")
        after = peak()
    written = sum(path.stat().st_size for path in Path(f"{place}/hf").iterdir())
    return (after - before) << 10, written


def test_an_export_takes_a_few_mebibytes_of_memory(tmp_path: Path) -> None:
    """256 MB in all, half of them in one tensor: neither size is that of the memory."""
    large = {"embedding": torch.ones(32_000, 1000), "scale": torch.ones(1)}
    large |= {f"layers.{n}": torch.full((2000, 2000), float(n)) for n in range(8)}
    for name, model in (("small", plain()), ("run", large)):
        with tr.Checkpointer(tmp_path / name) as held:
            held.save(1, {"model": model})
    [(grown, written)] = run_ranks(growth, 1, str(tmp_path), timeout=120)
    print(f"{grown / 2**20:.1f} MiB for {written} bytes")
    assert written > 256_000_000 - 4096
    assert grown < 32 << 20
