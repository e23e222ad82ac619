"""`Checkpointer` does what torch's `_Checkpointer` says it does, on one process and on many."""

from __future__ import annotations

import inspect
import logging
import pickle
import threading
import time
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    FileSystemReader,
    FileSystemWriter,
)
from torch.distributed.checkpoint._checkpointer import _Checkpointer as Stock
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import _FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from tests.support.ranks import RankPool
from torchrelay.dropin import Checkpointer
from torchrelay.dropin.stock_dcp import read_stock
from torchrelay.errors import CheckpointError, UsageError

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


class SlowWriter(FileSystemWriter):
    """Writes when let, and knows how many wrote at once."""

    def __init__(self, path: Any, go: threading.Event | None = None) -> None:
        super().__init__(path)
        self.go = go
        self.entered = threading.Event()
        self.at_once = self.most = 0

    def write_data(self, plan: Any, planner: Any) -> Any:
        self.at_once += 1
        self.most = max(self.most, self.at_once)
        self.entered.set()
        try:
            if self.go is not None and not self.go.wait(20):
                raise TimeoutError("the test never let it write")
            return super().write_data(plan, planner)
        finally:
            self.at_once -= 1


class BadWriter(FileSystemWriter):
    """Fails to write while `faults` lasts."""

    def __init__(self, path: Any, *faults: BaseException) -> None:
        super().__init__(path)
        self.faults = list(faults)

    def write_data(self, plan: Any, planner: Any) -> Any:
        if self.faults:
            raise self.faults.pop(0)
        return super().write_data(plan, planner)


class PlainWriter(_FileSystemWriter):
    """A writer that cannot stage, as most are not able to."""


class Recorder(DefaultSavePlanner):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def set_up_planner(
        self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False
    ) -> None:
        self.calls.append(f"set_up {is_coordinator}")
        super().set_up_planner(state_dict, storage_meta, is_coordinator)

    def create_local_plan(self) -> Any:
        self.calls.append("local")
        return super().create_local_plan()

    def create_global_plan(self, all_plans: Any) -> Any:
        self.calls.append("global")
        return super().create_global_plan(all_plans)

    def finish_plan(self, new_plan: Any) -> Any:
        self.calls.append("finish")
        return super().finish_plan(new_plan)


class LoadRecorder(DefaultLoadPlanner):
    calls: tuple[str, ...] = ()

    def create_local_plan(self) -> Any:
        self.calls = (*self.calls, "local")
        return super().create_local_plan()


class Counter:
    """A Stateful."""

    def __init__(self, n: int) -> None:
        self.n = n

    def state_dict(self) -> dict[str, Any]:
        return {"n": self.n, "t": torch.full((2,), float(self.n))}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["t"].tolist() == [float(state["n"])] * 2
        self.n = state["n"]


def alone(path: Path, writer: Any = None, **options: Any) -> Checkpointer:
    storage = FileSystemWriter(path) if writer is None else writer
    return Checkpointer(storage, FileSystemReader(path), no_dist=True, **options)


# One process without a group --------------------------------------------------------------------


def test_save_works_where_stock_raises(tmp_path: Path) -> None:
    state = {"w": torch.arange(4.0), "n": 1}
    stock = Stock(FileSystemWriter(tmp_path), FileSystemReader(tmp_path), no_dist=True)
    with pytest.raises(TypeError, match="coordinator_rank"):
        stock.save(state)
    ours = alone(tmp_path)
    assert isinstance(ours.save(state), Metadata)
    tensor = torch.zeros(4)
    into = {"w": tensor, "n": 0}
    ours.load(into)
    assert into["w"] is tensor and tensor.tolist() == [0, 1, 2, 3] and into["n"] == 1


def test_the_signature_is_torchs(tmp_path: Path) -> None:
    ours, theirs = (inspect.signature(c.__init__).parameters for c in (Checkpointer, Stock))
    assert list(ours) == list(theirs)
    assert [p.default for p in ours.values()] == [p.default for p in theirs.values()]
    assert [p.kind for p in ours.values()] == [p.kind for p in theirs.values()]


