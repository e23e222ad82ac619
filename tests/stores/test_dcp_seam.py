"""`stores.dcp.Writer` and `Reader` in torch's own calls, alone and with ranks."""

from __future__ import annotations

import copy
import io
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import torchrelay as tr
from tests.support.ranks import RankPool
from torchrelay import dropin
from torchrelay.record.checkpoint.commit import encode
from torchrelay.record.checkpoint.schema import Blob
from torchrelay.stores.dcp import Reader, Writer

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


def job(seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = torch.nn.Linear(6, 5)
    optim = torch.optim.AdamW(model.parameters())
    model(torch.randn(3, 6)).sum().backward()
    optim.step()
    return {
        "model": dict(model.state_dict()),
        "optim": optim.state_dict(),
        "extra": {"step": seed, "notes": ["a", None, 2.5], "betas": (0.9, seed)},
    }


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def test_stock_calls_write_and_read_this_format(tmp_path: Path) -> None:
    saved, loaded = job(1), job(2)
    dcp.save(saved, storage_writer=Writer(tmp_path), no_dist=True)
    dcp.load(loaded, storage_reader=Reader(tmp_path), no_dist=True)
    assert same(saved, loaded)


def test_saving_again_replaces_the_step_unless_told_not_to(tmp_path: Path) -> None:
    dcp.save(job(1), storage_writer=Writer(tmp_path), no_dist=True)
    dcp.save(job(2), storage_writer=Writer(tmp_path), no_dist=True)
    loaded = job(3)
    dcp.load(loaded, storage_reader=Reader(tmp_path), no_dist=True)
    assert same(loaded, job(2))
    with pytest.raises(CheckpointException):
        dcp.save(job(4), storage_writer=Writer(tmp_path, overwrite=False), no_dist=True)
    dcp.load(loaded, storage_reader=Reader(tmp_path), no_dist=True)
    assert same(loaded, job(2))


def test_a_step_in_the_name_is_a_step_of_the_checkpointer(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "elsewhere")
    dcp.save(job(7), checkpoint_id=tmp_path / "step-7", storage_writer=writer, no_dist=True)
    with tr.Checkpointer(tmp_path) as held:
        assert held.steps() == [7]
        got = held.load().state
        assert same(got["model"], job(7)["model"])
        assert got["extra"] == job(7)["extra"]
        held.save(8, job(8))
    loaded = job(0)
    dcp.load(loaded, storage_reader=Reader(tmp_path), no_dist=True)
    assert same(loaded, job(8))
    reader = Reader(tmp_path)
    dcp.load(loaded, checkpoint_id=tmp_path / "step-7", storage_reader=reader, no_dist=True)
    assert same(loaded, job(7))


def test_reader_converts_values_as_torchs_readers_do(tmp_path: Path) -> None:
    saved = {"w": torch.randn(4, 4)}
    dcp.save(saved, storage_writer=Writer(tmp_path), no_dist=True)
    loaded = {"w": torch.zeros(4, 4, dtype=torch.float64)}
    dcp.load(loaded, storage_reader=Reader(tmp_path), no_dist=True)
    assert torch.equal(loaded["w"], saved["w"].double())


def test_tied_weights_of_a_checkpointer_are_read_by_both_names(tmp_path: Path) -> None:
    weight = torch.randn(3, 3)
    with tr.Checkpointer(tmp_path) as held:
        held.save(1, {"a": weight, "b": weight.view(3, 3)})
    loaded = {"a": torch.zeros(3, 3), "b": torch.zeros(3, 3)}
    dcp.load(loaded, storage_reader=Reader(tmp_path), no_dist=True)
    assert torch.equal(loaded["a"], weight) and torch.equal(loaded["b"], weight)


def test_a_leaf_that_torchs_planners_do_not_know_is_refused_by_name(tmp_path: Path) -> None:
    with tr.Checkpointer(tmp_path) as held:
        held.save(1, {"s": torch.eye(3).to_sparse()})
    with pytest.raises(CheckpointException, match="load it with Checkpointer"):
        dcp.load({"s": 0}, storage_reader=Reader(tmp_path), no_dist=True)


def test_a_flipped_byte_is_found_before_anything_is_written(tmp_path: Path) -> None:
    saved = {"w": torch.randn(64, 64)}
    dcp.save(saved, storage_writer=Writer(tmp_path), no_dist=True)
    file = tmp_path / "step-0" / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-9] ^= 4
    file.write_bytes(data)
    loaded = {"w": torch.zeros(64, 64)}
    with pytest.raises(CheckpointException, match=r"(?s)DamagedError.*at w"):
        dcp.load(loaded, storage_reader=Reader(tmp_path), no_dist=True)
    assert not loaded["w"].any()
    dcp.load(loaded, storage_reader=Reader(tmp_path, verify=False), no_dist=True)
    assert loaded["w"].any()


class Evil:
    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.canary}",)


