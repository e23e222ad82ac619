"""A save ends in one of three ways, on all ranks: committed, not committed, unknown. It is true."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import torchrelay as tr
from tests.support.ranks import Exited, RankPool, Ranks
from tests.support.s3 import S3
from tests.support.saved import state, which
from torchrelay.coordination import group_store
from torchrelay.stores.local.files import Files


def outcome(save: Callable[[], object]) -> str:
    try:
        save()
    except tr.errors.CommitUnknownError as fault:
        assert "steps()" in fault.message and "verify(" in fault.message, fault
        return "unknown"
    except tr.errors.CheckpointError as fault:
        return f"not committed: {type(fault).__name__}: {fault}"
    return "committed"


def seeds(root: Path) -> dict[int, int | str]:
    """What a process that starts and looks finds; nothing is cleaned up by it."""
    with tr.Checkpointer(
        root, no_dist=True, options=tr.options.CheckpointerOptions(read_only=True)
    ) as reader:
        return {step: which(reader.load(step=step).state, range(9)) for step in reader.steps()}


# The medium, after the rename --------------------------------------------------------------------


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_sync_that_fails_after_the_rename_is_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overwrite: bool
) -> None:
    sync_dir, rename, exchange = Files.sync_dir, Files.rename, Files.exchange
    moved: list[str] = []

    def fail(self: Files, path: str) -> None:
        if moved and path == str(tmp_path):
            raise OSError(errno.EIO, os.strerror(errno.EIO), path)
        sync_dir(self, path)

    with tr.Checkpointer(tmp_path) as ckpt:
        if overwrite:
            ckpt.save(1, state(1))
        monkeypatch.setattr(Files, "sync_dir", fail)
        monkeypatch.setattr(Files, "rename", lambda *a: (rename(*a), moved.append("new"))[0])
        monkeypatch.setattr(Files, "exchange", lambda *a: (exchange(*a), moved.append("old"))[0])
        assert outcome(lambda: ckpt.save(1, state(2), overwrite=overwrite)) == "unknown"
        monkeypatch.undo()
        assert seeds(tmp_path) == {1: 2}
    if overwrite:  # a power cut may undo the swap: what was replaced has to be whole
        (replaced,) = [path for path in tmp_path.iterdir() if ".tmp-" in path.name]
        (tmp_path / "step-1").rename(tmp_path / "new")
        replaced.rename(tmp_path / "step-1")
        assert seeds(tmp_path) == {1: 1}


@pytest.mark.parametrize("back", [True, False], ids=["put back", "not even put back"])
def test_an_overwrite_without_exchange_that_fails_leaves_the_step_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, back: bool
) -> None:
    rename = Files.rename
    broken: list[str] = []

    def fail(self: Files, old: str, new: str) -> None:
        if ".tmp-" in old or (broken and not back):
            broken.append(old)
            raise OSError(errno.EIO, os.strerror(errno.EIO), old)
        rename(self, old, new)

    with tr.Checkpointer(tmp_path) as ckpt:
        ckpt.save(1, state(1))
        monkeypatch.setattr(Files, "exchange", lambda *args: False)
        monkeypatch.setattr(Files, "rename", fail)
        assert outcome(lambda: ckpt.save(1, state(2), overwrite=True)).startswith("not committed")
        assert len(broken) == (1 if back else 2)
        monkeypatch.undo()
        assert ckpt.steps() == [1] and seeds(tmp_path) == {1: 1}
        with pytest.raises(tr.errors.StepExistsError):
            ckpt.save(1, state(3))
        ckpt.save(1, state(4), overwrite=True)
        assert seeds(tmp_path) == {1: 4}
        ckpt.delete(1)
        assert ckpt.steps() == [] and seeds(tmp_path) == {}


class Killed(BaseException):
    pass


def test_a_kill_between_the_renames_of_an_overwrite_leaves_the_step_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rename = Files.rename

    def die(self: Files, old: str, new: str) -> None:
        if ".tmp-" in old:
            raise Killed  # what would be done after it is not done
        rename(self, old, new)

    ckpt = tr.Checkpointer(tmp_path)
    ckpt.save(1, state(1))
    monkeypatch.setattr(Files, "exchange", lambda *args: False)
    monkeypatch.setattr(Files, "rename", die)
    with pytest.raises(Killed):
        ckpt.save(1, state(2), overwrite=True)
    monkeypatch.undo()
    assert not (tmp_path / "step-1").exists()
    assert seeds(tmp_path) == {1: 1}


# A slow medium, on all ranks ---------------------------------------------------------------------


def slow_commit(rank: int, group: Any, root: str, what: str, background: bool) -> dict[str, Any]:
    """Rank 0's storage does not answer, in the middle of the commit, until the save is over."""
    answers, over = threading.Event(), threading.Event()
    original = getattr(Files, what)

    def slow(self: Files, path: str, *rest: str) -> None:
        if ".tmp-" in path:
            answers.wait(60)
        try:
            original(self, path, *rest)
        finally:
            if ".tmp-" in path:
                over.set()

    with tr.Checkpointer(root, timeout=30) as ckpt:
        ckpt.save(1, state(1))
        if rank == 0:
            setattr(Files, what, slow)
        begun = time.monotonic()
        try:
            if background:
                pending = ckpt.save_async(2, state(2), timeout=2)
                told = outcome(lambda: pending.result(30))
            else:
                told = outcome(lambda: ckpt.save(2, state(2), timeout=2))
            seconds = time.monotonic() - begun
            before = ckpt.steps()
            dist.barrier(group)  # every rank has looked
        finally:
            answers.set()
            if rank == 0:
                assert over.wait(30)
                setattr(Files, what, original)
        dist.barrier(group)
        ckpt.save(3, state(3))
        return {"told": told, "seconds": seconds, "before": before, "after": ckpt.steps()}


