"""Failures name their cause first, then the remedy; names that cannot work are refused early."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch

import torchrelay as tr
from tests.support.s3 import S3
from tests.support.saved import state
from torchrelay.errors import CheckpointError, ResourceError, UsageError
from torchrelay.stores.local import draft, step
from torchrelay.stores.local.files import Files
from torchrelay.stores.objects.store import ObjectStore


def test_a_missing_bucket_is_named_first_with_a_remedy(s3: S3) -> None:
    pytest.importorskip("obstore")
    remedy = "the bucket 'other' does not exist: create it, or correct its name, the region"
    with tr.Checkpointer(
        "s3://other/run", no_dist=True, options=tr.options.CheckpointerOptions(read_only=True)
    ) as held:
        with pytest.raises(CheckpointError, match=f"^cannot list the steps: {remedy}"):
            held.load()
    with pytest.raises(CheckpointError, match=remedy):
        tr.Checkpointer("s3://other/run", no_dist=True)
    sink = ObjectStore("s3://other/run", timeout=30).draft(1, "t").open("a.safetensors", 1)
    sink.write(0, b"a")
    with pytest.raises(OSError, match=remedy) as caught:
        sink.finish()
    assert caught.value.errno == errno.ENODEV


def test_refused_credentials_are_named_first_with_a_remedy(s3: S3) -> None:
    pytest.importorskip("obstore")
    s3.hook = lambda method, path: 403
    with tr.Checkpointer(
        s3.url("run"), no_dist=True, options=tr.options.CheckpointerOptions(read_only=True)
    ) as held:
        why = "cannot list the steps: access to the bucket 'bucket' is refused: correct the cred"
        with pytest.raises(CheckpointError, match=f"^{why}"):
            held.load()


@pytest.mark.parametrize("name", [b"\xff", b"a\xc3", b"a\0b"])
def test_a_root_whose_name_is_not_utf8_is_refused_at_once(tmp_path: Path, name: bytes) -> None:
    place = f"{tmp_path}/{os.fsdecode(name)}"
    with pytest.raises(UsageError, match="cannot have steps"):
        tr.Checkpointer(place, no_dist=True)
    with pytest.raises(UsageError, match="cannot have steps"):
        tr.recover(sources=[place], into=state(1))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "place",
    ["s3://bucket/\udcff", "s3://buc\0ket", "gs://b/\ud800", "file://\0", "~\0x/a", "~\ud800"],
)
def test_other_names_that_cannot_work_are_refused_at_once(place: str) -> None:
    with pytest.raises(UsageError, match="cannot have steps"):
        tr.Checkpointer(place, no_dist=True)


def test_a_root_below_a_directory_whose_name_is_not_utf8(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / os.fsdecode(b"\xff")
    place.mkdir()
    monkeypatch.chdir(place)
    with pytest.raises(UsageError, match="UTF-8"):
        tr.Checkpointer("run", no_dist=True)


WITHOUT_FILES: dict[str, tuple[Any, str]] = {
    "make": (Files, "make_dir"),
    "lock": (draft, "lock"),
    "create": (Files, "create"),
    "sync": (Files, "sync_dir"),
}


@pytest.mark.parametrize("what", WITHOUT_FILES)
@pytest.mark.parametrize("background", [False, True])
def test_a_save_without_descriptors_does_not_blame_the_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str, background: bool
) -> None:
    """Only here; the writer process has a limit of its own."""
    owner, name = WITHOUT_FILES[what]

    def refuse(*args: Any) -> Any:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), str(args[-1]))

    if background and what == "create":
        pytest.skip("no such case: the writer process creates data files")
    with tr.Checkpointer(tmp_path, no_dist=True, timeout=30) as held:
        held.save(1, state(1))
        with monkeypatch.context() as within:
            within.setattr(owner, name, refuse)
            with pytest.raises(ResourceError, match=r"may have \d+ files open"):
                if background:
                    held.save_async(2, state(2)).result(30)
                else:
                    held.save(2, state(2))
        held.save(3, state(3))
        assert held.steps() == [1, 3]


def test_a_load_without_descriptors_does_not_blame_the_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tr.Checkpointer(tmp_path, no_dist=True, timeout=60) as saver:
        saver.save(1, {"w": torch.ones(5)})
    # It tries again for the whole of its time.
    with tr.Checkpointer(tmp_path, no_dist=True, timeout=2) as held:

        def refuse(path: str, within: int | None) -> int:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), path)

        monkeypatch.setattr(step, "open_plain", refuse)
        with pytest.raises(ResourceError, match=r"may have \d+ files open"):
            held.load(timeout=0.5)
        with pytest.raises(ResourceError, match=r"may have \d+ files open"):
            held.verify(1)
