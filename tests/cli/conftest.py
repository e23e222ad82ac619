"""A checkpoint of four ranks, saved once for all tests of commands."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import sharded_job
from tests.support.ranks import run_ranks


@pytest.fixture(scope="session")
def four_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `run` (two steps) and `dcp`; tests must not write to it."""
    folder = tmp_path_factory.mktemp("four-ranks")
    run_ranks(sharded_job.save, 4, str(folder), timeout=100)
    return folder
