"""A step that is copied is the same step, or none at all."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import torchrelay as tr
from tests.support.saved import equal, state
from torchrelay.inspection.step_copy import copy_step
from torchrelay.progress import Progress
from torchrelay.stores.locate import open_store
from torchrelay.stores.opening import open_newest


@pytest.fixture
def place(tmp_path: Path) -> Path:
    with tr.Checkpointer(tmp_path / "run", no_dist=True) as there:
        there.save(7, {**state(1), "large": torch.arange(5_000_000.0)})
    return tmp_path / "run"


def test_a_copy_has_the_same_bytes(place: Path, tmp_path: Path) -> None:
    seen: list[Progress] = []
    held = open_newest(open_store(place))
    copy_step(held, open_store(tmp_path / "copy"), seen.append)
    held.close()
    assert seen[-1].done == seen[-1].total == held.record.volume_bytes
    for file in (place / "step-7").iterdir():
        assert (tmp_path / "copy" / "step-7" / file.name).read_bytes() == file.read_bytes()
    with tr.Checkpointer(tmp_path / "copy", no_dist=True) as there:
        assert there.verify() == 7 and equal(
            there.load(include=["optim.*", "seed"]).state["seed"], 1
        )


def test_a_step_that_is_there_stays(place: Path) -> None:
    held = open_newest(open_store(place))
    with pytest.raises(tr.errors.StepExistsError):
        copy_step(held, open_store(place), lambda told: None)
    held.close()
    assert [path.name for path in place.iterdir()] == ["step-7"]


def test_damage_is_not_copied(place: Path, tmp_path: Path) -> None:
    file = next((place / "step-7").glob("*.safetensors"))
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    held = open_newest(open_store(place))
    with pytest.raises(tr.errors.DamagedError):
        copy_step(held, open_store(tmp_path / "copy"), lambda told: None)
    held.close()
    assert not list((tmp_path).glob("copy/*"))


def test_a_copy_that_is_interrupted_leaves_nothing(place: Path, tmp_path: Path) -> None:
    def interrupt(told: Progress) -> None:
        if told.done > 8 << 20:
            raise KeyboardInterrupt

    held = open_newest(open_store(place))
    with pytest.raises(KeyboardInterrupt):
        copy_step(held, open_store(tmp_path / "copy"), interrupt)
    held.close()
    assert not list((tmp_path / "copy").iterdir())
