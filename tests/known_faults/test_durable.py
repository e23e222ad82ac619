"""What is wrong with the checkpoints that people use today, line by line, and what happens here.

Each test first shows the fault on torch's own code where that takes one process or a pool, so that
it would tell if torch mended it. The widest test of each rule is named beside the line.

torch `_Checkpointer`
    `save()` always raises TypeError             test_save_raises_type_error
    `no_dist` is ignored                         test_no_dist_is_ignored
    no checkpoint id per call                    test_no_checkpoint_id_per_call
torch DCP underneath
    one flipped byte loads without a word        test_one_flipped_byte; test_checkpoint_damage.py
    disk full in a writer thread                 test_disk_full; test_checkpoint_faults.py
    two ranks save again, one is killed          test_halves_of_two_saves;
                                                 test_checkpoint_faults.py, a rank killed
    fsync before the buffer is flushed           test_fsync_before_flush; test_power_cut.py
    loading `.metadata` executes a payload       test_metadata_executes; test_checkpoint_damage.py
    a dropped future hides its failure           test_dropped_future; test_checkpoint_faults.py
    one rank asleep in a write                   test_one_rank_asleep; test_checkpoint_faults.py
torch_checkpointing 0.1
    a crash between item files                   test_crash_between_files; test_power_cut.py
    O_DIRECT, silent bytes, pickled metadata     test_plain_files
"""

from __future__ import annotations

import errno
import json
import logging
import os
import pickle
import threading
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint._checkpointer import _Checkpointer as Stock
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.torch_version import TorchVersion

import torchrelay as tr
from tests.faults.test_checkpoint_faults import (
    GRACE,
    SHORT,
    HeldCommit,
    NoRoom,
    asleep,
    attempt,
    limit_writer,
    small_disk,  # noqa: F401
)
from tests.support.cuts import Cut, CutFiles, stores_with
from tests.support.forge import flip
from tests.support.ranks import RankPool
from tests.support.saved import equal, state, which
from torchrelay.dropin import Checkpointer as Dropin

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


# torch `_Checkpointer`


def test_save_raises_type_error(tmp_path: Path) -> None:
    """`save()` always raises TypeError in 2.13."""
    stock = Stock(FileSystemWriter(tmp_path), FileSystemReader(tmp_path), no_dist=True)
    with pytest.raises(TypeError, match="coordinator_rank"):
        stock.save({"w": torch.ones(2)})
    with tr.Checkpointer(tmp_path / "ours") as checkpointer:
        checkpointer.save(1, state(1))
        assert which(checkpointer.load().state, [1]) == 1


def no_dist(rank: int, group: Any, root: str) -> str:
    """Rank 1 saves and loads by itself; the other does nothing of the kind."""
    if rank == 0:
        return ""
    path = Path(root) / "dropin"
    ours = Dropin(FileSystemWriter(path), FileSystemReader(path), no_dist=True)
    ours.async_save({"w": torch.ones(3)}).result(20)
    into = {"w": torch.zeros(3)}
    ours.load(into)
    return f"{into['w'].sum():g} {sorted(p.name for p in path.iterdir())}"


def coordinated(rank: int, group: Any, root: str) -> int:
    """Which rank writes the metadata."""
    made: list[int] = []

    class Told(FileSystemWriter):
        def finish(self, *args: Any, **kwargs: Any) -> None:
            made.append(rank)
            super().finish(*args, **kwargs)

    ours = Dropin(Told(root), FileSystemReader(root), process_group=group, coordinator_rank=1)
    ours.async_save({"w": torch.ones(3)}).result(20)
    return len(made)


def test_no_dist_is_ignored(pool2: RankPool, tmp_path: Path) -> None:
    """`no_dist` is ignored by `async_save` and `load`; `coordinator_rank` is not forwarded.

    The fault itself: test_dropin_checkpointer.py, stock forgets.
    """
    assert pool2.run(no_dist, str(tmp_path)) == ["", "3 ['.metadata', '__0_0.distcp']"]
    assert pool2.run(coordinated, str(tmp_path / "all"), fresh_group=True) == [0, 1]


