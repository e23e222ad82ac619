"""Whatever fails in a save is told on every rank in time, and what was committed stays as it was.

Each test ends with a load that gives the old step or the new one, and with a save that works.
"""

from __future__ import annotations

import errno
import logging
import os
import resource
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

import torchrelay as tr
from tests.support.cuts import stores_with
from tests.support.forks import servers
from tests.support.ranks import Killed, RankPool, Ranks, reached
from tests.support.saved import equal, state, which
from tests.support.saver import is_gone
from torchrelay.checkpointer import KeepAll, KeepEvery, KeepLast
from torchrelay.coordination.coordinator import Coordinator
from torchrelay.deadlines import Deadline
from torchrelay.stores.local.files import Files
from torchrelay.stores.local.store import LocalStore
from torchrelay.stores.tokens import host_name

SHORT = 2.0  # seconds a call may take that is meant to fail by its deadline
GRACE = 1.5  # seconds past it


class Outcome(NamedTuple):
    """How a call ended, as the rank that made it tells it."""

    error: str | None
    text: str
    seconds: float
    rank: int | None = None
    phase: str | None = None
    file: str | None = None


def attempt(call: Callable[[], Any]) -> Outcome:
    """Call, time it, and keep a typed error as a result. Anything else is a bug."""
    begun = time.monotonic()
    try:
        call()
    except tr.errors.RelayError as fault:
        seconds, file = time.monotonic() - begun, getattr(fault, "file", None)
        return Outcome(type(fault).__name__, str(fault), seconds, fault.rank, fault.phase, file)
    return Outcome(None, "", time.monotonic() - begun)


def mine(rank: int, seed: int, rows: int = 64) -> dict[str, Any]:
    """A rank's state: what it shares with the others, and a tensor that only it has."""
    make = torch.Generator().manual_seed(1000 * seed + rank)
    own = {f"w{rank}": torch.randn(rows, 256, generator=make)}
    return {"model": {**state(seed)["model"], **own}, "seed": seed}


def load_is(rank: int, group: Any, root: str, seed: int, step: int) -> bool:
    """Whether the newest step is this one, whole, on every rank."""
    with tr.Checkpointer(root, group=group, timeout=20) as checkpointer:
        loaded = checkpointer.load()
        return loaded.step == step and equal(loaded.state, mine(rank, seed))


def only_steps(root: Path, *steps: int) -> bool:
    return {path.name for path in root.iterdir()} == {f"step-{step}" for step in steps}


# A full disk -------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 8 MB."""
    path = tmp_path / "disk"
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=8m", "none", str(path)]
    if os.geteuid() or subprocess.run(mount, capture_output=True, timeout=20).returncode:
        pytest.skip("mounting a small file system takes root")
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True, timeout=20)


def fill(path: Path) -> None:
    with path.open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(1 << 16))


class Filling(Files):
    """Somebody else takes the rest of the disk when the first data file is made."""

    def __init__(self, filler: Path) -> None:
        self._filler = filler

    def create(self, path: str) -> int:
        fd = super().create(path)
        if not self._filler.exists():
            fill(self._filler)
        return fd


def found_before(rank: int, group: Any, root: str) -> list[Outcome]:
    with tr.Checkpointer(root, group=group, timeout=20) as checkpointer:
        return [
            attempt(lambda: checkpointer.save(1, mine(rank, 1))),
            attempt(lambda: checkpointer.save(2, mine(rank, 2, rows=6000))),
            attempt(lambda: checkpointer.save_async(3, mine(rank, 3, rows=6000))),
            attempt(lambda: checkpointer.load(step=1)),
        ]


def test_a_full_disk_is_found_before_anything_is_written(pool2: RankPool, small_disk: Path) -> None:
    root = small_disk / "steps"
    for first, second, third, load in pool2.run(found_before, str(root)):
        assert first.error is load.error is None
        for out in (second, third):
            assert (out.error, out.rank, out.phase) == ("CheckpointError", 0, "plan"), out
            assert out.file == str(root) and "are missing" in out.text
            need, free, missing = _numbers(out.text)
            assert need - free == missing > 3 << 20
    assert only_steps(root, 1)
    assert pool2.run(load_is, str(root), 1, 1) == [True, True]


