"""Loads beside other processes and on media that do not answer: the step that was asked for, whole,
or an error that says so; never another one in silence."""

from __future__ import annotations

import errno
import os
import resource
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import typer

import torchrelay as tr
from tests.support.ranks import RankPool, run_ranks
from tests.support.s3 import S3
from tests.support.saved import equal, state
from torchrelay.cli.commands.steps import listed
from torchrelay.cli.output import in_words, one_line_errors
from torchrelay.cli.sources import opened_source
from torchrelay.loading.rank_load import RankLoad
from torchrelay.stores.listing import MAX_MANIFEST_BYTES
from torchrelay.stores.local import step as local_reader
from torchrelay.stores.local.store import LocalStore
from torchrelay.stores.locate import open_store

PLACES: dict[str, Callable[[pytest.FixtureRequest], str]] = {
    "local": lambda request: str(request.getfixturevalue("tmp_path") / "run"),
    "s3": lambda request: str(request.getfixturevalue("s3").url("run")),
}


@pytest.fixture(params=PLACES)
def root(request: pytest.FixtureRequest) -> str:
    return PLACES[request.param](request)


def saved(root: str | Path, *steps: int) -> None:
    with tr.Checkpointer(root, timeout=60) as held:
        for step in steps:
            held.save(step, state(step))


def once_before(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, act: Callable[[], object]
) -> None:
    """Do something right before the first call of a method."""
    original = getattr(owner, name)
    done: list[int] = []

    def method(*args: Any, **more: Any) -> Any:
        if not done:
            done.append(1)
            act()
        return original(*args, **more)

    monkeypatch.setattr(owner, name, method)


# What is checked is what is landed ---------------------------------------------------------------