def test_no_checkpoint_id_per_call(tmp_path: Path) -> None:
    """no checkpoint id per call; a second `async_save` is not guarded against the first."""
    assert "checkpoint_id" not in Stock.async_save.__annotations__
    files = HeldCommit()
    with stores_with(files):
        checkpointer = tr.Checkpointer(tmp_path, timeout=20)
    with checkpointer:
        checkpointer.save_async(1, state(1))
        assert files.there.wait(20)
        assert checkpointer.save_async(2, state(2), on_busy="skip").skipped
        files.go.set()
        checkpointer.save_async(3, state(3)).result(20)
        for step in (1, 3):
            assert which(checkpointer.load(step=step).state, [step]) == step


# torch DCP underneath


def test_one_flipped_byte(tmp_path: Path) -> None:
    """one flipped byte in a data file loads without a word"""
    weights = torch.arange(1000.0)
    dcp.save({"w": weights}, checkpoint_id=tmp_path / "theirs", no_dist=True)
    (path,) = (tmp_path / "theirs").glob("*.distcp")
    flip(path, path.read_bytes().index(weights.numpy().tobytes()) + 2001)
    into = {"w": torch.zeros(1000)}
    dcp.load(into, checkpoint_id=tmp_path / "theirs", no_dist=True)
    assert not torch.equal(into["w"], weights)
    with tr.Checkpointer(tmp_path / "ours") as checkpointer:
        checkpointer.save(1, {"model": {"w": weights}})
        path = tmp_path / "ours" / "step-1" / "model.safetensors"
        flip(path, path.read_bytes().index(weights.numpy().tobytes()) + 2001)
        live = {"model": {"w": torch.zeros(1000)}}
        with pytest.raises(tr.errors.DamagedError, match=r"model\.safetensors.*model\.w"):
            checkpointer.load(live, step=1)
        assert not live["model"]["w"].any()


def test_disk_full(small_disk: Path) -> None:  # noqa: F811
    """disk full in a writer thread: `save()` returns success and the metadata is written"""
    big = {f"w{n}": torch.ones(500_000) for n in range(8)}  # 16 MB, on a disk of 8
    writer = FileSystemWriter(small_disk / "theirs", thread_count=2, single_file_per_rank=False)
    full = threading.Event()
    stream = writer.fs.create_stream

    def create_stream(path: Any, mode: str) -> Any:
        """The other thread finds no room; the main thread writes the rest."""
        if threading.current_thread() is not threading.main_thread():
            full.set()
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        assert full.wait(20)
        return stream(path, mode)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writer.fs, "create_stream", create_stream)
        patch.setattr(threading, "excepthook", lambda args: None)  # all that is ever heard of it
        dcp.save({"a": torch.ones(9), "b": torch.ones(9)}, storage_writer=writer, no_dist=True)
    assert (small_disk / "theirs" / ".metadata").exists()
    assert len(list((small_disk / "theirs").glob("*.distcp"))) == 1
    with tr.Checkpointer(small_disk / "ours") as checkpointer:
        checkpointer.save(1, state(1))
        with pytest.raises(tr.errors.CheckpointError, match="are missing"):
            checkpointer.save(2, big)
        assert which(checkpointer.load().state, [1]) == 1
    files = NoRoom()
    with stores_with(files):
        checkpointer = tr.Checkpointer(small_disk / "ours")
    with checkpointer:
        with pytest.raises(tr.errors.CheckpointError, match=r"No space left .*safetensors"):
            checkpointer.save(2, state(2))
        assert checkpointer.steps() == [1]


