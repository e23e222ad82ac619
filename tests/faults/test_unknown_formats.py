"""Steps that a later version of the library wrote: they are no damage, and nothing older is taken
in their place without a word."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import torchrelay as tr
from tests.support.commands import command
from tests.support.forge import body_of, forged
from tests.support.ranks import RankPool
from torchrelay.record.schema import VERSION

LATER = [VERSION[0] + 1, 0]


def state(value: float) -> dict[str, Any]:
    return {"model": {"w": torch.full((64,), value)}, "step": int(value)}


def rewrite(path: Path, version: list[int], **fields: object) -> None:
    body = body_of(path.read_bytes())
    path.write_bytes(forged({**body, "version": version, **fields}))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    with tr.Checkpointer(tmp_path, no_dist=True) as checkpointer:
        for step in (1, 2, 3):
            checkpointer.save(step, state(step))
    rewrite(tmp_path / "step-3" / "manifest.json", LATER)
    return tmp_path


def test_no_older_step_is_taken_in_its_place(root: Path) -> None:
    live = state(77)
    with tr.Checkpointer(root, no_dist=True) as checkpointer:
        for ask in (
            lambda: checkpointer.load(live),
            lambda: checkpointer.load(live, step=3),
            checkpointer.verify,
            checkpointer.latest,
            lambda: checkpointer.save(2, state(2)),
            lambda: tr.recover(into=live, sources=[checkpointer]),
        ):
            with pytest.raises(
                tr.errors.FormatError,
                match=rf"format {LATER[0]}\.0.*reads format {VERSION[0]}: read it with the",
            ) as at:
                ask()
            assert at.value.step == 3 and at.value.file == str(root / "step-3" / "manifest.json")
        assert torch.equal(live["model"]["w"], state(77)["model"]["w"])
        assert checkpointer.load(live, step=2).step == 2 and live["step"] == 2


def test_earlier_formats_are_refused(root: Path) -> None:
    live = state(77)
    for minor in (0, 1):
        rewrite(root / "step-3" / "manifest.json", [3, minor])
        with tr.Checkpointer(root, no_dist=True) as checkpointer:
            with pytest.raises(tr.errors.FormatError, match=rf"format 3\.{minor}.*wrote it"):
                checkpointer.load(live)
    assert live["step"] == 77 and torch.equal(live["model"]["w"], state(77)["model"]["w"])


def test_training_goes_on_above_it_and_it_stays(root: Path) -> None:
    with tr.Checkpointer(root, no_dist=True, keep=tr.KeepLast(1)) as checkpointer:
        checkpointer.save(4, state(4))
        assert checkpointer.steps() == [3, 4]
        assert checkpointer.load(state(0)).step == 4
        assert checkpointer.rollback(2) == [3, 4]


def test_a_later_minor_format_is_read_unless_it_has_kinds_that_are_new(root: Path) -> None:
    path = root / "step-3" / "manifest.json"
    with tr.Checkpointer(root, no_dist=True) as checkpointer:
        rewrite(path, [VERSION[0], VERSION[1] + 1], hint="new")
        assert checkpointer.load(state(0)).step == 3
        rewrite(path, [VERSION[0], VERSION[1] + 1], objects=[["b", "new kind", 0, 0, 1]])
        with pytest.raises(tr.errors.FormatError, match="torchrelay that wrote it"):
            checkpointer.load(state(0))
        rewrite(path, list(VERSION), objects=[["b", "new kind", 0, 0, 1]])
        with pytest.raises(tr.errors.DamagedError):
            checkpointer.load(state(0), step=3)


def test_the_same_step_of_another_source_is_taken(root: Path, tmp_path: Path) -> None:
    """And nothing older: a job that has nothing to recover would begin anew."""
    with tr.Checkpointer(tmp_path / "other", no_dist=True) as other:
        other.save(1, state(1))
        for sources in ([root], [root, other], [other, root]):
            with pytest.raises(tr.errors.FormatError, match=rf"format {LATER[0]}\.0"):
                tr.recover(into=state(0), sources=sources)
        other.save(3, state(3))
        for sources in ([root, other], [other, root]):
            live = state(0)
            got = tr.recover(into=live, sources=sources)
            assert got.step == 3 and live["step"] == 3 and got.report.source == other.url


def recovered(rank: int, group: Any, roots: list[list[str]]) -> str:
    try:
        return str(tr.recover(into=state(0), sources=roots[rank], group=group, timeout=30).step)
    except tr.errors.RelayError as fault:
        return type(fault).__name__


def test_ranks_take_it_from_where_each_can_read_it_or_none_does(
    root: Path, tmp_path: Path, pool2: RankPool
) -> None:
    with tr.Checkpointer(tmp_path / "other", no_dist=True) as other:
        for step in (1, 2, 3):
            other.save(step, state(step))
    unknown, known = str(root), str(tmp_path / "other")
    for mine in (unknown, known):
        found = pool2.run(recovered, [[mine], [known, unknown]])
        assert found == (["FormatError"] * 2 if mine == unknown else ["3", "3"])
    assert pool2.run(recovered, [[unknown, known], [known]]) == ["3", "3"]


def test_commands_say_that_it_was_not_checked(root: Path) -> None:
    told = command("ls", root, "--json")
    assert told.returncode == 1
    found = {step["step"]: step for step in json.loads(told.stdout)}
    assert found[3]["damage"] is None and f"format {LATER[0]}.0" in found[3]["unread"]
    assert found[2]["damage"] is None and found[2]["unread"] is None