@pytest.mark.parametrize("background", [False, True])
def test_a_rename_past_the_deadline_is_unknown_on_all_ranks(
    pool2: RankPool, tmp_path: Path, background: bool
) -> None:
    for one in pool2.run(slow_commit, str(tmp_path), "rename", background, timeout=60):
        assert one["told"] == "unknown", one
        assert one["before"] == [1] and one["after"] == [1, 2, 3], one
        assert one["seconds"] < 10, one
    assert seeds(tmp_path) == {1: 1, 2: 2, 3: 3}


def test_a_medium_that_stalls_before_the_rename_commits_nothing_later(
    pool2: RankPool, tmp_path: Path
) -> None:
    for one in pool2.run(slow_commit, str(tmp_path), "sync_dir", False, timeout=60):
        assert one["told"].startswith("not committed: StorageTimeoutError"), one
        assert one["before"] == [1] and one["after"] == [1, 3], one
        assert one["seconds"] < 10, one


def late_coordinator(rank: int, group: Any, root: str) -> tuple[str, float]:
    """Rank 1 calls two seconds before rank 0, so its time is over first."""
    with tr.Checkpointer(root, timeout=30) as ckpt:
        ckpt.save(1, state(1))
        original = Files.rename

        def slow(self: Files, old: str, new: str) -> None:
            threading.Event().wait(2)
            original(self, old, new)

        if rank == 0:
            Files.rename = slow  # type: ignore[method-assign]
            threading.Event().wait(2)
        begun = time.monotonic()
        try:
            return outcome(lambda: ckpt.save(2, state(2), timeout=3.4)), time.monotonic() - begun
        finally:
            Files.rename = original  # type: ignore[method-assign]


def test_ranks_whose_time_ends_at_different_times_say_the_same(
    pool2: RankPool, tmp_path: Path
) -> None:
    told = pool2.run(late_coordinator, str(tmp_path), timeout=60)
    assert {one for one, _ in told} == {"unknown"}, told


# Rank 0 ends -------------------------------------------------------------------------------------


class Pair:
    """Two ranks whose store is in rank 0's process, as torchrun's is by default."""

    def __init__(self, rank: int, group: Any) -> None:
        board = group.get_group_store()
        port = 0 if rank == 0 else int(board.get("pair"))
        wait = timedelta(seconds=20)
        self._rank = rank
        self._store = dist.TCPStore("127.0.0.1", port, 2, rank == 0, wait, wait_for_workers=False)
        if rank == 0:
            board.set("pair", str(self._store.port))

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return 2

    def get_group_store(self) -> Any:
        return self._store


def save_and_end(rank: int, group: Any, root: str, when: str) -> str:
    ckpt = tr.Checkpointer(root, group=Pair(rank, group), timeout=10)
    rename = Files.rename

    def last_act(self: Files, old: str, new: str) -> None:
        rename(self, old, new)
        os._exit(0)

    if rank == 0 and when == "in the commit":
        Files.rename = last_act  # type: ignore[method-assign]
    if rank == 1:
        group_store.POLL = (0.3, 0.3)  # it looks seldom
    told = outcome(lambda: ckpt.save(1, state(1)))
    if rank == 0:
        os._exit(0)
    return told


@pytest.mark.parametrize("when", ["after the commit", "in the commit"])
def test_all_ranks_know_of_a_commit_though_rank_0_ends_at_once(tmp_path: Path, when: str) -> None:
    with Ranks(save_and_end, 2, str(tmp_path), when, expect_exit={0: 0}) as ranks:
        assert ranks.results(90) == [Exited(0), "committed"]
    assert seeds(tmp_path) == {1: 1}


# Object storage ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "told"), [(500, "unknown"), (403, "not committed: CheckpointError")]
)
def test_a_put_of_the_record_that_fails(
    s3: S3,
    status: int,
    told: str,
) -> None:
    pytest.importorskip("obstore")

    def hook(method: str, path: str) -> int | None:
        return status if method == "PUT" and path.endswith("manifest.json") else None

    with tr.Checkpointer(s3.url("run"), timeout=4) as ckpt:
        s3.hook = hook
        assert outcome(lambda: ckpt.save(1, state(1))).startswith(told)
        s3.hook = None
        assert ckpt.steps() == []
        # A request that is still on its way needs the data; one that was refused does not.
        left = [one.path for one in ckpt._store._bucket.objects()]  # type: ignore[attr-defined]
        assert bool(left) == (told == "unknown"), left
        ckpt.save(1, state(2))
        assert which(ckpt.load().state, range(9)) == 2
