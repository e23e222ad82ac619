"""Real training jobs go through every door and train on with the losses they would have had."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conformance import matrix
from tests.conformance.__main__ import PAGE
from tests.conformance.doors import DURABLE, LIVE, PARTS
from tests.conformance.jobs import JOBS
from tests.support.ranks import RankPool

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


@pytest.fixture(scope="module")
def pools(pool2: Any, pool3: Any, pool4: Any, pool8: Any) -> Iterator[dict[int, Any]]:
    with RankPool(1, forks=True) as pool1:
        yield {1: pool1, 2: pool2, 3: pool3, 4: pool4, 8: pool8}


def pairs() -> Iterator[Any]:
    for door in matrix.DOORS:
        for job in JOBS:
            later = () if matrix.chosen(door, job) else (pytest.mark.slow,)
            yield pytest.param(door, job, id=f"{door}-{job}", marks=later)


@pytest.mark.parametrize(("door", "job"), list(pairs()))
def test_it_trains_on(door: str, job: str, pools: dict[int, Any], tmp_path: Path) -> None:
    for cell in matrix.cells(door, job, all_ranks=False):
        problem = matrix.run(cell, pools, tmp_path)
        assert not problem, f"{cell}:\n{problem}"


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("door", matrix.DOORS)
def test_on_every_number_of_ranks(door: str, pools: dict[int, Any], tmp_path: Path) -> None:
    cells = [cell for job in JOBS for cell in matrix.cells(door, job, all_ranks=True)]
    problems = {cell: problem for cell in cells if (problem := matrix.run(cell, pools, tmp_path))}
    assert problems == {}


def test_the_page_is_of_these_doors_and_jobs_and_shows_no_failure() -> None:
    text = PAGE.read_text()
    for door in matrix.DOORS:
        assert f" `{door}` |" in text, door
    counts = {door: 4 if door in LIVE else 8 for door in matrix.DOORS}
    for job in JOBS:
        (durable, live, parts) = re.findall(rf"^\| {re.escape(job)} \|(.*)\|$", text, re.M)
        for row, names in ((durable, DURABLE), (live, LIVE), (parts, PARTS)):
            cells = [cell.strip() for cell in row.split("|")]
            assert cells == [f"{counts[name]} of {counts[name]}" for name in names], job