def test_an_object_that_only_pickle_can_hold_is_not_saved(tmp_path: Path) -> None:
    canary = tmp_path / "ran"
    with pytest.raises(CheckpointException, match="only pickle can hold"):
        dcp.save({"x": Evil(canary)}, storage_writer=Writer(tmp_path / "c"), no_dist=True)
    assert not canary.exists()
    with tr.Checkpointer(tmp_path / "c") as held:
        assert held.steps() == []


class RawSavePlanner(DefaultSavePlanner):
    def transform_object(self, write_item: Any, object: Any) -> Any:
        if isinstance(object, bytes):
            return io.BytesIO(object)
        return super().transform_object(write_item, object)


class RawLoadPlanner(DefaultLoadPlanner):
    def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
        self.state_dict[read_item.dest_index.fqn] = value.getvalue()
        self.original_state_dict[read_item.dest_index.fqn] = value.getvalue()


def test_a_planners_own_bytes_go_to_planners_that_read_them_alone(tmp_path: Path) -> None:
    state = {"raw": b"not a pickle", "w": torch.ones(2)}
    dcp.save(state, storage_writer=Writer(tmp_path), planner=RawSavePlanner(), no_dist=True)
    loaded = {"raw": b"", "w": torch.zeros(2)}
    dcp.load(loaded, storage_reader=Reader(tmp_path), planner=RawLoadPlanner(), no_dist=True)
    assert loaded["raw"] == b"not a pickle" and loaded["w"].all()
    with pytest.raises(CheckpointException, match="would unpickle"):
        dcp.load(loaded, storage_reader=Reader(tmp_path), no_dist=True)


def test_pickled_bytes_put_in_a_file_are_not_unpickled(tmp_path: Path) -> None:
    """A step forged with a right digest: its "raw" bytes are a pickle that runs a command."""
    canary = tmp_path / "ran"
    out = io.BytesIO()
    torch.save(Evil(canary), out, _use_new_zipfile_serialization=False)
    state = {"raw": out.getvalue(), "w": torch.ones(2)}
    writer = Writer(tmp_path / "c")
    dcp.save(state, storage_writer=writer, planner=RawSavePlanner(), no_dist=True)
    for kind in ("raw", "state"):
        record = Reader(tmp_path / "c").record
        blobs = tuple(Blob(b.name, kind, b.file, b.start, b.nbytes) for b in record.blobs)
        forged = type(record)(
            **{**{f: getattr(record, f) for f in record.__struct_fields__}, "blobs": blobs}
        )
        (tmp_path / "c" / "step-0" / "manifest.json").write_bytes(encode(forged))
        with pytest.raises(CheckpointException):
            dcp.load(
                {"raw": b"", "w": torch.zeros(2)},
                storage_reader=Reader(tmp_path / "c"),
                no_dist=True,
            )
    assert not canary.exists()


def test_asynchronous_save_of_torch(tmp_path: Path) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        saved = job(1)
        expected = copy.deepcopy(saved)
        future: Any = dcp.async_save(saved, storage_writer=Writer(tmp_path))
        saved["model"]["weight"].zero_()
        future.result(timeout=60)
        loaded = job(2)
        dcp.load(loaded, storage_reader=Reader(tmp_path))
        assert same(loaded, expected)
    finally:
        dist.destroy_process_group()


def sharded_round_trip(rank: int, group: Any, place: str) -> list[bool]:
    world = dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    torch.manual_seed(0)
    whole = torch.randn(2 * world + 1, 6)
    state = {
        "model": {"w": distribute_tensor(whole, mesh, [Shard(0)]), "b": torch.arange(5.0)},
        "n": 3,
    }
    dcp.save(state, storage_writer=Writer(place))
    found = []
    for placement in (Shard(0), Shard(1), Replicate()):
        into = {
            "model": {
                "w": distribute_tensor(torch.zeros_like(whole), mesh, [placement]),
                "b": torch.zeros(5),
            },
            "n": 0,
        }
        dcp.load(into, storage_reader=Reader(place))
        found.append(torch.equal(into["model"]["w"].full_tensor(), whole) and into["n"] == 3)
    return found


def test_ranks(pool2: RankPool, tmp_path: Path) -> None:
    assert pool2.run(sharded_round_trip, str(tmp_path), timeout=60) == [[True] * 3] * 2
    with tr.Checkpointer(tmp_path) as held:
        torch.manual_seed(0)
        assert torch.equal(held.load().state["model"]["w"], torch.randn(5, 6))


def dropin_round_trip(rank: int, group: Any, place: str) -> bool:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = torch.arange(24.0).view(8, 3)
    held = dropin.Checkpointer(Writer(place), Reader(place), coordinator_rank=1)
    held.save({"w": distribute_tensor(whole, mesh, [Shard(0)])})
    held.async_save({"w": distribute_tensor(whole + 1, mesh, [Shard(0)])}).result(timeout=60)
    into = {"w": distribute_tensor(torch.zeros(8, 3), mesh, [Shard(0)])}
    held.load(into)
    return torch.equal(into["w"].full_tensor(), whole + 1)


def test_dropin_checkpointer_with_these(pool2: RankPool, tmp_path: Path) -> None:
    assert pool2.run(dropin_round_trip, str(tmp_path), timeout=60) == [True, True]