def test_a_step_that_was_overwritten_after_the_check_was_mixed_with_its_successor(
    root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(root, 1)
    other = tr.Checkpointer(root, timeout=60)
    once_before(monkeypatch, RankLoad, "end", lambda: other.save(1, state(2), overwrite=True))
    with (
        other,
        tr.Checkpointer(
            root, timeout=60, options=tr.options.CheckpointerOptions(read_only=True)
        ) as held,
    ):
        into = state(0)
        held.load(into)
        assert equal(into, state(1))
        held.load(into)
        assert equal(into, state(2))


def test_a_step_that_was_overwritten_after_its_record_was_read_is_read_again(
    root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(root, 0, 1)
    other = tr.Checkpointer(root, timeout=60)
    once_before(monkeypatch, RankLoad, "__init__", lambda: other.save(1, state(2), overwrite=True))
    with (
        other,
        tr.Checkpointer(
            root, timeout=60, options=tr.options.CheckpointerOptions(read_only=True)
        ) as held,
    ):
        into = state(9)
        got = held.load(into, step=1)
        assert equal(into, state(2)) and got.report.attempts == ()


def test_bytes_that_change_in_place_after_the_check_do_not_pass_as_verified(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(tmp_path, 1)
    file = tmp_path / "step-1" / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    rotten = bytes(data)

    def scribble() -> None:
        with file.open("r+b") as out:
            out.write(rotten)

    once_before(monkeypatch, RankLoad, "end", scribble)
    with tr.Checkpointer(tmp_path, options=tr.options.CheckpointerOptions(read_only=True)) as held:
        with pytest.raises(tr.errors.RelayError):
            held.load(state(0), step=1)


def beside(rank: int, group: Any, root: str, how: str) -> list[str]:
    """Rank 0 saves over and over while rank 1 loads; what was wrong with the loads."""
    done = Path(root) / "done"
    if rank == 0:
        with tr.Checkpointer(root, no_dist=True, keep=1) as held:
            step = 1
            while not done.exists():
                if how == "overwrite":
                    held.save(1, state(step % 50), overwrite=True)
                else:
                    held.save(step, state(step))
                step += 1
        return []
    wrong = []
    seen = set()
    try:
        with tr.Checkpointer(
            root, no_dist=True, timeout=20, options=tr.options.CheckpointerOptions(read_only=True)
        ) as held:
            while held.latest() is None:
                time.sleep(0.01)
            into = state(77)
            end = time.monotonic() + 40
            while len(seen) < 10 and time.monotonic() < end:
                got = held.load(into)
                seen.add(into["seed"])
                if got.report.attempts or not equal(into, state(into["seed"])):
                    wrong.append(f"{got.step} {into['seed']} {got.report.attempts}")
                if how == "keep one" and (held.latest() or 0) < got.step:
                    wrong.append(f"{held.latest()} after {got.step}")
    finally:
        done.touch()
    return wrong if len(seen) > 1 else ["nothing was saved meanwhile"]


@pytest.mark.parametrize("how", ["overwrite", "keep one"])
def test_loads_beside_a_trainer_that_replaces_its_only_step(
    pool2: RankPool, tmp_path: Path, how: str
) -> None:
    assert pool2.run(beside, str(tmp_path), how, timeout=90) == [[], []]


# List again, then load ---------------------------------------------------------------------------


@pytest.mark.parametrize("moment", ["opened", "planned"])
def test_a_step_that_is_pruned_while_it_is_loaded_has_a_successor(
    root: str, moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(root, 1)
    trainer = tr.Checkpointer(root, keep=tr.KeepLast(1), timeout=60)
    reader = tr.Checkpointer(
        root, timeout=60, options=tr.options.CheckpointerOptions(read_only=True)
    )
    owner: Any = type(reader._store) if moment == "opened" else RankLoad
    name = "open" if moment == "opened" else "check"
    once_before(monkeypatch, owner, name, lambda: trainer.save(2, state(2)))
    into = state(0)
    with trainer, reader:
        got = reader.load(into)
        assert got.report.attempts == ()
    assert got.step == 2 and equal(into, state(2))


def test_a_listing_that_is_overtaken_by_a_trainer_is_made_again(
    root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(root, 1)
    with tr.Checkpointer(root, keep=tr.KeepLast(1), timeout=60) as trainer:
        with tr.Checkpointer(
            root, timeout=60, options=tr.options.CheckpointerOptions(read_only=True)
        ) as reader:
            store: Any = reader._store
            local = isinstance(store, LocalStore)
            owner, name = (store._root, "folders") if local else (store, "listing")
            original = getattr(owner, name)
            calls: list[int] = []

            def listing() -> Any:
                found = original()
                calls.append(1)
                if len(calls) == 1:
                    trainer.save(2, state(2))
                return found

            monkeypatch.setattr(owner, name, listing)
            assert reader.steps() == [2]


# What cannot be read -----------------------------------------------------------------------------


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int], list[str]]:
    """Makes the next so many openings of files of step 2 fail with an error number."""

    def fail(code: int, times: int) -> list[str]:
        original = local_reader.open_plain
        tries: list[str] = []

        def open_plain(path: str, within: int | None) -> int:
            if "step-2" in path and len(tries) < times:
                tries.append(path)
                raise OSError(code, os.strerror(code), path)
            return original(path, within)

        monkeypatch.setattr(local_reader, "open_plain", open_plain)
        return tries

    return fail


@pytest.mark.parametrize("code", [errno.EIO, errno.EMFILE, errno.ESTALE])
def test_a_read_that_fails_for_a_while_is_not_damage(
    tmp_path: Path, failing: Callable[[int, int], list[str]], code: int
) -> None:
    saved(tmp_path, 1, 2)
    tries = failing(code, 5)
    with tr.Checkpointer(
        tmp_path, timeout=30, options=tr.options.CheckpointerOptions(read_only=True)
    ) as held:
        into = state(0)
        got = held.load(into)
        assert (got.step, got.report.attempts) == (2, ()) and equal(into, state(2))
        assert len(tries) == 5


@pytest.mark.parametrize("owner", [local_reader, local_reader.LocalReader])
def test_a_read_that_hangs_ends_at_the_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: Any
) -> None:
    saved(tmp_path, 1, 2)
    name = "open_plain" if owner is local_reader else "read_into"
    original = getattr(owner, name)
    answers = threading.Event()

    def hangs(*args: Any) -> Any:
        answers.wait(60)
        return original(*args)

    monkeypatch.setattr(owner, name, hangs)
    try:
        with tr.Checkpointer(
            tmp_path, timeout=2, options=tr.options.CheckpointerOptions(read_only=True)
        ) as held:
            into = state(0)
            begun = time.monotonic()
            with pytest.raises(tr.errors.StorageTimeoutError):
                held.load(into)
            assert time.monotonic() - begun < 20 and equal(into, state(0))
            answers.set()
            assert held.load(into, timeout=60).step == 2 and equal(into, state(2))
    finally:
        answers.set()


@pytest.mark.parametrize("code", [errno.EIO, errno.EACCES])
def test_a_read_that_fails_for_good_is_raised_and_no_older_step_is_taken(
    tmp_path: Path, failing: Callable[[int, int], list[str]], code: int
) -> None:
    saved(tmp_path, 1, 2)
    failing(code, 10**9)
    with tr.Checkpointer(
        tmp_path, timeout=3, options=tr.options.CheckpointerOptions(read_only=True)
    ) as held:
        into = state(0)
        begun = time.monotonic()
        with pytest.raises(tr.errors.CheckpointError, match="step-2") as told:
            held.load(into)
        assert not isinstance(told.value, (tr.errors.DamagedError, tr.errors.StepNotFoundError))
        assert time.monotonic() - begun < 20 and equal(into, state(0))
        for look in (held.latest, lambda: held.record(2), lambda: held.holds(2)):
            with pytest.raises(tr.errors.CheckpointError) as told:
                look()
            assert not isinstance(told.value, (tr.errors.DamagedError, tr.errors.StepNotFoundError))


def test_a_bucket_that_is_busy_for_a_while_does_not_cost_the_newest_step(s3: S3) -> None:
    saved(s3.url("run"), 1, 2)
    with tr.Checkpointer(
        s3.url("run"), timeout=9, options=tr.options.CheckpointerOptions(read_only=True)
    ) as held:
        end = time.monotonic() + 3.5  # longer than the library tries by itself

        def busy(method: str, path: str) -> int | None:
            return 503 if "step-2" in path and time.monotonic() < end else None

        s3.hook = busy
        got = held.load()
        assert (got.step, got.report.attempts) == (2, ())


@pytest.mark.parametrize(
    ("bucket", "status", "why"),
    [("bucket", 403, "403 Forbidden: Refused"), ("other", None, "NoSuchBucket: The specified")],
)
def test_a_bucket_that_refuses_is_not_asked_again_until_the_deadline(
    s3: S3, bucket: str, status: int | None, why: str
) -> None:
    """Wrong credentials, or a wrong name, took as long as a call may take to be told."""
    s3.hook = lambda method, path: status
    with tr.Checkpointer(
        f"s3://{bucket}/run",
        no_dist=True,
        timeout=60,
        options=tr.options.CheckpointerOptions(read_only=True),
    ) as there:
        for act in (there.load, there.verify, there.steps):
            before = len(s3.requests)
            with pytest.raises(tr.errors.CheckpointError, match=f"cannot list the steps: .*{why}"):
                act()
            assert len(s3.requests) == before + 1


MANY = 160


def few_files(rank: int, group: Any, root: str) -> list[bool]:
    """Save and load a step of many files in a process that may open few."""
    used = len(list(Path("/proc/self/fd").iterdir()))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    made = {f"w{i}": {"x": torch.full((4,), float(i))} for i in range(MANY)}
    with tr.Checkpointer(root, group=group, timeout=60) as held:
        resource.setrlimit(resource.RLIMIT_NOFILE, (used + 50, hard))
        try:
            held.save(1, made)
            held.save_async(2, made).result(60)
            into = {f"w{i}": {"x": torch.zeros(4)} for i in range(MANY)}
            whole = [equal(held.load(into, step=2).state, made)]
            return [*whole, equal(held.load(step=1).state, made), held.verify(1) == 1]
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_step_of_many_files_is_saved_and_loaded_with_few_open(tmp_path: Path) -> None:
    # New processes: what others left open, and close meanwhile, would count.
    assert run_ranks(few_files, 2, str(tmp_path), timeout=90) == [[True] * 3] * 2
    assert len(list((tmp_path / "step-1").iterdir())) == MANY + 1


# Not a regular file ------------------------------------------------------------------------------


def fifo(path: Path) -> None:
    os.mkfifo(path)


def device(path: Path) -> None:
    path.symlink_to("/dev/zero")


@pytest.mark.parametrize("name", ["manifest.json", "model.safetensors"])
@pytest.mark.parametrize("make", [fifo, device])
def test_what_is_no_plain_file_is_damage_and_is_not_waited_for(
    tmp_path: Path, name: str, make: Callable[[Path], None]
) -> None:
    saved(tmp_path, 1, 2)
    (tmp_path / "step-2" / name).unlink()
    make(tmp_path / "step-2" / name)
    with tr.Checkpointer(tmp_path, timeout=60) as held:
        into = state(0)
        with pytest.raises(tr.errors.DamagedError, match="not a regular file"):
            held.load(into, step=2)
        with pytest.raises(tr.errors.DamagedError):
            held.verify(2)
        assert not held.holds(2) and held.latest() == 1
        with pytest.warns(RuntimeWarning, match="step 2"):
            assert held.load(into).step == 1
        held.delete(2)
        assert held.steps() == [1]


@pytest.mark.parametrize("name", ["manifest.json", "model.safetensors"])
def test_an_object_that_announces_a_tebibyte_is_refused(
    s3: S3,
    name: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    saved(s3.url("run"), 1, 2)
    ask = s3.ask

    def lie(method: str, path: str, *more: Any) -> tuple[int, bytes, dict[str, str]]:
        status, content, headers = ask(method, path, *more)
        if "step-2" in path and name in path and "list-type" not in path:
            headers["content-length"] = str(1 << 40)
            if "content-range" in headers:
                headers["content-range"] = f"bytes 0-{(1 << 40) - 1}/{1 << 40}"
        return status, content, headers

    monkeypatch.setattr(s3, "ask", lie)
    assert MAX_MANIFEST_BYTES < 1 << 40
    with tr.Checkpointer(
        s3.url("run"), timeout=20, options=tr.options.CheckpointerOptions(read_only=True)
    ) as held:
        into = state(0)
        with pytest.raises(tr.errors.DamagedError, match="step-2"):
            held.load(into, step=2)
        assert equal(into, state(0))
        monkeypatch.setattr(s3, "ask", ask)


def test_a_local_store_reads_by_way_of_the_directory_that_it_opened(tmp_path: Path) -> None:
    saved(tmp_path, 1)
    held = LocalStore(tmp_path).open(1)
    before = held.manifest()
    (tmp_path / "step-1").rename(tmp_path / "elsewhere")
    saved(tmp_path, 1)
    assert held.manifest() == before and held.sizes()
    held.reader("model.safetensors").read_into(0, memoryview(bytearray(8)))
    held.close()


@contextmanager
def forbidding() -> Iterator[tuple[Path, Callable[[Path], None]]]:
    """A directory, and a function that takes away the right to read a path, from root too."""
    mine, closed = os.geteuid(), []

    def forbid(path: Path) -> None:
        path.chmod(0)
        closed.append(path)
        if mine == 0:
            os.seteuid(65534)

    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        try:
            yield Path(folder), forbid
        finally:
            os.seteuid(mine)
            for path in closed:
                path.chmod(0o755)


def test_a_step_that_may_not_be_read_is_named_and_hides_no_other() -> None:
    with forbidding() as (folder, forbid):
        saved(folder / "run", 1, 2, 3)
        forbid(folder / "run" / "step-2")
        with tr.Checkpointer(
            folder / "run", no_dist=True, options=tr.options.CheckpointerOptions(read_only=True)
        ) as there:
            assert there.steps() == [1, 2, 3]
            assert there.load().step == there.verify() == there.latest() == 3
            assert there.load(step=1).step == 1
            for act in (there.record, there.holds, there.verify, lambda n: there.load(step=n)):
                with pytest.raises(tr.errors.CheckpointError, match="Permission denied") as caught:
                    act(2)
                assert caught.value.step == 2 and type(caught.value) is tr.errors.CheckpointError
            rows = [listed(open_store(folder / "run"), step) for step in there.steps()]
        assert ["time" in row for row in rows] == [True, False, True]
        assert in_words(rows[1]).startswith("not checked: cannot be read: Permission denied")


def test_a_place_that_may_not_be_read_is_an_error_of_one_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with forbidding() as (folder, forbid):
        saved(folder / "run", 1)
        forbid(folder / "run")
        with pytest.raises(typer.Exit), one_line_errors(), opened_source(str(folder / "run")):
            pass
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("error: Permission denied [") and str(folder / "run") in line