def halves(rank: int, group: Any, root: str) -> list[Any]:
    """Two saves of one sharded tensor; then rank 1's file of the first in the second's place."""
    mesh = init_device_mesh("cpu", (2,))
    place = Path(root)

    def sharded(value: float) -> Any:
        return distribute_tensor(torch.full((4, 2), value), mesh, [Shard(0)])

    with tr.Checkpointer(place / "ours", group=group, timeout=20) as checkpointer:
        for number in (1, 2):
            dcp.save({"w": sharded(number)}, checkpoint_id=place / str(number), process_group=group)
            checkpointer.save(number, {"model": {"w": sharded(number)}})
        if rank == 0:
            name = "model.rank-00001-of-00002.safetensors"
            old, new = (place / "ours" / f"step-{number}" / name for number in (1, 2))
            new.write_bytes(old.read_bytes())
            (place / "2" / "__1_0.distcp").write_bytes((place / "1" / "__1_0.distcp").read_bytes())
        dist.barrier(group)
        into = {"w": sharded(0)}
        dcp.load(into, checkpoint_id=place / "2", process_group=group)
        theirs = into["w"].full_tensor()[:, 0].tolist()
        live = {"model": {"w": sharded(0)}}
        refused = attempt(lambda: checkpointer.load(live, step=2))
        untouched = live["model"]["w"].to_local().sum().item()
        with pytest.warns(RuntimeWarning, match="step 2"):
            checkpointer.load(live)
        return [theirs, refused.error, untouched, live["model"]["w"].full_tensor()[:, 0].tolist()]


def test_halves_of_two_saves(pool2: RankPool, tmp_path: Path) -> None:
    """two ranks save again to one path, one is killed: the next load mixes old and new halves of
    one tensor"""
    for theirs, error, untouched, ours in pool2.run(halves, str(tmp_path), fresh_group=True):
        assert theirs == [2.0, 2.0, 1.0, 1.0]
        assert (error, untouched, ours) == ("DamagedError", 0, [1.0] * 4)


def test_fsync_before_flush(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """fsync is called on the metadata file before its buffer is flushed (0 bytes at that moment),
    up to torch 2.13; the parent directory is never synced"""
    synced: list[tuple[str, int, bool]] = []

    def fsync(fd: Any) -> None:
        fd = fd if isinstance(fd, int) else fd.fileno()
        path = Path(f"/proc/self/fd/{fd}").readlink()
        synced.append((str(path), os.fstat(fd).st_size, path.is_dir()))

    monkeypatch.setattr(os, "fsync", fsync)
    dcp.save({"w": torch.ones(9)}, checkpoint_id=tmp_path / "theirs", no_dist=True)
    (empty,) = (not size for path, size, _ in synced if ".metadata" in path)
    assert empty == (torch.__version__ < TorchVersion("2.14"))
    assert not any(is_dir for _, _, is_dir in synced)
    synced.clear()
    root = tmp_path / "new" / "ours"
    with tr.Checkpointer(root) as checkpointer:
        checkpointer.save(1, state(1))
    names = [Path(path).name for path, _, _ in synced]
    sizes = {Path(path).name: size for path, size, is_dir in synced if not is_dir}
    there = {path.name: path.stat().st_size for path in (root / "step-1").iterdir()}
    assert sizes == there  # each file once it is whole
    draft = next(name for name in names if name.startswith("step-1.tmp-"))
    assert names[:2] == [tmp_path.name, "new"]  # what the new directories are in
    assert names[-3:] == ["manifest.json", draft, "ours"]


class Payload:
    def __init__(self, canary: Path) -> None:
        self.canary = str(canary)

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.canary}",)


def test_metadata_executes(tmp_path: Path) -> None:
    """loading `.metadata` executes a pickled payload"""
    canary = tmp_path / "canary"
    theirs = tmp_path / "theirs"
    dcp.save({"w": torch.ones(2)}, checkpoint_id=theirs, no_dist=True)
    (theirs / ".metadata").write_bytes(pickle.dumps(Payload(canary)))
    with pytest.raises(BaseException):
        dcp.load({"w": torch.ones(2)}, checkpoint_id=theirs, no_dist=True)
    assert canary.exists()
    canary.unlink()
    with tr.Checkpointer(tmp_path / "ours") as checkpointer:
        checkpointer.save(1, state(1))
        for path in (tmp_path / "ours" / "step-1").iterdir():
            path.write_bytes(pickle.dumps(Payload(canary)))
        with pytest.raises(tr.errors.DamagedError):
            checkpointer.load(step=1)
    assert not canary.exists()


