"""Files that are not in the page cache are read past it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from torchrelay.stores.local.step import LocalStep

NAME = "model.safetensors"


def test_looking_at_a_cold_file_does_not_make_it_a_warm_one(tmp_path: Path) -> None:
    """A load into new tensors looks at each file twice, and read it through the page cache."""
    path = tmp_path / NAME
    path.write_bytes(bytes(32 << 20))
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if not LocalStep(str(tmp_path)).reader(NAME).cold:
        pytest.skip("the file system here does not tell, or keeps all files in memory")
    for _ in range(4):
        step = LocalStep(str(tmp_path))
        assert all(step.reader(NAME, once=once).cold for once in (False, True))


def test_a_file_that_was_just_written_is_warm(tmp_path: Path) -> None:
    (tmp_path / NAME).write_bytes(bytes(32 << 20))
    assert not LocalStep(str(tmp_path)).reader(NAME).cold
