"""A step that is copied is the same step, or none at all; a copy that was interrupted continues."""

from __future__ import annotations

import errno
import shutil
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

import torchrelay as tr
from tests.support.cuts import Cut, CutFiles, CutStore
from tests.support.rounds import rounds
from tests.support.s3 import S3
from tests.support.saved import equal, state
from torchrelay.mirror.step_copy import (
    CopiedStep,
    copy_step,
    copy_token,
    discard_copy,
    presence,
)
from torchrelay.progress import Progress
from torchrelay.stores.local.draft import LocalSink
from torchrelay.stores.local.files import Files
from torchrelay.stores.locate import open_store
from torchrelay.stores.opening import open_newest, open_step
from torchrelay.stores.store import Store

LARGE = "0.safetensors"


@pytest.fixture
def place(tmp_path: Path) -> Path:
    with tr.Checkpointer(tmp_path / "run", no_dist=True) as there:
        there.save(7, {**state(1), "large": torch.arange(5_000_000.0)})
    return tmp_path / "run"


def ignore(progress: Progress) -> None:
    pass


def copied(place: Path, target: Store, progress: Any = ignore) -> CopiedStep:
    """A copy that can be continued."""
    with closing(open_newest(open_store(place))) as source:
        found = presence(source, target)
        assert not found.whole
        token = copy_token(source, found.replaces)
        return copy_step(source, target, progress, token=token, overwrite=bool(found.replaces))


def is_there(place: Path, target: Store) -> bool:
    with closing(open_newest(open_store(place))) as source:
        return presence(source, target).whole


