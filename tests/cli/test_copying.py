"""`torchrelay copy`: steps from a directory or bucket to another, by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

import torchrelay as tr
from tests.support.commands import command
from tests.support.s3 import S3
from tests.support.saved import state


@pytest.fixture
def run(tmp_path: Path) -> Path:
    with tr.Checkpointer(tmp_path / "run", no_dist=True) as there:
        for step in (1, 2, 3):
            there.save(step, state(step))
    return tmp_path / "run"


def steps(place: object) -> list[int]:
    with tr.Checkpointer(str(place), no_dist=True) as there:
        return [there.verify(step) for step in there.steps()]


def test_the_newest_step_by_default(run: Path, tmp_path: Path) -> None:
    done = command("copy", run, tmp_path / "copy")
    assert done.returncode == 0 and "copy/step-3: " in done.stdout and "/s" in done.stdout
    assert steps(tmp_path / "copy") == [3]


def test_named_steps_and_all_of_them(run: Path, tmp_path: Path) -> None:
    assert command("copy", run, tmp_path / "copy", "--step", 2, "--step", 1).returncode == 0
    assert steps(tmp_path / "copy") == [1, 2]
    done = command("copy", run, tmp_path / "copy", "--all")
    assert done.returncode == 0 and done.stdout.count("there already") == 2
    assert steps(tmp_path / "copy") == [1, 2, 3]


def test_one_step_by_its_name(run: Path, tmp_path: Path) -> None:
    assert command("copy", run / "step-2", tmp_path / "copy").returncode == 0
    assert steps(tmp_path / "copy") == [2]


def test_to_a_bucket_and_back(run: Path, tmp_path: Path, s3: S3) -> None:
    assert command("copy", run, s3.url("copy"), "--all").returncode == 0
    assert command("copy", s3.url("copy"), tmp_path / "back", "--all").returncode == 0
    for file in run.rglob("*"):
        if file.is_file():
            assert (tmp_path / "back" / file.relative_to(run)).read_bytes() == file.read_bytes()


def test_a_damaged_step_is_reported_and_the_others_are_copied(run: Path, tmp_path: Path) -> None:
    file = run / "step-2" / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    done = command("copy", run, tmp_path / "copy", "--all")
    assert done.returncode == 1 and "model.safetensors" in done.stderr and "step 2" in done.stderr
    assert steps(tmp_path / "copy") == [1, 3]


def test_a_step_of_another_save_stays(run: Path, tmp_path: Path) -> None:
    with tr.Checkpointer(tmp_path / "copy", no_dist=True) as there:
        there.save(3, state(4))
    done = command("copy", run, tmp_path / "copy")
    assert done.returncode == 1 and "is in" in done.stderr and "already" in done.stderr
    with tr.Checkpointer(tmp_path / "copy", no_dist=True) as there:
        assert there.load().state["seed"] == 4


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("{run}", "{run}"), "name another place"),
        (("{run}/step-2", "{run}/x", "--step", "2"), "leave out --step"),
        (("{run}", "{run}/x", "--step", "2", "--all"), "not both"),
        (("{run}", "{run}/x", "--step", "8"), "no step 8"),
        (("{run}/none", "{run}/x"), "no such directory"),
        (("http://127.0.0.1:1", "{run}/x"), "is an endpoint"),
    ],
)
def test_what_is_refused(run: Path, arguments: tuple[str, ...], said: str) -> None:
    done = command("copy", *(one.format(run=run) for one in arguments))
    assert done.returncode == 1 and said in done.stderr
    assert not (run / "x").exists()