def _numbers(text: str) -> tuple[int, int, int]:
    found = [int(part.replace(",", "")) for part in text.split() if part.replace(",", "").isdigit()]
    need, free, missing = found[:3]
    return need, free, missing


def found_while_writing(rank: int, group: Any, root: str, filler: str) -> list[Outcome]:
    with stores_with(Filling(Path(filler)) if rank == 1 else Files()):
        checkpointer = tr.Checkpointer(root, group=group, timeout=20)
    with checkpointer:
        outs = [attempt(lambda: checkpointer.save(2, mine(rank, 2, rows=1500)))]
        dist.barrier(group)
        outs.append(attempt(lambda: checkpointer.load(step=1)))
        if rank == 0:
            Path(filler).unlink()
            Path(filler).with_suffix(".done").touch()
        dist.barrier(group)
        return outs


def test_a_disk_that_fills_up_is_found_while_writing(pool2: RankPool, small_disk: Path) -> None:
    root, filler = small_disk / "steps", small_disk / "filler"
    pool2.run(save_one, str(root), 1)
    for save, load in pool2.run(found_while_writing, str(root), str(filler)):
        assert (save.error, save.phase) == ("CheckpointError", "write"), save
        assert os.strerror(errno.ENOSPC) in save.text and save.rank in (0, 1)
        assert save.file and f"rank-0000{save.rank}-of-00002" in save.file
        assert load.error is None
    assert only_steps(root, 1)
    assert pool2.run(load_is, str(root), 1, 1) == [True, True]
    pool2.run(save_one, str(root), 3)
    assert pool2.run(load_is, str(root), 3, 3) == [True, True]


def save_one(rank: int, group: Any, root: str, step: int) -> None:
    with tr.Checkpointer(root, group=group, timeout=20) as checkpointer:
        checkpointer.save(step, mine(rank, step))


class NoRoom(Files):
    """A disk that is full whenever `full` says so."""

    full = True

    def write(self, fd: int, data: Any, position: int) -> None:
        if self.full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        super().write(fd, data, position)


def no_room_on_one(rank: int, group: Any, root: str) -> list[Any]:
    files = NoRoom() if rank == 1 else Files()
    with stores_with(files):
        checkpointer = tr.Checkpointer(root, group=group, timeout=20)
    with checkpointer:
        if rank == 1:
            files.full = False
        checkpointer.save(1, mine(rank, 1))
        if rank == 1:
            files.full = True
        outs = [
            attempt(lambda: checkpointer.save(2, mine(rank, 2))),
            attempt(lambda: checkpointer.save(1, mine(rank, 2), overwrite=True)),
        ]
        latest = checkpointer.latest()
        whole = equal(checkpointer.load().state, mine(rank, 1))
        if rank == 1:
            files.full = False
        checkpointer.save(2, mine(rank, 3))
        return [outs, latest, whole, equal(checkpointer.load().state, mine(rank, 3))]


@pytest.mark.parametrize("size", [2, 4])
def test_one_rank_without_room(request: pytest.FixtureRequest, tmp_path: Path, size: int) -> None:
    """Every rank says which rank, in what phase, at which file; training goes on."""
    pool: RankPool = request.getfixturevalue(f"pool{size}")
    for outs, latest, whole, after in pool.run(no_room_on_one, str(tmp_path)):
        for out in outs:
            assert (out.error, out.rank, out.phase) == ("CheckpointError", 1, "write"), out
            assert out.file and f"rank-00001-of-0000{size}" in out.file
            assert os.strerror(errno.ENOSPC) in out.text
        assert (latest, whole, after) == (1, True, True)
    assert only_steps(tmp_path, 1, 2)


# A rank that is gone, or asleep ------------------------------------------------------------------


class Told(Files):
    """Tells the test that it writes a data file, and stays there."""

    def write(self, fd: int, data: Any, position: int) -> None:
        super().write(fd, bytes(data)[:100], position)
        reached("writing", hold=True)


