"""Going back to an older step: refused by accident, explicit by `rollback`, safe at any point."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import torchrelay as tr
from tests.support.cuts import Cut, CutFiles, stores_with
from tests.support.ranks import RankPool
from tests.support.s3 import S3
from tests.support.saved import equal, state

PLACES: dict[str, Callable[[pytest.FixtureRequest], str]] = {
    "local": lambda request: str(request.getfixturevalue("tmp_path") / "run"),
    "s3": lambda request: str(request.getfixturevalue("s3").url("run")),
}
SAVES: dict[str, Callable[..., Any]] = {
    "sync": lambda held, step, made, **more: held.save(step, made, **more),
    "async": lambda held, step, made, **more: held.save_async(step, made, **more).result(60),
}


@pytest.fixture(params=PLACES)
def root(request: pytest.FixtureRequest) -> str:
    return PLACES[request.param](request)


@pytest.fixture(params=SAVES)
def save(request: pytest.FixtureRequest) -> Callable[..., Any]:
    return SAVES[request.param]


def saved(root: str, *steps: int) -> None:
    with tr.Checkpointer(root, timeout=60) as held:
        for step in steps:
            held.save(step, state(step))


def test_retention_removed_the_step_that_was_just_committed(
    root: str, save: Callable[..., Any]
) -> None:
    saved(root, 210, 300)
    with tr.Checkpointer(root, keep=tr.KeepLast(1), timeout=60) as held:
        save(held, 210, state(7), overwrite=True)
        assert held.steps() == [210, 300]
        assert equal(held.load(step=210).state, state(7))


def test_a_step_below_the_newest_is_refused_with_the_way_out(
    root: str, save: Callable[..., Any]
) -> None:
    saved(root, 300)
    with tr.Checkpointer(root, keep=tr.KeepLast(2), timeout=60) as held:
        for overwrite in (False, True):
            with pytest.raises(tr.errors.StepOrderError, match=r"300.*rollback\(210\)"):
                save(held, 210, state(210), overwrite=overwrite)
        assert held.steps() == [300]
        held.rollback(210)
        save(held, 210, state(210))
        assert held.steps() == [210] and equal(held.load().state, state(210))


def test_a_diverged_step_won_every_restart(root: str) -> None:
    saved(root, 100, 200, 300, 310)
    with tr.Checkpointer(root, keep=tr.KeepLast(2), timeout=60) as held:
        assert held.rollback(200) == [300, 310]
        assert (held.steps(), held.latest()) == ([100, 200], 200)
        held.save(210, state(210))
        assert held.rollback(200) == [210]
        held.save(300, state(3))  # a number that was deleted is free again
    with tr.Checkpointer(root, timeout=60) as held:
        assert held.steps() == [200, 300]
        assert equal(held.load().state, state(3))
        assert held.verify(200) == 200 and held.verify(300) == 300


def test_a_rollback_to_a_step_that_does_not_hold_is_refused(tmp_path: Path) -> None:
    saved(str(tmp_path), 1, 2)
    (tmp_path / "step-1" / "model.safetensors").write_bytes(b"")
    with tr.Checkpointer(tmp_path) as held:
        with pytest.raises(tr.errors.DamagedError, match="step 1"):
            held.rollback(1)
        assert held.steps() == [1, 2]
    with tr.Checkpointer(tmp_path, options=tr.options.CheckpointerOptions(read_only=True)) as held:
        with pytest.raises(tr.errors.UsageError, match="read-only"):
            held.rollback(1)


def test_a_damaged_newest_step_does_not_stand_in_the_way_of_the_next_save(tmp_path: Path) -> None:
    saved(str(tmp_path), 1, 5)
    file = tmp_path / "step-5" / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1  # its size holds, its bytes do not
    file.write_bytes(data)
    with tr.Checkpointer(tmp_path, keep=tr.KeepLast(1)) as held:
        with pytest.warns(RuntimeWarning, match="step 5"):
            assert held.load().step == 1
        held.save(2, state(2))
        assert held.steps() == [2, 5]  # retention goes by the steps that are good
        file.unlink()
        held.save(3, state(3))
        assert held.steps() == [3, 5]


def test_a_rollback_that_dies_at_any_call_is_a_shorter_rollback(tmp_path: Path) -> None:
    saved(str(tmp_path / "base"), 1, 2, 3, 4)
    files = CutFiles()
    with stores_with(files):
        root = tmp_path / "whole"
        shutil.copytree(tmp_path / "base", root)
        assert tr.Checkpointer(root).rollback(1) == [2, 3, 4]
    calls = len(files.journal)
    assert calls >= 6
    for at in range(calls):
        root = tmp_path / f"cut-{at}"
        shutil.copytree(tmp_path / "base", root)
        with stores_with(CutFiles(at)), pytest.raises(Cut):
            tr.Checkpointer(root).rollback(1)
        with tr.Checkpointer(root) as held:
            left = held.steps()
            assert left == list(range(1, len(left) + 1))
            assert held.load().step == left[-1]
            held.rollback(1)
            assert held.steps() == [1]
        assert [path.name for path in root.iterdir()] == ["step-1"]


def test_a_rollback_in_a_bucket_that_fails_at_any_request_is_a_shorter_one(s3: S3) -> None:
    for failing in range(2, 30):
        with tr.Checkpointer(s3.url(f"run-{failing}"), timeout=60) as held:
            for step in (1, 2, 3):
                held.save(step, {"w": state(step)["clock"]})
            count = 0

            def refuse(method: str, path: str, failing: int = failing) -> int | None:
                nonlocal count
                count += 1
                return 403 if count >= failing else None

            s3.hook = refuse
            try:
                held.rollback(1)
                done = True
            except tr.errors.CheckpointError:
                done = False
            s3.hook = None
            left = held.steps()
            assert left == list(range(1, len(left) + 1))
            for step in left:
                held.verify(step)
            held.rollback(1)
            assert held.steps() == [1]
        if done:
            return
    raise AssertionError("no rollback was let through")


def roll(rank: int, group: Any, root: str) -> tuple[Any, ...]:
    with tr.Checkpointer(root, group=group, timeout=30) as held:
        for step in (1, 2, 3):
            held.save(step, {"w": state(step)["clock"]})
        try:
            held.save(2, state(2), overwrite=False)
        except tr.errors.StepOrderError as fault:
            order = fault.step
        try:
            held.rollback(rank)
            refused = ""
        except tr.errors.UsageError as fault:
            refused = str(fault)
        first = held.steps()
        return order, refused, first, held.rollback(1), held.steps(), held.load().step


def test_ranks_roll_back_together(pool2: RankPool, tmp_path: Path) -> None:
    for order, refused, first, newer, steps, loaded in pool2.run(roll, str(tmp_path)):
        assert order == 2 and "different steps: [0, 1]" in refused
        assert (first, newer, steps, loaded) == ([1, 2, 3], [2, 3], [1], 1)
