"""Directories on a network file system: calls sent twice, names seen late, several hosts."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

import torchrelay as tr
from tests.stores.test_conformance import contents, save
from tests.support.saved import state
from torchrelay.stores import tokens
from torchrelay.stores.local.files import Files, atomic_file
from torchrelay.stores.local.store import LocalStore


@pytest.fixture
def sent_twice(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The answer to a rename is late, and the client sends it again; the names that were given."""
    replace, given = Path.replace, []

    def twice(self: Path, target: str) -> None:
        replace(self, target)
        given.append(Path(target).name)
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(self))

    monkeypatch.setattr(Path, "replace", twice)
    monkeypatch.setattr(Files, "exchange", lambda self, one, other: False)
    yield given


def test_a_rename_that_is_sent_twice_has_happened(tmp_path: Path, sent_twice: list[str]) -> None:
    store = LocalStore(tmp_path)
    save(store, 1, {"a.safetensors": b"a"})
    assert contents(store, 1) == {"a.safetensors": b"a"}
    save(store, 1, {"a.safetensors": b"new"}, overwrite=True)
    assert contents(store, 1) == {"a.safetensors": b"new"}
    store.delete(1)
    assert list(tmp_path.iterdir()) == []
    with atomic_file(tmp_path / "beside") as file:
        file.write(b"x")
    assert (tmp_path / "beside").read_bytes() == b"x"
    assert len(sent_twice) == 5


def test_a_model_is_exported_by_a_rename_that_is_sent_twice(
    tmp_path: Path, sent_twice: list[str]
) -> None:
    with tr.Checkpointer(tmp_path / "run") as held:
        held.save(1, state(1))
        held.export_hf(tmp_path / "model", key="model")
    assert (tmp_path / "model" / "model.safetensors").exists()
    assert sent_twice == ["step-1", "model"]


@pytest.mark.parametrize("code", [errno.ENOENT, errno.EIO])
def test_a_rename_that_did_not_happen_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def fail(self: Path, target: str) -> None:
        raise OSError(code, os.strerror(code), str(self))

    (tmp_path / "old").mkdir()
    (tmp_path / "new").mkdir()
    with pytest.raises(FileNotFoundError):
        Files().rename(str(tmp_path / "nothing"), str(tmp_path / "new"))
    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(OSError, match=os.strerror(code)):
        Files().rename(str(tmp_path / "old"), str(tmp_path / "new"))


# Hosts whose locks are not visible to each other -------------------------------------------------


@pytest.fixture
def on_host(monkeypatch: pytest.MonkeyPatch) -> Iterator[object]:
    """Continue on another host. All of them are called "localhost"."""
    monkeypatch.setattr(socket, "gethostname", lambda: "localhost")

    def turn_to(host: str) -> None:
        monkeypatch.setattr(tokens, "machine", lambda: host)
        tokens.host_name.cache_clear()

    yield turn_to
    tokens.host_name.cache_clear()


def test_hosts_of_one_name_leave_each_others_drafts_alone(tmp_path: Path, on_host: object) -> None:
    assert callable(on_host)
    on_host("one")
    draft = tmp_path / f"step-1.tmp-{tokens.new_token()}"
    draft.mkdir()
    (draft / "model.safetensors").write_bytes(b"half")
    assert tokens.new_token().startswith("localhost.")
    on_host("another")
    assert LocalStore(tmp_path).clean() == []
    on_host("one")
    assert LocalStore(tmp_path).clean() == [draft.name]