def killed_in_write(rank: int, group: Any, root: str, victim: int) -> Outcome:
    with tr.Checkpointer(root, group=group, timeout=20) as checkpointer:
        checkpointer.save(1, mine(rank, 1))
    with stores_with(Told() if rank == victim else Files()):
        checkpointer = tr.Checkpointer(root, group=group, timeout=20)
    return attempt(lambda: checkpointer.save(1, mine(rank, 2), overwrite=True, timeout=SHORT))


@pytest.mark.parametrize("victim", [1, pytest.param(0, marks=pytest.mark.slow)])
def test_a_rank_killed_in_its_write(pool2: RankPool, tmp_path: Path, victim: int) -> None:
    """The others name it by the deadline. The step that was to be replaced is there, unmixed."""
    other = 1 - victim
    with Ranks(killed_in_write, 2, str(tmp_path), victim) as ranks:
        ranks.wait_reached(victim, "writing")
        ranks.kill(victim)
        results = ranks.results(30)
    assert results[victim] is Killed
    out = results[other]
    # Whoever has written its part cannot know how far the coordinator came.
    told = ("CheckpointError", 1, "write") if victim else ("CommitUnknownError", 0, "commit")
    assert (out.error, out.rank, out.phase) == told, out
    assert out.seconds < SHORT + GRACE
    if victim:
        assert "rank 1 (writing model.rank-00001-of-00002.safetensors)" in out.text
    assert pool2.run(load_is, str(tmp_path), 1, 1) == [True, True]
    assert only_steps(tmp_path, 1)
    pool2.run(save_one, str(tmp_path), 2)
    assert pool2.run(load_is, str(tmp_path), 2, 2) == [True, True]


class Asleep(Files):
    """A write that does not come back before it is woken."""

    def __init__(self) -> None:
        self.woken = threading.Event()

    def write(self, fd: int, data: Any, position: int) -> None:
        if not self.woken.wait(60):
            raise TimeoutError("never woken")
        super().write(fd, data, position)


def asleep(rank: int, group: Any, root: str, sleeper: int) -> list[Any]:
    with tr.Checkpointer(root, group=group, timeout=20) as checkpointer:
        checkpointer.save(1, mine(rank, 1))
    files = Asleep()
    with stores_with(files if rank == sleeper else Files()):
        checkpointer = tr.Checkpointer(root, group=group, timeout=20)
    with checkpointer:
        out = attempt(lambda: checkpointer.save(2, mine(rank, 2), timeout=SHORT))
        whole = equal(checkpointer.load().state, mine(rank, 1))
        files.woken.set()
        checkpointer.save(3, mine(rank, 3))
        return [out, whole, equal(checkpointer.load().state, mine(rank, 3))]


@pytest.mark.parametrize("sleeper", [1, 0])
def test_a_rank_asleep_in_its_write(pool4: RankPool, tmp_path: Path, sleeper: int) -> None:
    results = pool4.run(asleep, str(tmp_path), sleeper)
    for rank, (out, whole, after) in enumerate(results):
        # The rank's own word, or the coordinator's that it has none from it: whichever is first.
        assert out.error in ("StorageTimeoutError", "CheckpointError"), out
        assert out.seconds < SHORT + GRACE, out
        assert (out.rank or sleeper, out.phase) == (sleeper, "write"), (rank, out)
        assert f"rank-0000{sleeper}-of-00004.safetensors" in out.text, (rank, out)
        assert whole and after
    assert not [p for p in tmp_path.iterdir() if p.name.startswith("step-2")] or sleeper


def different_steps(rank: int, group: Any, root: str) -> list[Any]:
    with tr.Checkpointer(root, group=group, timeout=20) as checkpointer:
        outs = [
            attempt(lambda: checkpointer.save(rank, mine(rank, 1))),
            attempt(lambda: checkpointer.save_async(rank, mine(rank, 1))),
        ]
        checkpointer.save(7, mine(rank, 7))
        outs.append(attempt(lambda: checkpointer.load(step=6 + rank)))
        return [outs, equal(checkpointer.load().state, mine(rank, 7))]