def files_of(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def test_a_copy_has_the_same_bytes(place: Path, tmp_path: Path) -> None:
    seen: list[Progress] = []
    with closing(open_newest(open_store(place))) as source:
        copy_step(source, open_store(tmp_path / "copy"), seen.append)
        assert seen[-1].done == seen[-1].total == source.record.volume_bytes
    assert files_of(tmp_path / "copy" / "step-7") == files_of(place / "step-7")
    with tr.Checkpointer(tmp_path / "copy", no_dist=True) as there:
        assert there.verify() == 7 and equal(
            there.load(include=["optim.*", "seed"]).state["seed"], 1
        )


def test_a_step_that_is_there_stays(place: Path) -> None:
    held = open_newest(open_store(place))
    with pytest.raises(tr.errors.StepExistsError):
        copy_step(held, open_store(place), ignore)
    held.close()
    assert [path.name for path in place.iterdir()] == ["step-7"]


def test_damage_is_not_copied(place: Path, tmp_path: Path) -> None:
    file = next((place / "step-7").glob("*.safetensors"))
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    held = open_newest(open_store(place))
    with pytest.raises(tr.errors.DamagedError, match=file.name):
        copy_step(held, open_store(tmp_path / "copy"), ignore)
    held.close()
    assert not list((tmp_path).glob("copy/*"))


def test_a_copy_that_is_interrupted_leaves_nothing(place: Path, tmp_path: Path) -> None:
    held = open_newest(open_store(place))
    with pytest.raises(KeyboardInterrupt):
        copy_step(held, open_store(tmp_path / "copy"), interrupt)
    held.close()
    assert not list((tmp_path / "copy").iterdir())


def interrupt(progress: Progress) -> None:
    if progress.done > 8 << 20:
        raise KeyboardInterrupt


def test_a_copy_with_a_token_continues(place: Path, tmp_path: Path) -> None:
    """The small files were whole when the large one was interrupted."""
    target = open_store(tmp_path / "copy")
    with pytest.raises(KeyboardInterrupt):
        copied(place, target, interrupt)
    assert target.steps() == [] and target.clean() == []
    small = sum(
        file.stat().st_size
        for file in (place / "step-7").glob("*.safetensors")
        if file.name != LARGE
    )
    found = copied(place, target)
    total = sum(file.stat().st_size for file in (place / "step-7").glob("*.safetensors"))
    assert found.left >= small and found.left + found.written == total
    assert [path.name for path in (tmp_path / "copy").iterdir()] == ["step-7"]
    assert files_of(tmp_path / "copy" / "step-7") == files_of(place / "step-7")
    assert is_there(place, target)


def test_a_file_that_was_left_with_other_bytes_is_copied_again(place: Path, tmp_path: Path) -> None:
    """After a power cut a file may have its size and other bytes."""
    target = open_store(tmp_path / "copy")
    with pytest.raises(KeyboardInterrupt):
        copied(place, target, interrupt)
    (draft,) = (tmp_path / "copy").iterdir()
    (draft / "manifest.json").write_bytes(b"half of a rec")
    data = bytearray((draft / "model.safetensors").read_bytes())
    data[len(data) // 2] ^= 1
    (draft / "model.safetensors").write_bytes(data)
    assert copied(place, target).written >= len(data)
    assert files_of(tmp_path / "copy" / "step-7") == files_of(place / "step-7")


def test_another_process_that_copies_the_step_is_not_disturbed(place: Path, tmp_path: Path) -> None:
    target, tried = open_store(tmp_path / "copy"), []

    def disturb(progress: Progress) -> None:
        if not tried:
            tried.append(True)
            with pytest.raises(tr.errors.CheckpointError, match="locked the draft"):
                copied(place, open_store(tmp_path / "copy"))
            assert open_store(tmp_path / "copy").clean() == []

    copied(place, target, disturb)
    assert tried and files_of(tmp_path / "copy" / "step-7") == files_of(place / "step-7")


def test_a_full_medium_gets_its_space_back(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(sink: LocalSink) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(LocalSink, "finish", full)
    with pytest.raises(tr.errors.CheckpointError, match="No space left"):
        copied(place, open_store(tmp_path / "copy"))
    assert not list((tmp_path / "copy").iterdir())


def test_a_copy_that_was_left_can_be_discarded(place: Path, tmp_path: Path) -> None:
    target = open_store(tmp_path / "copy")
    with pytest.raises(KeyboardInterrupt):
        copied(place, target, interrupt)
    with closing(open_newest(open_store(place))) as source:
        discard_copy(target, 7, copy_token(source))
    assert not list((tmp_path / "copy").iterdir())


def test_a_step_that_was_saved_again_is_replaced(place: Path, tmp_path: Path) -> None:
    target = open_store(tmp_path / "copy")
    copied(place, target)
    with tr.Checkpointer(place, no_dist=True) as there:
        there.save(7, state(2), overwrite=True)
    copied(place, target)
    assert files_of(tmp_path / "copy" / "step-7") == files_of(place / "step-7")


@pytest.mark.parametrize("name", ["manifest.json", "model.safetensors"])
def test_a_copy_that_was_damaged_is_made_again(place: Path, tmp_path: Path, name: str) -> None:
    target = open_store(tmp_path / "copy")
    copied(place, target)
    file = tmp_path / "copy" / "step-7" / name
    file.write_bytes(file.read_bytes()[:-1])
    copied(place, target)
    assert files_of(tmp_path / "copy" / "step-7") == files_of(place / "step-7")


@pytest.mark.parametrize("half", [False, True])
def test_a_copy_that_ends_at_any_system_call_is_continued(
    place: Path, tmp_path: Path, half: bool
) -> None:
    """Whatever was done by then, the step is there whole or not at all, and the next copy with the
    same token makes it, or finds it."""
    shutil.rmtree(place)
    with tr.Checkpointer(place, no_dist=True) as there:
        there.save(7, state(3))
    counted = CutFiles()
    copied(place, CutStore(tmp_path / "counted", counted))
    calls = len(counted.journal)
    assert calls > 15
    for at in range(0, calls, 4 if rounds(calls) < calls else 1):
        root = tmp_path / f"cut-{half}-{at}"
        store = CutStore(root, CutFiles(at, half=half))
        with pytest.raises(Cut):
            copied(place, store)
        store.end()
        target = open_store(root)
        for step in target.steps():
            assert files_of(root / f"step-{step}") == files_of(place / "step-7")
        if not is_there(place, target):
            copied(place, target)
        target.clean()
        assert [path.name for path in root.iterdir()] == ["step-7"], at
        assert files_of(root / "step-7") == files_of(place / "step-7")


def test_in_a_bucket_whole_objects_are_not_sent_again(place: Path, s3: S3) -> None:
    target = open_store(s3.url("copy"))
    with pytest.raises(KeyboardInterrupt):
        copied(place, target, interrupt)
    assert target.steps() == []
    s3.requests.clear()
    found = copied(place, target)
    assert found.left > 0 and found.written > 20_000_000
    sent = s3.seen(r"^(PUT|POST) .*safetensors")
    assert sent and all(f"/{LARGE}" in line for line in sent), sent
    assert is_there(place, target)
    with tr.Checkpointer(s3.url("copy"), no_dist=True) as there:
        assert there.verify() == 7 and there.load(include=["seed"]).state["seed"] == 1


def test_from_a_bucket_back_to_a_directory(place: Path, s3: S3, tmp_path: Path) -> None:
    copied(place, open_store(s3.url("copy")))
    with closing(open_newest(open_store(s3.url("copy")))) as source:
        copy_step(source, open_store(tmp_path / "back"), ignore)
    assert files_of(tmp_path / "back" / "step-7") == files_of(place / "step-7")


def adapter(step: int) -> dict[str, Any]:
    """A large part that rests, and a small one that is trained."""
    base = torch.nn.Parameter(torch.arange(300_000.0), requires_grad=False)
    return {"model": {"base": base, "head": torch.full((50,), float(step))}, "step": step}


@pytest.fixture
def adapters(tmp_path: Path) -> Path:
    with tr.Checkpointer(tmp_path / "run", no_dist=True) as there:
        for step in (1, 2, 3):
            there.save(step, adapter(step))
        assert there.record(3).saved.reused > 1_000_000
    return tmp_path / "run"


def copy_each(place: Path, target: Store) -> list[CopiedStep]:
    found = []
    for step in (1, 2, 3):
        with closing(open_step(open_store(place), step)) as source:
            found.append(copy_step(source, target, ignore, token=copy_token(source)))
    return found


def verified(place: str) -> list[int]:
    with tr.Checkpointer(place, no_dist=True) as there:
        for step in there.steps():
            assert equal(there.load(step=step).state["step"], step)
        return [there.verify(step) for step in there.steps()]


def test_files_that_did_not_change_are_links_there_too(adapters: Path, tmp_path: Path) -> None:
    copies = copy_each(adapters, open_store(tmp_path / "copy"))
    assert [one.unchanged > 1_000_000 for one in copies] == [False, True, True]
    assert all(one.written < 10_000 for one in copies[1:])
    for step in (1, 2, 3):
        assert files_of(tmp_path / "copy" / f"step-{step}") == files_of(adapters / f"step-{step}")
    shutil.rmtree(tmp_path / "copy" / "step-2")
    assert verified(str(tmp_path / "copy")) == [1, 3]


def test_a_service_copies_objects_that_did_not_change(adapters: Path, s3: S3) -> None:
    target = open_store(s3.url("copy"))
    copies = copy_each(adapters, target)
    assert [one.unchanged > 1_000_000 for one in copies] == [False, True, True]
    assert all(one.written < 10_000 for one in copies[1:])
    target.delete(1)
    assert verified(s3.url("copy")) == [2, 3]


def test_without_links_files_are_copied(
    adapters: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: Any) -> None:
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    monkeypatch.setattr(Files, "link", refuse)
    copies = copy_each(adapters, open_store(tmp_path / "copy"))
    assert [one.unchanged for one in copies] == [0, 0, 0]
    assert verified(str(tmp_path / "copy")) == [1, 2, 3]


def test_a_step_that_was_written_in_full_is_copied_in_full(tmp_path: Path) -> None:
    options = tr.options.CheckpointerOptions(reuse=False)
    with tr.Checkpointer(tmp_path / "run", no_dist=True, options=options) as there:
        for step in (1, 2, 3):
            there.save(step, adapter(step))
    copies = copy_each(tmp_path / "run", open_store(tmp_path / "copy"))
    assert [one.unchanged for one in copies] == [0, 0, 0]


def test_nothing_is_taken_from_a_step_that_lost_a_file(adapters: Path, tmp_path: Path) -> None:
    target = open_store(tmp_path / "copy")
    with closing(open_step(open_store(adapters), 1)) as source:
        copy_step(source, target, ignore)
    for file in (tmp_path / "copy" / "step-1").glob("*.safetensors"):
        file.write_bytes(file.read_bytes()[:-1])
    with closing(open_step(open_store(adapters), 2)) as source:
        assert copy_step(source, target, ignore).unchanged == 0
    with tr.Checkpointer(tmp_path / "copy", no_dist=True) as there:
        assert there.verify(2) == 2


def test_no_earlier_step_is_harmed_wherever_a_copy_with_links_ends(
    adapters: Path, tmp_path: Path
) -> None:
    def begin(root: Path) -> None:
        with closing(open_step(open_store(adapters), 1)) as source:
            copy_step(source, open_store(root), ignore)

    def second(target: Store) -> None:
        with closing(open_step(open_store(adapters), 2)) as source:
            if not presence(source, target).whole:
                copy_step(source, target, ignore, token=copy_token(source))

    counted = CutFiles()
    begin(tmp_path / "counted")
    second(CutStore(tmp_path / "counted", counted))
    calls = len(counted.journal)
    assert any(call.kind == "link" for call in counted.journal)
    for at in range(0, calls, 3 if rounds(calls) < calls else 1):
        root = tmp_path / f"cut-{at}"
        begin(root)
        store = CutStore(root, CutFiles(at))
        with pytest.raises(Cut):
            second(store)
        store.end()
        assert files_of(root / "step-1") == files_of(adapters / "step-1"), at
        second(open_store(root))
        for step in (1, 2):
            assert files_of(root / f"step-{step}") == files_of(adapters / f"step-{step}"), at
