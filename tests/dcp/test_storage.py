"""`dcp.Writer` and `Reader` in torch's own calls, alone and with ranks."""

from __future__ import annotations

import collections
import copy
import io
import os
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
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
from torchrelay.dcp import Reader, Writer
from torchrelay.record.encoding import encode_at_rest

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
        objects = tuple(msgspec.structs.replace(one, kind=kind) for one in record.objects)
        forged = msgspec.structs.replace(record, objects=objects)
        (tmp_path / "c" / "step-0" / "manifest.json").write_bytes(encode_at_rest(forged))
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


# What torch's callers expect of a storage.


def test_checkpoint_ids_of_unknown_schemes_are_not_ours(tmp_path: Path) -> None:
    for known in (tmp_path, str(tmp_path / "new"), "relative", f"file://{tmp_path}", "s3://b/runs"):
        assert Writer.validate_checkpoint_id(known) and Reader.validate_checkpoint_id(known)
    for unknown in (
        "hdfs://host/runs",
        "mem://x",
        "http://host/x",
        "",
        "s3:/lost/a/slash",
        7,
        None,
    ):
        assert not Writer.validate_checkpoint_id(unknown)  # type: ignore[arg-type]
        assert not Reader.validate_checkpoint_id(unknown)  # type: ignore[arg-type]


def test_a_checkpoint_that_is_there_is_named_as_torch_names_it(tmp_path: Path) -> None:
    dcp.save(job(1), storage_writer=Writer(tmp_path), no_dist=True)
    for _ in range(2):
        writer = Writer(tmp_path, overwrite=False)
        with pytest.raises(CheckpointException, match="Checkpoint already exists"):
            dcp.save(job(2), storage_writer=writer, no_dist=True)
    writer = Writer(tmp_path, overwrite=False)
    with pytest.raises(tr.errors.CheckpointError, match="Checkpoint already exists"):
        dropin.Checkpointer(writer, Reader(tmp_path), no_dist=True).save(job(3))
    loaded = job(0)
    dcp.load(loaded, storage_reader=Reader(tmp_path), no_dist=True)
    assert same(loaded, job(1))


def cached_plans(rank: int, group: Any, root: str) -> list[bool]:
    """Saves whose plans are those of the save before, and one with another plan; each in a step of
    its own, and again in the same one."""
    mesh = init_device_mesh("cpu", (2,))
    found = []

    def state(seed: int, more: bool = False) -> dict[str, Any]:
        whole = torch.arange(12.0).reshape(6, 2) + seed
        other = {"more": torch.full((2,), float(seed))} if more else {}
        return {"w": distribute_tensor(whole, mesh, [Shard(0)]), "step": seed, **other}

    kept = Writer(f"{root}/kept")
    for seed, more in ((1, False), (2, False), (3, True), (4, True), (5, False)):
        for writer in (Writer(f"{root}/step-{seed}"), kept):
            planner = DefaultSavePlanner(enable_plan_caching=True)
            planner._cached_plans_key = f"{writer is kept}"  # type: ignore[attr-defined]
            dcp.save(state(seed, more), storage_writer=writer, planner=planner)
        for place in (f"{root}/step-{seed}", f"{root}/kept"):
            into = state(0, more)
            dcp.load(into, storage_reader=Reader(place))
            found.append(
                torch.equal(into["w"].to_local(), state(seed)["w"].to_local())
                and into["step"] == seed
                and (not more or into["more"].eq(seed).all().item())
            )
    with tr.Checkpointer(root, group=group, timeout=60) as checkpointer:
        found.append(checkpointer.steps() == [1, 2, 3, 4, 5])
    return found


def test_plans_that_are_kept_serve_several_ranks(pool2: RankPool, tmp_path: Path) -> None:
    for found in pool2.run(cached_plans, str(tmp_path), timeout=90):
        assert found == [True] * 11


def plain_objects() -> dict[str, Any]:
    buffer = io.BytesIO(b"bytes")
    buffer.seek(2)
    return {
        "w": torch.ones(2),
        "rng": np.random.RandomState(3).get_state(),
        "array": np.arange(6, dtype=np.float32).reshape(2, 3),
        "scalars": [np.float64(1.5), np.int64(3), np.bool_(True)],
        "buffer": buffer,
        "window": collections.deque([1, 2], maxlen=3),
        "place": Path("a/b"),
    }


def check_objects(got: dict[str, Any]) -> None:
    sent = plain_objects()
    assert [type(value) for value in got.values()] == [type(value) for value in sent.values()]
    name, keys, *rest = got["rng"]
    assert (name, *rest) == (sent["rng"][0], *sent["rng"][2:])
    assert np.array_equal(keys, sent["rng"][1]) and keys.dtype == np.uint32
    assert np.array_equal(got["array"], sent["array"]) and got["array"].dtype == sent["array"].dtype
    assert list(map(type, got["scalars"])) == [np.float64, np.int64, np.bool_]
    assert got["scalars"] == sent["scalars"]
    assert got["buffer"].getvalue() == b"bytes" and got["buffer"].tell() == 2
    assert got["window"] == sent["window"] and got["window"].maxlen == 3
    assert got["place"] == Path("a/b")


def test_arrays_scalars_and_buffers(tmp_path: Path) -> None:
    """As torch's own writer takes them, and `Checkpointer`."""
    dcp.save(plain_objects(), storage_writer=Writer(tmp_path), no_dist=True)
    into = dict.fromkeys(plain_objects(), 0) | {"w": torch.zeros(2), "scalars": [0, 0, 0]}
    dcp.load(into, storage_reader=Reader(tmp_path), no_dist=True)
    check_objects(into)


def test_what_only_pickle_can_hold_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(CheckpointException, match=r"inner\.odd"):
        dcp.save({"inner": {"odd": object()}}, storage_writer=Writer(tmp_path), no_dist=True)