def test_stateful_objects_and_modules(tmp_path: Path) -> None:
    model, other = nn.Linear(3, 2), nn.Linear(3, 2)
    ours = alone(tmp_path)
    ours.save({"model": model, "counter": Counter(5), "inner": {"x": [1, torch.ones(2)]}})
    counter, place = Counter(0), torch.zeros(2)
    weight = other.weight
    into = {"model": other, "counter": counter, "inner": {"x": [0, place]}}
    ours.load(into)
    assert other.weight is weight and torch.equal(weight, model.weight)
    assert counter.n == 5 and into["counter"] is counter and into["model"] is other
    assert into["inner"]["x"][0] == 1 and place.tolist() == [1, 1]


def test_checkpoint_id_names_each_one(tmp_path: Path) -> None:
    ours = alone(tmp_path / "unused")
    ours.save({"n": 1}, checkpoint_id=tmp_path / "1")
    ours.async_save({"n": 2}, checkpoint_id=str(tmp_path / "2")).result(20)
    for n in (1, 2):
        into = {"n": 0}
        ours.load(into, checkpoint_id=tmp_path / str(n))
        assert into == {"n": n} == read_stock(tmp_path / str(n))
    assert not list((tmp_path / "unused").glob("*"))


def test_without_a_group_it_works_alone_and_says_so(tmp_path: Path) -> None:
    ours = Checkpointer(FileSystemWriter(tmp_path), FileSystemReader(tmp_path))
    with pytest.warns(UserWarning, match="no_dist=True"):
        ours.save({"n": 1})


@pytest.mark.filterwarnings("error")
def test_no_dist_needs_no_group_and_no_warning(tmp_path: Path) -> None:
    assert not dist.is_initialized()
    ours = alone(tmp_path, coordinator_rank=3)
    ours.save({"n": 1})
    ours.async_save({"n": 2}).result(20)
    into = {"n": 0}
    ours.load(into)
    assert into == {"n": 2}


def test_planners_are_used(tmp_path: Path) -> None:
    recorder, loader = Recorder(), LoadRecorder()
    ours = alone(tmp_path, save_planner=recorder, load_planner=loader)
    ours.save({"n": 1})
    assert recorder.calls == ["set_up True", "local", "global", "finish"]
    ours.async_save({"n": 1}).result(20)
    assert len(recorder.calls) == 8
    ours.load({"n": 0})
    assert loader.calls == ("local",)


def test_a_planner_and_a_writer_of_older_signatures(tmp_path: Path) -> None:
    class OldPlanner(DefaultSavePlanner):
        def set_up_planner(self, state_dict: Any, is_coordinator: bool) -> None:  # type: ignore[override]
            super().set_up_planner(state_dict, None, is_coordinator)

    class OldWriter(FileSystemWriter):
        def set_up_storage_writer(self, is_coordinator: bool) -> None:  # type: ignore[override]
            super().set_up_storage_writer(is_coordinator)

    alone(tmp_path, OldWriter(tmp_path), save_planner=OldPlanner()).save({"n": 1})
    assert read_stock(tmp_path) == {"n": 1}


def test_errors_are_exceptions(tmp_path: Path) -> None:
    ours = alone(tmp_path, BadWriter(tmp_path, OSError("disk full")))
    assert not issubclass(CheckpointException, Exception)
    with pytest.raises(CheckpointError, match=r"save failed on rank 0: OSError: disk full") as saw:
        ours.save({"n": 1})
    assert (saw.value.rank, saw.value.phase) == (0, "write")
    assert isinstance(saw.value.__cause__, OSError)
    # A script that was written for torch has its own `except`.
    assert isinstance(saw.value, CheckpointException) and list(saw.value.failures) == [0]
    again = pickle.loads(pickle.dumps(saw.value))
    assert str(again) == str(saw.value) and list(again.failures) == [0]
    with pytest.raises(CheckpointError, match="load failed on rank 0: FileNotFoundError"):
        ours.load({"n": 1})
    ours.save({"n": 1})
    with pytest.raises(CheckpointError, match="Missing key"):
        ours.load({"other": 1})