def test_ranks_that_mean_different_steps(pool2: RankPool, tmp_path: Path) -> None:
    for outs, whole in pool2.run(different_steps, str(tmp_path)):
        for out in outs:
            assert out.error == "UsageError" and "different" in out.text, out
            assert out.seconds < GRACE
        assert whole
    assert only_steps(tmp_path, 7)


def host_store(link: Connection) -> None:
    store = dist.TCPStore("127.0.0.1", 0, 2, True, timedelta(seconds=20), wait_for_workers=False)
    link.send(store.port)
    link.recv()


class Member:
    """Rank 1 of two, with a store that lives in another process."""

    def __init__(self, port: int) -> None:
        self._store = dist.TCPStore(
            "127.0.0.1", port, 2, False, timedelta(seconds=20), wait_for_workers=False
        )

    def rank(self) -> int:
        return 1

    def size(self) -> int:
        return 2

    def get_group_store(self) -> Any:
        return self._store


def test_the_process_with_the_groups_store_is_gone() -> None:
    """torch keeps a job's store in rank 0: its death is no raw socket error here."""
    ours, theirs = servers.Pipe()
    process = servers.Process(target=host_store, args=(theirs,), daemon=True)
    process.start()
    try:
        assert ours.poll(60)
        call = Coordinator(Member(ours.recv()), "test").call("test")
        timer = threading.Timer(0.3, process.kill)
        timer.start()
        out = attempt(lambda: call.round("write", lambda: b"", lambda said: said, Deadline(20)))
    finally:
        process.kill()
        process.join(20)
    assert out.error == "CheckpointError" and out.phase == "write", out
    assert "store" in out.text and out.seconds < 15
    out = attempt(lambda: call.at("anything"))
    assert out.error is None


# Saves in the background -------------------------------------------------------------------------


def writer_of(checkpointer: tr.Checkpointer) -> int:
    pid = checkpointer._saver.writer.process.pid
    assert pid is not None
    return pid


def limit_writer(checkpointer: tr.Checkpointer, nbytes: int) -> None:
    """From here on the writer process can make no larger files: its writes fail, for real."""
    hard = resource.prlimit(writer_of(checkpointer), resource.RLIMIT_FSIZE)[1]
    resource.prlimit(writer_of(checkpointer), resource.RLIMIT_FSIZE, (nbytes, hard))


