"""What a caller may hand to a `Checkpointer`, and what a place may turn out to be."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

import torchrelay as tr
from tests.support.s3 import BUCKET, S3
from tests.support.saved import equal, state
from torchrelay.dcp import Reader, Writer
from torchrelay.deadlines import Deadline
from torchrelay.dropin.conversion import convert
from torchrelay.stores.locate import open_store

# Places ----------------------------------------------------------------------

DOORS: dict[str, Callable[[str], object]] = {
    "Checkpointer": tr.Checkpointer,
    "dcp.Writer": Writer,
    "dcp.Reader": Reader,
    "convert from": lambda place: convert(place, "target"),
}


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("place", ["ftp://host/run", "hdfs://host/run", "s4://b/run", "x+y://b"])
def test_a_scheme_that_is_not_known_was_taken_for_a_directory(
    door: str, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(tr.errors.UsageError, match=r"file://, s3://, gs://, az://"):
        DOORS[door](place)
    assert list(tmp_path.iterdir()) == []


def test_a_scheme_in_capitals_is_the_same_scheme(s3: S3, tmp_path: Path) -> None:
    with tr.Checkpointer(s3.url("run").replace("s3://", "S3://"), timeout=60) as held:
        held.save(1, state(1))
        assert held.url == s3.url("run")
    with tr.Checkpointer(f"FILE://{tmp_path}/run") as held:
        assert held.url == f"{tmp_path}/run"


@pytest.mark.parametrize("place", [Path("s3://bucket/run"), Path("gs://b"), "", b""])
def test_a_place_that_is_none_is_refused(
    place: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(tr.errors.UsageError):
        tr.Checkpointer(place)
    assert list(tmp_path.iterdir()) == []


def test_the_home_directory_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    with tr.Checkpointer("~/run") as held:
        held.save(1, state(1))
    assert (tmp_path / "home" / "run" / "step-1").is_dir()
    assert not (tmp_path / "~").exists()
    with pytest.raises(tr.errors.UsageError, match="nobody-has-this-name"):
        tr.Checkpointer("~nobody-has-this-name/run")


# A place that is no place ----------------------------------------------------------------------


def uses(root: str | Path, timeout: float = 6) -> dict[str, Callable[[], object]]:
    def reader() -> tr.Checkpointer:
        return tr.Checkpointer(
            root, timeout=timeout, options=tr.options.CheckpointerOptions(read_only=True)
        )

    return {
        "make": lambda: tr.Checkpointer(root, timeout=timeout),
        "steps": lambda: reader().steps(),
        "latest": lambda: reader().latest(),
        "load": lambda: reader().load(),
        "load a step": lambda: reader().load(step=1),
        "verify": lambda: reader().verify(),
    }


@pytest.mark.parametrize("what", ["file", "below a file"])
def test_a_root_that_is_a_file_is_told_in_words(tmp_path: Path, what: str) -> None:
    (tmp_path / "root").write_text("text")
    root = tmp_path / "root" if what == "file" else tmp_path / "root" / "below"
    for name, use in uses(root).items():
        with pytest.raises(tr.errors.RelayError, match="root"):
            use()
            pytest.fail(name)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_a_root_that_cannot_be_read_is_told_in_words(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir(mode=0o700)
    os.seteuid(65534)
    try:
        for name, use in uses(tmp_path / "run").items():
            with pytest.raises(tr.errors.CheckpointError, match="run"):
                use()
                pytest.fail(name)
    finally:
        os.seteuid(0)


def test_a_dead_endpoint_is_told_in_words_and_in_time(
    s3: S3,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{unused.getsockname()[1]}")
        for name in ("make", "steps", "load"):
            begun = time.monotonic()
            with pytest.raises(tr.errors.CheckpointError, match="s3://bucket/run"):
                uses("s3://bucket/run", timeout=2)[name]()
            assert time.monotonic() - begun < 30


@pytest.mark.parametrize("key", ["/x", "../x", "./x", "\x01", "step-1//x", "step-2/../x", "a b/é%"])
def test_objects_with_odd_names_stopped_the_checkpointer(s3: S3, key: str) -> None:
    assert s3.ask("PUT", f"/{BUCKET}/{quote(f'run/{key}')}", b"x")[0] == 200
    with tr.Checkpointer(s3.url("run"), keep=1, timeout=60) as held:
        for step in (1, 2):
            held.save(step, state(step))
        assert held.steps() == [2] and held.latest() == 2
        assert equal(held.load().state, state(2))


# Arguments ----------------------------------------------------------------------


def test_a_timeout_is_seconds_or_a_timedelta(tmp_path: Path) -> None:
    minute = timedelta(minutes=1)
    assert Deadline(minute).seconds == 60
    with tr.Checkpointer(tmp_path, timeout=minute) as held:
        held.save(1, state(1), timeout=minute)
        assert held.save_async(2, state(2), timeout=minute).result(minute) is not None
        held.wait(minute)
        assert held.load(timeout=minute).step == 2
        assert held.rollback(1, timeout=minute) == [2]
    Writer(tmp_path, timeout=minute)
    assert open_store("gs://bucket/run", timeout=minute).url == "gs://bucket/run"


@pytest.mark.parametrize("timeout", ["5", True, 0, -1, float("nan"), timedelta(0), [5]])
def test_a_timeout_that_is_none_is_refused_at_once(tmp_path: Path, timeout: Any) -> None:
    with pytest.raises(tr.errors.UsageError, match="timeout"):
        tr.Checkpointer(tmp_path / "run", timeout=timeout)
    with tr.Checkpointer(tmp_path / "run") as held:
        for act in (
            lambda: held.save(1, state(1), timeout=timeout),
            lambda: held.save_async(1, state(1), timeout=timeout),
            lambda: held.load(timeout=timeout),
        ):
            with pytest.raises(tr.errors.UsageError, match="timeout"):
                act()


def test_a_number_of_steps_to_keep_is_a_policy(tmp_path: Path) -> None:
    with tr.Checkpointer(tmp_path, keep=2) as held:
        for step in (1, 2, 3):
            held.save(step, state(step))
        assert held.steps() == [2, 3]
    assert (tr.KeepEvery(10) | 3).wanted([10, 11, 12, 13]) == {10, 11, 12, 13}


@pytest.mark.parametrize("keep", [0, -1, True, 1.5, "3", [3], tr.KeepLast])
def test_a_policy_that_is_none_is_refused_at_once(tmp_path: Path, keep: Any) -> None:
    with pytest.raises(tr.errors.UsageError, match=r"keep|Keep"):
        tr.Checkpointer(tmp_path, keep=keep)
    with pytest.raises(tr.errors.UsageError):
        tr.KeepLast(keep)
    with pytest.raises(tr.errors.UsageError):
        tr.KeepEvery(keep)


@pytest.mark.parametrize("into", [False, True])
def test_a_pattern_that_matches_nothing_said_success(tmp_path: Path, into: bool) -> None:
    with tr.Checkpointer(tmp_path) as held:
        held.save(1, state(1))
        mine = state(0) if into else None
        with pytest.raises(tr.errors.MismatchError, match=r"modl\.\*.*model") as told:
            held.load(mine, include="modl.*")
        assert "optim" not in str(told.value)
        with pytest.raises(tr.errors.MismatchError, match=r"zzz.*clock, model, optim, seed"):
            held.load(mine, include=["model.*", "zzz"])
        with pytest.raises(tr.errors.MismatchError, match=r"model\.wt.*model\.w"):
            held.load(mine, include="model.wt")
        assert mine is None or equal(mine, state(0))
        assert held.load(include=["model.*", "seed"]).state.keys() == {"model", "seed"}