def test_a_load_that_stops_midway_says_so(tmp_path: Path) -> None:
    ours = alone(tmp_path)
    ours.save({"a": torch.ones(2), "b": torch.ones(2)})
    (tmp_path / "__0_0.distcp").write_bytes(b"")
    with pytest.raises(CheckpointError, match="part old, part new") as caught:
        ours.load({"a": torch.zeros(2), "b": torch.zeros(2)})
    assert caught.value.phase == "read"


def test_an_interrupt_is_no_failure(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        alone(tmp_path, BadWriter(tmp_path, KeyboardInterrupt())).save({"n": 1})


# In the background ------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [FileSystemWriter, PlainWriter])
def test_async_save_has_copied_when_it_returns(tmp_path: Path, kind: type) -> None:
    go = threading.Event()

    class Waits(kind):  # type: ignore[misc]
        def write_data(self, plan: Any, planner: Any) -> Any:
            assert go.wait(20)
            return super().write_data(plan, planner)

    writer = Waits(tmp_path)
    assert isinstance(writer, AsyncStager) == (kind is FileSystemWriter)
    state = {"w": torch.ones(3), "s": torch.tensor(1.0), "inner": {"l": [1, 2], "set": {1}}, "n": 1}
    future = alone(tmp_path, writer).async_save(state)
    assert isinstance(future, Future) and not future.done()
    state["w"].zero_()
    state["s"].zero_()
    state["inner"]["l"].append(3)
    state["inner"]["set"].add(2)
    state["inner"]["new"] = 1
    state["n"] = 2
    go.set()
    assert isinstance(future.result(20), Metadata)
    into: dict[str, Any] = {"w": torch.zeros(3), "s": torch.tensor(0.0), "n": 0}
    into["inner"] = {"l": None, "set": None}
    alone(tmp_path).load(into)
    assert into["w"].tolist() == [1, 1, 1] and into["s"] == 1 and into["n"] == 1
    assert into["inner"] == {"l": [1, 2], "set": {1}}


class LazyStager(PlainWriter):
    """Stages in a thread of its own, as torch's newer stagers may."""

    _synchronize_after_execute = True
    synchronized = False

    @property
    def should_synchronize_after_execute(self) -> bool:
        return True

    def stage(self, state_dict: dict[str, Any]) -> Future[dict[str, Any]]:
        staged: Future[dict[str, Any]] = Future()

        def copy() -> None:
            time.sleep(0.2)
            staged.set_result({k: v.clone() for k, v in state_dict.items()})

        threading.Thread(target=copy).start()
        return staged

    def synchronize_staging(self) -> None:
        self.synchronized = True

    def close(self) -> None:
        raise AssertionError("the stager is its owner's to close")


def test_a_stager_that_is_still_copying_is_waited_for(tmp_path: Path) -> None:
    writer = LazyStager(tmp_path)
    tensor = torch.ones(2)
    future = alone(tmp_path, writer).async_save({"w": tensor})
    assert writer.synchronized
    tensor.zero_()
    future.result(20)
    assert read_stock(tmp_path)["w"].tolist() == [1, 1]


def test_stock_runs_two_saves_at_once(tmp_path: Path) -> None:
    go = threading.Event()
    writer = SlowWriter(tmp_path, go)
    stock = Stock(writer, FileSystemReader(tmp_path))
    futures = [stock.async_save({"n": n}) for n in (1, 2)]
    deadline = time.monotonic() + 10
    while writer.most < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    go.set()
    for future in futures:
        future.exception(20)
    assert writer.most == 2


def test_a_second_save_waits_for_the_first(tmp_path: Path) -> None:
    go = threading.Event()
    writer = SlowWriter(tmp_path, go)
    ours = alone(tmp_path, writer)
    first = ours.async_save({"n": 1})
    assert writer.entered.wait(20)
    threading.Timer(0.3, go.set).start()
    second = ours.async_save({"n": 2})
    assert first.done()
    ours.save({"n": 3})
    assert second.done()
    last = ours.async_save({"n": 4})
    into = {"n": 0}
    ours.load(into)
    assert last.done() and into == {"n": 4}
    assert writer.most == 1


def test_many_threads_save_one_at_a_time(tmp_path: Path) -> None:
    writer = SlowWriter(tmp_path)
    ours = alone(tmp_path, writer)
    futures: list[Future[Metadata]] = []
    threads = [
        threading.Thread(target=lambda n=n: futures.append(ours.async_save({"n": n})))
        for n in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert all(f.result(20) for f in futures) and writer.most == 1


@pytest.mark.parametrize("call", ["save", "async_save", "load"])
def test_a_failure_nobody_saw_is_logged_and_raised(
    tmp_path: Path, call: str, caplog: pytest.LogCaptureFixture
) -> None:
    stock = Stock(BadWriter(tmp_path, OSError("disk full")), FileSystemReader(tmp_path))
    wait([stock.async_save({"n": 0})], 20)
    stock.async_save({"n": 0}).result(20)  # nobody hears of the first
    alone(tmp_path).save({"n": 1})
    caplog.clear()
    ours = alone(tmp_path, BadWriter(tmp_path, OSError("disk full")))
    with caplog.at_level(logging.ERROR):
        ours.async_save({"n": 2})
        with pytest.raises(CheckpointError, match=r"earlier async_save failed.*disk full"):
            getattr(ours, call)({"n": 3})
    assert "disk full" in caplog.text
    assert read_stock(tmp_path) == {"n": 1}
    ours.save({"n": 4})
    assert read_stock(tmp_path) == {"n": 4}


def test_a_failure_that_was_seen_is_not_raised_again(tmp_path: Path) -> None:
    ours = alone(tmp_path, BadWriter(tmp_path, OSError("a"), OSError("b"), OSError("c")))
    future = ours.async_save({"n": 1})
    with pytest.raises(CheckpointError, match="OSError: a"):
        future.result(20)
    assert isinstance(ours.async_save({"n": 1}).exception(20), CheckpointError)
    seen: list[Any] = []
    ours.async_save({"n": 1}).add_done_callback(lambda f: seen.append(f.exception()))
    while not seen:
        time.sleep(0.01)
    ours.save({"n": 4})
    assert read_stock(tmp_path) == {"n": 4}


def test_a_state_dict_that_raises(tmp_path: Path) -> None:
    class Broken(Counter):
        def state_dict(self) -> dict[str, Any]:
            raise RuntimeError("no state today")

    ours = alone(tmp_path)
    for call in (ours.save, ours.async_save, ours.load):
        with pytest.raises(CheckpointError, match="no state today"):
            call({"c": Broken(1)})
    ours.save({"n": 1})


# Many ranks -------------------------------------------------------------------------------------


def sharded(mesh: DeviceMesh, fill: float = 0.0) -> dict[str, Any]:
    whole = torch.arange(24.0).reshape(8, 3) * fill
    return {
        "rows": distribute_tensor(whole, mesh, [Shard(0)]),
        "model": {"same": torch.full((2,), fill)},
        "step": int(fill),
    }


def is_filled(state: dict[str, Any], fill: float) -> bool:
    whole = state["rows"].full_tensor()
    return (
        torch.equal(whole, torch.arange(24.0).reshape(8, 3) * fill)
        and state["model"]["same"].tolist() == [fill, fill]
        and state["step"] == int(fill)
    )


def trip(rank: int, group: Any, path: str, coordinator: int) -> tuple[list[str], bool]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    planner = Recorder()
    ours = Checkpointer(
        FileSystemWriter(path),
        FileSystemReader(path),
        coordinator_rank=coordinator,
        save_planner=planner,
    )
    state = sharded(mesh, 1)
    metadata = ours.save(state)
    assert set(metadata.state_dict_metadata) == {"rows", "model.same", "step"}
    calls = list(planner.calls)
    into = sharded(mesh)
    local = into["rows"].to_local()
    ours.load(into)
    assert is_filled(into, 1)
    assert local.data_ptr() == into["rows"].to_local().data_ptr()
    future = ours.async_save(sharded(mesh, 2))
    dist.all_reduce(torch.ones(1))  # training goes on meanwhile
    future.result(20)
    assert planner.calls == calls * 2
    ours.load(into)
    return calls, is_filled(into, 2)


@pytest.mark.parametrize(("world", "coordinator"), [(2, 0), (2, 1), (4, 2)])
def test_the_coordinator_is_the_one_that_was_named(
    world: int, coordinator: int, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    pool: RankPool = request.getfixturevalue(f"pool{world}")
    results = pool.run(trip, str(tmp_path / "c"), coordinator)
    for rank, (calls, right) in enumerate(results):
        leads = rank == coordinator
        steps = ["local", "global", "finish"] if leads else ["local", "finish"]
        assert calls == [f"set_up {leads}", *steps] and right
    assert read_stock(tmp_path / "c")["step"] == 2


def in_a_sub_group(rank: int, group: Any, path: str) -> Any:
    members = [1, 3]
    part = dist.new_group(members)
    mesh = DeviceMesh("cpu", members)
    ours = Checkpointer(
        FileSystemWriter(path),
        FileSystemReader(path),
        process_group=part,
        coordinator_rank=1,  # of the group: rank 3 of the world
        save_planner=(planner := Recorder()),
    )
    if rank not in members:
        with pytest.raises(UsageError, match="not a rank"):
            ours.save({"n": 1})
        return None
    ours.save(sharded(mesh, 3))
    into = sharded(mesh)
    ours.load(into)
    assert is_filled(into, 3)
    ours.async_save(sharded(mesh, 4)).result(20)
    ours.load(into)
    assert is_filled(into, 4)
    return planner.calls[0]


def test_a_sub_group(pool4: RankPool, tmp_path: Path) -> None:
    results = pool4.run(in_a_sub_group, str(tmp_path / "c"))
    assert results == [None, "set_up False", None, "set_up True"]
    assert read_stock(tmp_path / "c")["step"] == 4


def stock_meets_the_others(rank: int, group: Any, path: str) -> tuple[bool, str, str]:
    mine = Path(path) / str(rank)
    planner = Recorder()
    stock = Stock(
        FileSystemWriter(mine),
        FileSystemReader(mine),
        coordinator_rank=1,
        no_dist=True,
        save_planner=planner,
    )
    stock.async_save({"n": rank}).result(20)
    try:
        stock.load({"n": 0})
        fault = ""
    except CheckpointException as caught:
        fault = str(caught)
    return (mine / ".metadata").exists(), planner.calls[0], fault


def test_stock_forgets_no_dist_and_the_coordinator(pool2: RankPool, tmp_path: Path) -> None:
    """Each rank was to save and load alone; the second is drawn in by the first."""
    first, second = pool2.run(stock_meets_the_others, str(tmp_path))
    assert first[:2] == (True, "set_up True")
    assert second[:2] == (False, "set_up False")
    assert "RANK 1" in first[2] and "RANK 1" in second[2]


def each_for_itself(rank: int, group: Any, path: str) -> bool:
    mine = Path(path) / str(rank)
    ours = alone(mine)
    if rank == 1:
        time.sleep(0.3)
    ours.save({"n": rank})
    ours.async_save({"n": rank + 10, "t": torch.full((2,), float(rank))}).result(20)
    into = {"n": 0, "t": torch.zeros(2)}
    ours.load(into)
    with pytest.raises(UsageError, match="coordinator_rank 7"):
        Checkpointer(FileSystemWriter(mine), FileSystemReader(mine), coordinator_rank=7).save({})
    return into["n"] == rank + 10 and into["t"].tolist() == [rank, rank]


def test_no_dist_is_honoured_on_ranks(pool2: RankPool, tmp_path: Path) -> None:
    assert pool2.run(each_for_itself, str(tmp_path)) == [True, True]
    for rank in (0, 1):
        assert read_stock(tmp_path / str(rank))["n"] == rank + 10


class Unpicklable(Exception):
    def __init__(self, lock: Any) -> None:
        super().__init__("held a lock", lock)
        self.lock = lock

    def __str__(self) -> str:
        return "held a lock"


def failures(rank: int, group: Any, path: str) -> list[tuple[Any, str, str]]:
    told: list[tuple[Any, str, str]] = []

    def tell(call: Any, *args: Any) -> None:
        with pytest.raises(CheckpointError) as caught:
            call(*args)
        told.append((caught.value.rank, str(caught.value.phase), caught.value.message))

    bad = rank in (1, 2)
    faults = [OSError(f"disk {rank}"), Unpicklable(threading.Lock())] if bad else []
    ours = Checkpointer(BadWriter(path, *faults), FileSystemReader(path), coordinator_rank=3)
    state = {"t": torch.ones(2), **({f"only{rank}": 1})}
    tell(ours.save, state)
    tell(ours.save, state)
    ours.save(state)

    class Broken(Counter):
        def state_dict(self) -> dict[str, Any]:
            raise RuntimeError("no state today")

    broken = {"c": Broken(1) if rank == 2 else Counter(1)}
    tell(ours.save, broken)
    if rank == 2:
        tell(ours.async_save, broken)
    else:
        tell(ours.async_save(broken).result, 20)
    # One rank looks at its failure, the others drop theirs: the next call ends alike on all.
    ours.storage_writer.faults = [OSError("dropped")] if bad else []  # type: ignore[attr-defined]
    future = ours.async_save(state)
    if rank == 0:
        assert future.exception(20) is not None
    tell(ours.load, {"t": torch.zeros(2)})
    into = {"t": torch.zeros(2), f"only{rank}": 0}
    ours.load(into)
    assert into["t"].tolist() == [1, 1] and into[f"only{rank}"] == 1
    return told


def test_a_failure_is_told_on_every_rank(pool4: RankPool, tmp_path: Path) -> None:
    results = pool4.run(failures, str(tmp_path / "c"))
    assert all(result == results[0] for result in results)
    disk, lock, broken, background, dropped = results[0]
    assert disk == (1, "write", "save failed on rank 1: OSError: disk 1; rank 2: OSError: disk 2")
    assert lock[:2] == (1, "write") and lock[2].count("held a lock") == 2
    assert broken[:2] == background[:2] == (2, "plan")
    assert broken[2] == background[2] == "save failed on rank 2: RuntimeError: no state today"
    assert dropped[:2] == (1, "plan")
    for rank in (1, 2, 3):
        assert f"rank {rank}: CheckpointError: an earlier async_save failed" in dropped[2]
    assert "rank 0: " not in dropped[2]


def stages_shards(rank: int, group: Any, path: str) -> bool:
    mesh = init_device_mesh("cpu", (2,))
    ok = True
    for kind in (FileSystemWriter, PlainWriter):
        state = sharded(mesh, 5)
        where = f"{path}/{kind.__name__}"
        ours = Checkpointer(kind(where), FileSystemReader(where))
        future = ours.async_save(state)
        state["rows"].to_local().zero_()
        state["model"]["same"].zero_()
        future.result(20)
        into = sharded(mesh)
        ours.load(into)
        ok = ok and is_filled(into, 5)
    return ok


def test_shards_are_staged(pool2: RankPool, tmp_path: Path) -> None:
    assert pool2.run(stages_shards, str(tmp_path)) == [True, True]