def test_a_failure_that_nobody_asked_for(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It is logged, raised by the next call or by `close`, once, and is an `Exception`."""
    with tr.Checkpointer(tmp_path, timeout=20) as checkpointer:
        checkpointer.save(1, state(1))
        checkpointer.prepare(state(2))
        limit_writer(checkpointer, 100)
        checkpointer.save_async(2, state(2))
        with caplog.at_level(logging.ERROR), pytest.raises(Exception) as fault:
            checkpointer.save(3, state(3))
        assert isinstance(fault.value, tr.errors.CheckpointError)
        assert (fault.value.phase, os.strerror(errno.EFBIG) in str(fault.value)) == ("write", True)
        assert fault.value.file and fault.value.file.endswith(".safetensors")
        assert "saving step 2 failed" in caplog.text
        assert which(checkpointer.load().state, [1]) == 1
        checkpointer.save(3, state(3))
        assert which(checkpointer.load().state, [3]) == 3
        # The same by `load`, and not again if somebody has asked.
        pending = checkpointer.save_async(4, state(4))
        while not pending.done():
            time.sleep(0.005)
        with pytest.raises(tr.errors.CheckpointError):
            checkpointer.load()
        assert checkpointer.load().step == 3
        assert isinstance(
            checkpointer.save_async(5, state(5)).exception(20), tr.errors.CheckpointError
        )
        assert checkpointer.load().step == 3
        checkpointer.save_async(6, state(6))
        with pytest.raises(tr.errors.CheckpointError):
            checkpointer.close()
    assert only_steps(tmp_path, 1, 3)


def asked_on_one(rank: int, group: Any, root: str) -> list[Any]:
    with tr.Checkpointer(root, group=group, timeout=20) as checkpointer:
        checkpointer.save(1, mine(rank, 1))
        checkpointer.prepare(mine(rank, 2))
        if rank == 1:
            limit_writer(checkpointer, 100)
        pending = checkpointer.save_async(2, mine(rank, 2))
        asked = attempt(pending.result) if rank == 0 else None
        while not pending.done():
            time.sleep(0.005)
        load = attempt(checkpointer.load)
        again = equal(checkpointer.load().state, mine(rank, 1))
        return [asked, load, again]


def test_a_failure_that_one_rank_asked_for(pool2: RankPool, tmp_path: Path) -> None:
    """The ranks stay in step: what one has not heard yet is raised on all, in time."""
    results = pool2.run(asked_on_one, str(tmp_path))
    assert results[0][0].rank == 1 and results[0][0].phase == "write"
    for _, load, again in results:
        assert load.error == "CheckpointError" and load.rank == 1 and load.seconds < 5, load
        assert again


class HeldCommit(Files):
    """Does not write a commit record before it is let."""

    def __init__(self) -> None:
        self.there, self.go = threading.Event(), threading.Event()

    def create(self, path: str) -> int:
        if path.endswith("manifest.json"):
            self.there.set()
            if not self.go.wait(60):
                raise TimeoutError("never let")
        return super().create(path)


def test_a_second_save_while_one_is_under_way(tmp_path: Path) -> None:
    """ "skip" says so and does nothing, "wait" waits; each step holds what it was given."""
    files = HeldCommit()
    with stores_with(files):
        checkpointer = tr.Checkpointer(tmp_path, timeout=20)
    with checkpointer:
        live = state(2)
        first = checkpointer.save_async(2, live)
        live["model"]["w"].fill_(7)  # it is staged
        assert files.there.wait(20)
        skipped = checkpointer.save_async(3, state(3), on_busy="skip")
        assert skipped.skipped and skipped.done() and skipped.result().skipped
        assert not first.done()
        later: list[tr.Pending] = []
        thread = threading.Thread(
            target=lambda: later.append(checkpointer.save_async(4, state(4), on_busy="wait"))
        )
        thread.start()
        thread.join(0.3)
        assert thread.is_alive() and not later and not first.done()
        files.go.set()
        thread.join(20)
        assert later[0].result(20).skipped is None and first.done()
        for step in (2, 4):
            assert which(checkpointer.load(step=step).state, [step]) == step
    assert only_steps(tmp_path, 2, 4)


def busy(rank: int, group: Any, root: str) -> list[Any]:
    files = HeldCommit()
    with stores_with(files):
        checkpointer = tr.Checkpointer(root, group=group, timeout=20)
    with checkpointer:
        first = checkpointer.save_async(1, mine(rank, 1))
        if rank == 0:
            assert files.there.wait(20)
        dist.barrier(group)
        second = checkpointer.save_async(2, mine(rank, 2), on_busy="skip")
        files.go.set()
        first.result(20)
        third = checkpointer.save_async(3, mine(rank, 3), on_busy="skip")
        checkpointer.wait(20)
        skipped = [one.skipped is not None for one in (second, third)]
        return [*skipped, equal(checkpointer.load().state, mine(rank, 3))]


def test_all_ranks_skip_or_none(pool2: RankPool, tmp_path: Path) -> None:
    assert pool2.run(busy, str(tmp_path)) == [[True, False, True]] * 2
    assert only_steps(tmp_path, 1, 3)


def test_a_lost_writer_process_is_told_and_replaced(tmp_path: Path) -> None:
    with tr.Checkpointer(tmp_path, timeout=20) as checkpointer:
        checkpointer.save_async(1, state(1)).result(20)
        for step in range(2, 7):
            checkpointer.prepare(state(step))
            os.kill(writer_of(checkpointer), signal.SIGKILL)
            with suppress(tr.errors.CheckpointError):  # nothing else may come out
                checkpointer.save_async(step, state(step)).result(20)
        checkpointer.save_async(9, state(9)).result(20)
        assert which(checkpointer.load().state, [9]) == 9
        for step in checkpointer.steps():
            assert which(checkpointer.load(step=step).state, [step]) == step


# Processes that end ------------------------------------------------------------------------------


def started(act: Callable[..., None], *args: Any) -> tuple[Any, Connection]:
    ours, theirs = servers.Pipe()
    process = servers.Process(target=act, args=(theirs, *args), daemon=False)
    process.start()
    theirs.close()
    return process, ours


@pytest.fixture
def children() -> Iterator[list[Any]]:
    """Processes that are ended with the test."""
    made: list[Any] = []
    yield made
    for process in made:
        process.kill()
        process.join(20)


def held_saver(link: Connection, root: str, background: bool) -> None:
    """A trainer that is in the middle of step 2."""
    torch.set_num_threads(1)
    files = HeldCommit()
    with stores_with(files):
        checkpointer = tr.Checkpointer(root, timeout=60)
        act = checkpointer.save_async if background else checkpointer.save
        threading.Thread(target=act, args=(2, state(2)), daemon=True).start()
        assert files.there.wait(30)
        link.send(checkpointer._saver.writer.process.pid)
        link.recv()


@pytest.mark.parametrize("background", [False, True], ids=["save", "save_async"])
def test_a_trainer_killed_in_a_save(tmp_path: Path, children: list[Any], background: bool) -> None:
    """While it lives its draft stays; then it is cleaned up, and was never taken for a step."""
    with tr.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, state(1))
    process, link = started(held_saver, str(tmp_path), background)
    children.append(process)
    assert link.poll(60)
    writer = link.recv()
    with tr.Checkpointer(tmp_path) as other:
        assert other.steps() == [1] and which(other.load().state, [1]) == 1
        drafts = [path.name for path in tmp_path.iterdir() if ".tmp-" in path.name]
        assert len(drafts) == 1 and other._store.clean() == []
    os.kill(process.pid, signal.SIGKILL)
    process.join(20)
    assert process.exitcode == -signal.SIGKILL
    if background:
        end = time.monotonic() + 20
        while not is_gone(writer):
            assert time.monotonic() < end, "the writer process stays"
            time.sleep(0.005)
    assert LocalStore(tmp_path).steps() == [1]
    with tr.Checkpointer(tmp_path) as after:
        assert only_steps(tmp_path, 1)
        assert which(after.load().state, [1]) == 1
        after.save(2, state(22))
        assert which(after.load().state, [22]) == 22


def signalled(link: Connection, root: str, when: str) -> None:
    """A trainer that is asked to end, and saves its state."""
    torch.set_num_threads(1)
    files = HeldCommit()
    if when == "idle":
        files.go.set()
    with stores_with(files):
        checkpointer = tr.Checkpointer(root, timeout=60, keep=KeepAll())
    checkpointer.reached_preemption(0)
    if when != "idle":
        checkpointer.save_async(2, state(2))
        assert files.there.wait(30)
        threading.Thread(target=lambda: (link.recv(), files.go.set()), daemon=True).start()
    link.send("ready")
    step = 8
    while not checkpointer.reached_preemption(step):
        time.sleep(0.01)
    checkpointer.save(9, state(9))
    checkpointer.close()


@pytest.mark.parametrize("when", ["idle", "saving"])
def test_a_job_that_is_asked_to_stop_saves_after_the_save_in_progress(
    tmp_path: Path, children: list[Any], when: str
) -> None:
    process, link = started(signalled, str(tmp_path), when)
    children.append(process)
    assert link.poll(60) and link.recv() == "ready"
    os.kill(process.pid, signal.SIGTERM)
    with suppress(OSError):
        link.send("go on")
    process.join(30)
    assert process.exitcode == 0
    with tr.Checkpointer(tmp_path) as checkpointer:
        assert checkpointer.steps() == ([9] if when == "idle" else [2, 9])
        for step in checkpointer.steps():
            assert which(checkpointer.load(step=step).state, [step]) == step
    assert only_steps(tmp_path, *checkpointer.steps())


# Steps that are there, that stay, that go --------------------------------------------------------


def existing(rank: int, group: Any, root: str) -> list[Any]:
    with tr.Checkpointer(root, group=group, timeout=20) as checkpointer:
        checkpointer.save(1, mine(rank, 1))
        refusals = [
            attempt(lambda: checkpointer.save(1, mine(rank, 2))),
            attempt(lambda: checkpointer.save_async(1, mine(rank, 2))),
        ]
        old = equal(checkpointer.load().state, mine(rank, 1))
        checkpointer.save(1, mine(rank, 2), overwrite=True)
        new = equal(checkpointer.load().state, mine(rank, 2))
        checkpointer.save_async(1, mine(rank, 3), overwrite=True).result(20)
        return [refusals, old, new, equal(checkpointer.load().state, mine(rank, 3))]


def test_a_step_that_is_there_is_refused_or_swapped(pool2: RankPool, tmp_path: Path) -> None:
    for refusals, *held in pool2.run(existing, str(tmp_path)):
        for out in refusals:
            assert (out.error, out.rank) == ("StepExistsError", 0) and "overwrite" in out.text
        assert held == [True] * 3
    assert only_steps(tmp_path, 1)


def test_which_steps_stay() -> None:
    steps = [0, 3, 5, 10, 12, 20, 21]
    assert KeepAll().wanted(steps) == set(steps)
    assert KeepLast(2).wanted(steps) == {20, 21}
    assert KeepLast(99).wanted(steps) == set(steps)
    assert KeepEvery(10).wanted(steps) == {0, 10, 20}
    assert (KeepLast(1) | KeepEvery(5)).wanted(steps) == {0, 5, 10, 20, 21}
    assert (KeepLast(1) | KeepEvery(5) | KeepEvery(3)).wanted(steps) == {*steps}
    assert KeepEvery(7).wanted([1, 2]) == set() == KeepLast(1).wanted([])
    for bad in (lambda: KeepLast(0), lambda: KeepEvery(0), lambda: KeepLast(-1)):
        with pytest.raises(tr.errors.UsageError):
            bad()


def test_steps_go_once_a_newer_one_is_committed(tmp_path: Path) -> None:
    keep = KeepLast(2) | KeepEvery(4)
    with tr.Checkpointer(tmp_path, keep=keep) as checkpointer:
        for step in range(1, 8):
            checkpointer.save(step, state(step))
        assert checkpointer.steps() == [4, 6, 7]
        checkpointer.save_async(8, state(8)).result(20)
        assert checkpointer.steps() == [4, 7, 8]
    assert only_steps(tmp_path, 4, 7, 8)


def test_the_newest_stays_whatever_the_policy_says(tmp_path: Path) -> None:
    with tr.Checkpointer(tmp_path, keep=KeepEvery(100)) as checkpointer:
        for step in (1, 2, 3):
            checkpointer.save(step, state(step))
            assert checkpointer.steps() == [step]


def test_damaged_steps_do_not_count(tmp_path: Path) -> None:
    """The last good one is not given up for steps that nobody can load."""
    with tr.Checkpointer(tmp_path) as checkpointer:
        for step in (1, 2, 3, 4):
            checkpointer.save(step, state(step))
    os.truncate(tmp_path / "step-3" / "model.safetensors", 50)
    (tmp_path / "step-4" / "manifest.json").write_bytes(b"{}")
    with tr.Checkpointer(tmp_path, keep=KeepLast(2)) as checkpointer:
        checkpointer.save(5, state(5))
        assert checkpointer.steps() == [2, 3, 4, 5]
        os.truncate(tmp_path / "step-5" / "model.safetensors", 50)
        with pytest.warns(RuntimeWarning):
            assert checkpointer.load().step == 2


def test_nothing_goes_for_a_save_that_failed(tmp_path: Path) -> None:
    files = NoRoom()
    files.full = False
    with stores_with(files):
        checkpointer = tr.Checkpointer(tmp_path, keep=KeepLast(1))
    with checkpointer:
        checkpointer.save(1, state(1))
        files.full = True
        with pytest.raises(tr.errors.CheckpointError):
            checkpointer.save(2, state(2))
        assert checkpointer.steps() == [1] and which(checkpointer.load().state, [1]) == 1
    assert only_steps(tmp_path, 1)


def test_left_overs_of_another_host_stay_for_a_day(tmp_path: Path) -> None:
    """Its locks may not be visible here."""
    with tr.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, state(1))
    here = host_name()
    names = {host: tmp_path / f"step-5.tmp-{host}-1-ab" for host in (here, "elsewhere")}
    old = tmp_path / "step-6.tmp-elsewhere-1-ab"
    for path in (*names.values(), old):
        path.mkdir()
        (path / "model.safetensors").write_bytes(b"half")
    os.utime(old, (time.time() - 90_000,) * 2)
    with tr.Checkpointer(tmp_path) as checkpointer:
        assert checkpointer.load().step == 1
    left = {path.name for path in tmp_path.iterdir()} - {"step-1"}
    assert left == {names["elsewhere"].name}


class Meanwhile(Files):
    """Another process starts, and cleans up, right after a call."""

    def __init__(self, root: Path, kind: str) -> None:
        self.store = LocalStore(root)
        self.kind = kind
        self.cleaned: list[list[str]] = []

    def make_dir(self, path: str) -> None:
        super().make_dir(path)
        if self.kind == "make_dir" and not self.cleaned:
            self.cleaned.append(self.store.clean())

    def exchange(self, one: str, other: str) -> bool:
        return self.kind != "rename" and super().exchange(one, other)

    def rename(self, old: str, new: str) -> None:
        super().rename(old, new)
        if self.kind == "rename":
            self.cleaned.append(self.store.clean())

    def sync_dir(self, path: str) -> None:
        super().sync_dir(path)
        if self.kind == "sync_dir":
            self.cleaned.append(self.store.clean())


@pytest.mark.parametrize("kind", ["make_dir", "rename", "sync_dir"])
def test_a_process_that_starts_in_the_middle_of_a_save(tmp_path: Path, kind: str) -> None:
    """Its cleaning up takes nothing from a live writer."""
    with tr.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, state(1))
    files = Meanwhile(tmp_path, kind)
    with stores_with(files):
        checkpointer = tr.Checkpointer(tmp_path)
    with checkpointer:
        checkpointer.save(1, state(2), overwrite=True)
        assert files.cleaned
        assert which(checkpointer.load().state, [2]) == 2
        checkpointer.save(3, state(3))
        assert which(checkpointer.load().state, [3]) == 3
    assert only_steps(tmp_path, 1, 3)


def test_an_interrupt_leaves_nothing(tmp_path: Path) -> None:
    """Ctrl-C in a save: it comes out as it is, and the draft is gone."""

    class Interrupted(Files):
        def write(self, fd: int, data: Any, position: int) -> None:
            raise KeyboardInterrupt

    with stores_with(Interrupted()):
        checkpointer = tr.Checkpointer(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        checkpointer.save(1, state(1))
    assert list(tmp_path.iterdir()) == []
    checkpointer.close()


def interrupted(rank: int, group: Any, root: str) -> Outcome | str:
    class Interrupting(Files):
        def write(self, fd: int, data: Any, position: int) -> None:
            raise KeyboardInterrupt

    with stores_with(Interrupting() if rank == 1 else Files()):
        checkpointer = tr.Checkpointer(root, group=group, timeout=20)
    with checkpointer:
        try:
            return attempt(lambda: checkpointer.save(1, mine(rank, 1)))
        except KeyboardInterrupt:
            return "interrupted"


def test_an_interrupt_on_one_rank_is_told_to_the_others(pool2: RankPool, tmp_path: Path) -> None:
    other, hit = pool2.run(interrupted, str(tmp_path))
    assert hit == "interrupted"
    assert other.error == "CheckpointError" and other.rank == 1 and other.seconds < 5, other
    assert list(tmp_path.iterdir()) == []
