"""What torch_checkpointing does with a damaged file and with a pickle: cells of the README.

Its own calls are run, so that a release of it that mends one of these fails here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import torchrelay as tr
from tests.support.forge import flip

NUMBERS = 4096


class Payload:
    """Leaves a file where it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return Path.touch, (self.mark,)


@pytest.fixture
def manager() -> Any:
    """Theirs, with plain writes: direct ones fail on some file systems."""
    theirs = pytest.importorskip("torch_checkpointing")
    from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

    storage = LocalFileSystemStorageConfig(use_direct_io=False)
    config = theirs.CheckpointManager.Config(
        save=theirs.SyncCheckpointSaverConfig(), storage_config=storage
    )
    made = theirs.CheckpointManager(config)
    yield made
    made.close()


def damaged(folder: Path) -> None:
    """Flip a byte in the middle of the largest file."""
    largest = max((p for p in folder.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    flip(largest, largest.stat().st_size // 2)


def test_a_flipped_byte(manager: Any, tmp_path: Path) -> None:
    state = {"model": {"w": torch.ones(NUMBERS)}}
    manager.save(str(tmp_path / "theirs"), state)
    damaged(tmp_path / "theirs")
    loaded = manager.load(str(tmp_path / "theirs"), into={"model": {"w": torch.zeros(NUMBERS)}})
    assert (loaded["model"]["w"] != 1).sum() == 1

    with tr.Checkpointer(tmp_path / "ours") as checkpointer:
        checkpointer.save(1, state)
        damaged(tmp_path / "ours")
        with pytest.raises(tr.errors.DamagedError):
            checkpointer.load(step=1)


def test_a_pickle(manager: Any, tmp_path: Path) -> None:
    mark = tmp_path / "executed"
    manager.save(str(tmp_path / "theirs"), {"model": {"w": Payload(mark)}})
    assert not mark.exists()
    manager.load(str(tmp_path / "theirs"), into={"model": {"w": None}})
    assert mark.exists()

    with tr.Checkpointer(tmp_path / "ours") as checkpointer:
        with pytest.raises(tr.errors.UnsupportedLeafError):
            checkpointer.save(1, {"w": Payload(mark)})