class FullWriter(FileSystemWriter):
    def write_data(self, plan: Any, planner: Any) -> Any:
        raise OSError(28, "No space left on device")


def test_dropped_future(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """a dropped `async_save` future hides its failure; its exception derives from BaseException"""
    assert not issubclass(CheckpointException, Exception)
    stock = Stock(FullWriter(tmp_path), FileSystemReader(tmp_path), no_dist=True)
    future: Any = stock.async_save({"w": torch.ones(2)})
    assert isinstance(future, Future) and future.exception(20) is not None
    with caplog.at_level(logging.ERROR), pytest.raises(Exception, match="File too large"):
        with tr.Checkpointer(tmp_path / "ours", timeout=20) as checkpointer:
            checkpointer.prepare(state(1))
            limit_writer(checkpointer, 100)
            checkpointer.save_async(1, state(1))
    assert "saving step 1 failed" in caplog.text


def test_one_rank_asleep(pool2: RankPool, tmp_path: Path) -> None:
    """one rank asleep in a write: the others wait the whole group timeout, then get an error naming
    no rank"""
    begun = time.monotonic()
    for out, whole, after in pool2.run(asleep, str(tmp_path), 1, group_timeout=60):
        assert out.error in ("CheckpointError", "StorageTimeoutError")  # by rank 1, or for it
        assert out.seconds < SHORT + GRACE
        assert out.rank == 1 and out.phase == "write" and "rank-00001-of" in out.text
        assert whole and after
    assert time.monotonic() - begun < 60


# torch_checkpointing 0.1


def test_crash_between_files(tmp_path: Path) -> None:
    """a crash between item files with the default configuration loads a new model with an old
    optimizer"""
    stops = []
    for at in range(40):
        root = tmp_path / str(at)
        with tr.Checkpointer(root) as checkpointer:
            checkpointer.save(1, state(1))
        files = CutFiles(at)
        with stores_with(files):
            try:
                tr.Checkpointer(root).save(1, state(2), overwrite=True)
                break
            except Cut:
                stops.append({Path(call.path).name for call in files.journal})
        with tr.Checkpointer(root) as checkpointer:
            loaded = checkpointer.load().state
            assert which(loaded, [1, 2]) in (1, 2)
            assert equal(loaded["model"], state(loaded["seed"])["model"])
            assert equal(loaded["optim"], state(loaded["seed"])["optim"])
    files_of = [{name for name in names if name.endswith(".safetensors")} for names in stops]
    assert {1, 2, 3} <= {len(names) for names in files_of}  # it did stop between them


def test_plain_files(tmp_path: Path) -> None:
    """the default O_DIRECT save fails with EINVAL on ext4 here; a flipped byte is silent; metadata
    is pickled"""
    with tr.Checkpointer(tmp_path) as checkpointer:
        for number, size in enumerate((1, 511, 512, 513, 4095, 4097, 100_003)):
            odd = {"model": {"w": torch.arange(size).to(torch.uint8)}}
            checkpointer.save(number, odd)
            assert equal(checkpointer.load(step=number).state, odd)
            data = (tmp_path / f"step-{number}" / "manifest.json").read_bytes()
            assert set(json.loads(data)) == {"record", "digest"}
            flip(tmp_path / f"step-{number}" / "model.safetensors", size // 2 + 60)
            with pytest.raises(tr.errors.DamagedError):
                checkpointer.load(step=number)


def test_every_line_has_its_test() -> None:
    """The table at the top names tests that are here."""
    named = [word.rstrip(";") for word in (__doc__ or "").split() if word.startswith("test_")]
    here = [word for word in named if not word.endswith((".py", ".py,"))]
    assert len(here) == 12
    for name in here:
        assert globals()[name].__doc__, name
