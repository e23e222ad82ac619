"""Cleaning, pruning and deleting touch nothing that is not torchrelay's, and follow no link."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import torchrelay as tr
from tests.support.s3 import BUCKET, S3
from tests.support.saved import state
from torchrelay.stores.local.files import Files
from torchrelay.stores.local.store import LocalStore
from torchrelay.stores.tokens import new_token


@pytest.fixture
def elsewhere(tmp_path: Path) -> Path:
    """A directory outside every root, with files that nobody may remove."""
    place = tmp_path / "elsewhere"
    place.mkdir()
    for name in ("manifest.json", "model.safetensors", "thesis.tex"):
        (place / name).write_text("years of work")
    return place


def names(place: Path) -> list[str]:
    return sorted(path.name for path in place.iterdir())


def saved(root: Path, *steps: int) -> tr.Checkpointer:
    held = tr.Checkpointer(root)
    for step in steps:
        held.save(step, state(step))
    return held


@pytest.mark.parametrize("kind", ["tmp", "old"])
def test_cleaning_emptied_the_target_of_a_link_named_like_a_draft(
    tmp_path: Path, elsewhere: Path, kind: str
) -> None:
    root = tmp_path / "run"
    root.mkdir()
    link = root / f"step-7.{kind}-{new_token()}"
    link.symlink_to(elsewhere)
    before = names(elsewhere)
    with tr.Checkpointer(root) as held:
        assert held.steps() == []
    assert names(elsewhere) == before and link.is_symlink()


def test_pruning_a_linked_step_emptied_the_target(tmp_path: Path, elsewhere: Path) -> None:
    root = tmp_path / "run"
    with saved(root, 1):
        (root / "step-1").rename(elsewhere / "step-1")
        (elsewhere / "step-1" / "notes.txt").write_text("of others")
        (root / "step-1").symlink_to(elsewhere / "step-1")
    before = names(elsewhere / "step-1")
    with tr.Checkpointer(root, keep=tr.KeepLast(1)) as held:
        assert held.load().step == 1  # to read by way of a link is the user's choice
        held.save(2, state(2))
        assert held.steps() == [2]
    assert names(root) == ["step-2"] and names(elsewhere / "step-1") == before


@pytest.mark.parametrize("way", ["delete", "overwrite", "rollback"])
def test_a_linked_step_leaves_as_a_link(tmp_path: Path, elsewhere: Path, way: str) -> None:
    root = tmp_path / "run"
    held = saved(root, 0, 1)
    (root / "step-1").rename(elsewhere / "step-1")
    (root / "step-1").symlink_to(elsewhere / "step-1")
    before = names(elsewhere / "step-1")
    if way == "delete":
        held.delete(1)
    elif way == "overwrite":
        held.save(1, state(5), overwrite=True)
        assert not (root / "step-1").is_symlink() and held.verify(1) == 1
    else:
        held.rollback(0)
    held.close()
    assert names(elsewhere / "step-1") == before
    assert names(root) == (["step-0", "step-1"] if way == "overwrite" else ["step-0"])


def test_deleting_a_step_removed_files_that_its_record_does_not_name(tmp_path: Path) -> None:
    root = tmp_path / "run"
    with saved(root, 1, 2) as held:
        mine = ["config.json", "distilled.safetensors"]
        for name in mine:
            (root / "step-1" / name).write_text("of others")
        (root / "step-1" / "folder").mkdir()
        held.delete(1)
        assert held.steps() == [2]
    (left,) = [place for place in root.iterdir() if place.name != "step-2"]
    assert names(left) == sorted([*mine, "folder"])


def test_cleaning_a_draft_removed_files_that_no_draft_writes(tmp_path: Path) -> None:
    root = tmp_path / "run"
    draft = root / f"step-3.tmp-{new_token()}"
    draft.mkdir(parents=True)
    for name in ("model.safetensors", "model.safetensors.index.json", "notes.txt"):
        (draft / name).write_text("x")
    tr.Checkpointer(root).close()
    assert names(draft) == ["notes.txt"]
    (draft / "notes.txt").unlink()
    tr.Checkpointer(root).close()
    assert names(root) == []


class _Swapping(Files):
    """Puts a link to another directory in the place of the one that is being emptied."""

    def __init__(self, doomed: Path, target: Path) -> None:
        self._doomed, self._target = doomed, target

    def unlink(self, path: str, within: int | None = None) -> None:
        if not self._doomed.is_symlink():
            self._doomed.rename(f"{self._doomed}.moved")
            self._doomed.symlink_to(self._target)
        super().unlink(path, within)


def test_a_link_that_appears_while_a_draft_is_removed_is_not_followed(
    tmp_path: Path, elsewhere: Path
) -> None:
    root = tmp_path / "run"
    draft = root / f"step-3.tmp-{new_token()}"
    draft.mkdir(parents=True)
    for name in ("manifest.json", "model.safetensors"):
        (draft / name).write_text("x")
    before = names(elsewhere)
    LocalStore(root, files=_Swapping(draft, elsewhere)).clean()
    assert names(elsewhere) == before
    assert names(Path(f"{draft}.moved")) == []


@pytest.mark.parametrize("below", ["", "runs/a"])
@pytest.mark.parametrize(
    ("name", "why"),
    [("file", "it is a file, and steps are kept in a directory"), ("link", "is it mounted")],
)
def test_a_root_that_cannot_have_steps_is_not_taken_for_an_empty_one(
    tmp_path: Path, name: str, why: str, below: str
) -> None:
    """A job whose disk is not mounted would have started anew, and failed at its first save."""
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    root = tmp_path / name / below
    with tr.Checkpointer(
        root, no_dist=True, options=tr.options.CheckpointerOptions(read_only=True)
    ) as there:
        for act in (there.steps, there.latest, there.load, there.verify):
            with pytest.raises(tr.errors.CheckpointError, match=why) as caught:
                act()
            assert caught.value.file == str(tmp_path / name)
    with pytest.raises(tr.errors.CheckpointError, match=why):
        tr.Checkpointer(root, no_dist=True)
    (tmp_path / "gone").mkdir()
    if name == "link":
        with tr.Checkpointer(root, no_dist=True) as there:
            there.save(1, {"n": 1})
            assert there.latest() == 1


def test_a_root_that_another_process_makes_at_this_moment_is_an_empty_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if sys.version_info < (3, 11):
        pytest.skip("no such case: pathlib of Python 3.10 has an os.stat of its own")
    root = tmp_path / "runs" / "a"
    store = LocalStore(root)
    look = os.stat

    def look_as_another_makes_it(*words: Any, **options: Any) -> os.stat_result:
        try:
            return look(*words, **options)
        finally:
            with monkeypatch.context() as undisturbed:
                undisturbed.setattr(os, "stat", look)
                root.mkdir(parents=True, exist_ok=True)

    monkeypatch.setattr(os, "stat", look_as_another_makes_it)
    assert store.steps() == []
    assert root.is_dir()


def test_a_root_that_is_a_link_is_the_callers_choice(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "run").symlink_to(tmp_path / "disk")
    with tr.Checkpointer(tmp_path / "run", keep=tr.KeepLast(1)) as held:
        for step in (1, 2):
            held.save(step, state(step))
        assert held.steps() == [2]
    assert names(tmp_path / "disk") == ["step-2"]


REMOVALS: dict[str, Callable[[tr.Checkpointer], object]] = {
    "delete": lambda held: held.delete(2),
    "overwrite": lambda held: held.save(2, state(5), overwrite=True),
    "rollback": lambda held: held.rollback(1),
}


@pytest.mark.parametrize("way", REMOVALS)
def test_objects_that_a_record_does_not_name_stay_in_the_bucket(s3: S3, way: str) -> None:
    with tr.Checkpointer(s3.url("run"), timeout=60) as held:
        for step in (1, 2):
            held.save(step, state(step))
        listing = s3.ask("GET", f"/{BUCKET}?list-type=2&prefix=run/step-2/")[1].decode()
        key = next(part for part in listing.split("<Key>") if "model.safetensors" in part)
        folder = key.partition("</Key>")[0].rpartition("/")[0]
        s3.ask("PUT", f"/{BUCKET}/{folder}/thesis.tex", b"years of work")
        REMOVALS[way](held)
    listing = s3.ask("GET", f"/{BUCKET}?list-type=2&prefix={folder}/")[1].decode()
    assert listing.count("<Key>") == 1 and f"{folder}/thesis.tex</Key>" in listing
