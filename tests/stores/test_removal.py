"""Deleting steps while others clean up, while the storage fails, and below unreadable parents."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import torchrelay as tr
from tests.stores.test_conformance import contents, save
from tests.support.forks import in_process
from tests.support.s3 import BUCKET, S3
from tests.support.saved import state
from torchrelay.stores.local.files import Files, atomic_file
from torchrelay.stores.local.store import LocalStore
from torchrelay.stores.objects.store import ObjectStore

NOBODY = 65534


# Several processes remove at once ----------------------------------------------------------------


class _CleanedMeanwhile(Files):
    """Another process of this host cleans up right after one of our calls."""

    def __init__(self, root: Path) -> None:
        self.other = LocalStore(root)
        self.cleaned: list[list[str]] = []

    def rename(self, old: str, new: str) -> None:
        super().rename(old, new)
        self.cleaned.append(self.other.clean())


def test_a_directory_that_is_being_deleted_is_not_cleaned_up_by_others(tmp_path: Path) -> None:
    save(LocalStore(tmp_path), 1, {"a.safetensors": b"a"})
    files = _CleanedMeanwhile(tmp_path)
    LocalStore(tmp_path, files=files).delete(1)
    assert files.cleaned == [[]]
    assert list(tmp_path.iterdir()) == []


class _RemovedMeanwhile(Files):
    """A process of another host, whose locks are not visible here, removes the same directory."""

    def __init__(self, at: str) -> None:
        self.at = at

    def sync_dir(self, path: str) -> None:
        super().sync_dir(path)
        if self.at == "before":
            for place in Path(path).glob("step-*.tmp-*"):
                shutil.rmtree(place)

    def unlink(self, path: str, within: int | None = None) -> None:
        if self.at == "at the first file":
            shutil.rmtree(Path(path).parent)
        super().unlink(path, within)

    def remove_dir(self, path: str) -> None:
        if self.at == "at the end":
            shutil.rmtree(path)
        super().remove_dir(path)


@pytest.mark.parametrize("at", ["before", "at the first file", "at the end"])
def test_a_step_that_two_processes_remove_is_removed(tmp_path: Path, at: str) -> None:
    save(LocalStore(tmp_path), 1, {"a.safetensors": b"a", "b.safetensors": b"b"})
    LocalStore(tmp_path, files=_RemovedMeanwhile(at)).delete(1)
    assert list(tmp_path.iterdir()) == []


def test_a_step_that_cannot_be_removed_does_not_keep_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with tr.Checkpointer(tmp_path) as every:
        for step in (1, 2, 3):
            every.save(step, state(step))
    rename = Files.rename

    def refuse(self: Files, old: str, new: str) -> None:
        if Path(old).name == "step-1":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), old)
        rename(self, old, new)

    monkeypatch.setattr(Files, "rename", refuse)
    with caplog.at_level(logging.WARNING), tr.Checkpointer(tmp_path, keep=tr.KeepLast(1)) as held:
        held.save(4, state(4))
        assert held.steps() == [1, 4]
    assert "step-1" in caplog.text


# A bucket that does not answer -------------------------------------------------------------------


@pytest.fixture
def url(s3: S3) -> str:
    pytest.importorskip("obstore")
    return s3.url("runs/a")


@pytest.mark.parametrize("status", [403, 500])
def test_a_record_that_cannot_be_read_now_is_not_removed(s3: S3, url: str, status: int) -> None:
    store = ObjectStore(url, timeout=4)
    save(store, 1, {"a.safetensors": b"a"})
    s3.hook = lambda method, path: status if method == "GET" and "manifest" in path else None
    with pytest.raises(OSError, match="step-1"):
        store.delete(1)
    s3.hook = None
    assert not s3.seen("DELETE|POST.*delete")
    assert contents(store, 1) == {"a.safetensors": b"a"}


def test_a_record_that_no_one_can_ever_read_is_removed(
    s3: S3, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = ObjectStore(url, timeout=20)
    save(store, 1, {"a.safetensors": b"a"})
    monkeypatch.setattr("torchrelay.stores.objects.step.MAX_MANIFEST_BYTES", 8)
    store.delete(1)
    assert store.steps() == []
    assert ObjectStore(url, timeout=20, grace=0).clean() == ["step-1/host-1-a"]
    status, body, _ = s3.ask("GET", f"/{BUCKET}?list-type=2&prefix=runs/a")
    assert status == 200 and b"<Key>" not in body


# Parents that may not be read --------------------------------------------------------------------


@pytest.fixture
def shared() -> Iterator[Path]:
    """A directory that every user may reach, unlike those of pytest."""
    place = Path(tempfile.mkdtemp())
    place.chmod(0o755)
    yield place
    shutil.rmtree(place)


def _as_nobody(root: str, made: bool) -> Any:
    if os.geteuid() == 0:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
    with pytest.raises(PermissionError):
        list(Path(root).parent.iterdir())
    with tr.Checkpointer(root) as held:
        held.save(1, {"w": torch.ones(3)})
        found = held.steps()
    if made:
        with atomic_file(Path(root).with_name("beside")) as file:
            file.write(b"x")
    return found


@pytest.mark.parametrize("made", [False, True], ids=["the root exists", "the root is made"])
def test_steps_are_saved_below_a_parent_that_may_not_be_read(shared: Path, made: bool) -> None:
    parent = shared / "parent"
    parent.mkdir()
    if not made:
        (parent / "root").mkdir()
        if os.geteuid() == 0:
            os.chown(parent / "root", NOBODY, NOBODY)
    if made and os.geteuid() == 0:
        os.chown(parent, NOBODY, NOBODY)
    parent.chmod(0o311)
    try:
        assert in_process(_as_nobody, str(parent / "root"), made) == [1]
    finally:
        parent.chmod(0o755)
