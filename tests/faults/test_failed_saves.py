"""A failed asynchronous save need not stop training; saves tell how far they are; damage is told
once."""

from __future__ import annotations

import errno
import logging
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import torchrelay as tr
from tests.support.cuts import stores_with
from tests.support.ranks import RankPool
from tests.support.saved import equal, state, which
from torchrelay.checkpointer import catalog
from torchrelay.stores.listing import MANIFEST
from torchrelay.stores.local.files import Files
from torchrelay.stores.writer import client


class FailingCommit(Files):
    """A medium on which the first commit records cannot be written."""

    def __init__(self, failures: int) -> None:
        self._left = failures

    def create(self, path: str) -> int:
        if path.endswith(MANIFEST) and self._left:
            self._left -= 1
            raise OSError(errno.EIO, "the medium has a fault", path)
        return super().create(path)


def checkpointer_on(root: Path, failures: int) -> tr.Checkpointer:
    with stores_with(FailingCommit(failures)):
        return tr.Checkpointer(root, no_dist=True, timeout=30)


def test_a_failed_save_stops_nothing_if_it_is_to_warn(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It is in the `Pending`, in the log and in the count; the next calls go on."""
    with checkpointer_on(tmp_path, 1) as checkpointer:
        pending = checkpointer.save_async(1, state(1), on_error="warn")
        checkpointer.save_async(2, state(2)).result(20)
        assert isinstance(pending.exception(20), tr.errors.CheckpointError)
        assert checkpointer.failures == 1
        assert which(checkpointer.load().state, [2]) == 2
    told = [record for record in caplog.records if "step 1 failed" in record.getMessage()]
    assert [record.levelno for record in told] == [logging.ERROR]


def test_a_full_disk_stops_nothing_if_it_is_to_warn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is found before anything is staged."""
    monkeypatch.setattr(catalog, "HEADROOM", 1 << 60)
    with tr.Checkpointer(tmp_path, no_dist=True, timeout=30) as checkpointer:
        pending = checkpointer.save_async(1, state(1), on_error="warn")
        assert isinstance(fault := pending.exception(20), tr.errors.CheckpointError)
        assert "no space" in str(fault) and checkpointer.failures == 1
        with pytest.raises(tr.errors.CheckpointError, match="no space"):
            checkpointer.save(1, state(1))
        with pytest.raises(tr.errors.UnsupportedLeafError):
            checkpointer.save_async(1, {"ours": object()}, on_error="warn")
        monkeypatch.undo()
        checkpointer.save_async(2, state(2)).result(20)
        assert checkpointer.steps() == [2] and checkpointer.failures == 1


def test_a_place_that_cannot_be_listed_stops_nothing_if_it_is_to_warn(tmp_path: Path) -> None:
    root = tmp_path / "job"
    with tr.Checkpointer(root, no_dist=True, timeout=30) as checkpointer:
        root.write_text("in the way")
        pending = checkpointer.save_async(1, state(1), on_error="warn")
        assert isinstance(pending.exception(20), tr.errors.CheckpointError)
        root.unlink()
        checkpointer.save_async(2, state(2)).result(20)
        assert checkpointer.steps() == [2] and checkpointer.failures == 1


def test_a_failed_save_is_raised_by_the_next_call_by_default(tmp_path: Path) -> None:
    with checkpointer_on(tmp_path, 1) as checkpointer:
        checkpointer.save_async(1, state(1))
        with pytest.raises(tr.errors.CheckpointError, match="the medium has a fault"):
            checkpointer.save_async(2, state(2))
        assert checkpointer.failures == 1


def test_a_step_that_exists_is_refused_also_if_failures_only_warn(tmp_path: Path) -> None:
    with checkpointer_on(tmp_path, 0) as checkpointer:
        checkpointer.save(1, state(1))
        with pytest.raises(tr.errors.StepExistsError):
            checkpointer.save_async(1, state(2), on_error="warn")
        assert which(checkpointer.load().state, [1]) == 1


def warn_together(rank: int, group: Any, root: str) -> tuple[bool, int, bool]:
    with (
        stores_with(FailingCommit(1)),
        tr.Checkpointer(root, group=group, timeout=30) as checkpointer,
    ):
        live = {"w": torch.full((500,), 1.0), "own": torch.full((3,), float(rank))}
        failed = checkpointer.save_async(1, live, on_error="warn").exception(30)
        checkpointer.save_async(2, live, on_error="warn").result(30)
        got = checkpointer.load().state
        right = bool((got["w"] == 1).all() and (got["own"] == rank).all())
        return isinstance(failed, tr.errors.CheckpointError), checkpointer.failures, right


def test_a_failed_save_of_ranks_stops_none_of_them(pool2: RankPool, tmp_path: Path) -> None:
    assert pool2.run(warn_together, str(tmp_path), timeout=60) == [(True, 1, True)] * 2


@pytest.mark.parametrize("bad", [{"on_error": "ignore"}, {"on_busy": "perhaps"}])
def test_bad_arguments_are_refused(tmp_path: Path, bad: dict[str, Any]) -> None:
    with (
        tr.Checkpointer(tmp_path, no_dist=True) as checkpointer,
        pytest.raises(tr.errors.UsageError, match=next(iter(bad))),
    ):
        checkpointer.save_async(1, state(1), **bad)


@pytest.mark.parametrize("kind", ["save", "save_async", "budget"])
def test_a_save_tells_how_far_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(client, "PART_BYTES", 4 << 20)
    large = {"a": torch.arange(5 << 20), "b": {"c": torch.arange(1 << 20), "d": torch.ones(3)}}
    told: list[tuple[int, int]] = []
    budget = 16 << 20 if kind == "budget" else None
    with tr.Checkpointer(
        tmp_path, no_dist=True, options=tr.options.CheckpointerOptions(memory_budget=budget)
    ) as checkpointer:
        if kind == "save":
            saved = checkpointer.save(1, large, progress=told.append)
        else:
            found = checkpointer.save_async(1, large, progress=told.append).result(30)
            assert found is not None
            saved = found
        assert equal(checkpointer.load().state, large)
    assert len(told) > 5 and {total for _, total in told} == {saved.bytes}
    assert [done for done, _ in told] == sorted({done for done, _ in told})
    assert told[-1][0] == saved.bytes


def test_damage_is_announced_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with tr.Checkpointer(tmp_path, no_dist=True) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, state(step))
        (tmp_path / "step-2" / "model.safetensors").write_bytes(b"")
        caplog.clear()
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            assert checkpointer.load().step == 1
    told_of = [str(one.message) for one in told] + [one.getMessage() for one in caplog.records]
    assert len([text for text in told_of if "step 2" in text]) == 1
