"""Real training jobs go through every API and train on with the losses they would have had."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.conformance import matrix
from tests.conformance.__main__ import NOT_CARRIED, PAGE
from tests.conformance.apis import DURABLE, LIVE, PARTS
from tests.conformance.jobs import JOBS
from tests.support.ranks import RankPool
from tests.support.torchft_files import MISSING, find_torchft

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


@pytest.fixture(scope="module")
def pools(pool2: Any, pool3: Any, pool4: Any, pool8: Any) -> Iterator[dict[int, Any]]:
    with RankPool(1, forks=True) as pool1:
        yield {1: pool1, 2: pool2, 3: pool3, 4: pool4, 8: pool8}


def pairs() -> Iterator[Any]:
    for api in matrix.APIS:
        for job in filter(partial(matrix.fits, api), JOBS):
            later = () if matrix.chosen(api, job) else (pytest.mark.slow,)
            yield pytest.param(api, job, id=f"{api}-{job}", marks=later)


@pytest.mark.parametrize(("api", "job"), list(pairs()))
def test_it_trains_on(api: str, job: str, pools: dict[int, Any], tmp_path: Path) -> None:
    if api == "torchft" and not find_torchft():
        pytest.skip(MISSING)
    for cell in matrix.cells(api, job, all_ranks=False):
        problem = matrix.run(cell, pools, tmp_path)
        assert not problem, f"{cell}:\n{problem}"


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("api", matrix.APIS)
def test_on_every_number_of_ranks(api: str, pools: dict[int, Any], tmp_path: Path) -> None:
    if api == "torchft" and not find_torchft():
        pytest.skip(MISSING)
    cells = [cell for job in JOBS for cell in matrix.cells(api, job, all_ranks=True)]
    problems = {cell: problem for cell in cells if (problem := matrix.run(cell, pools, tmp_path))}
    assert problems == {}


def test_the_page_is_of_these_apis_and_jobs_and_shows_no_failure() -> None:
    text = PAGE.read_text()
    for api in matrix.APIS:
        assert f" `{api}` |" in text, api
    for job in JOBS:
        (durable, live, parts) = re.findall(rf"^\| {re.escape(job)} \|(.*)\|$", text, re.M)
        for row, names in ((durable, DURABLE), (live, LIVE), (parts, PARTS)):
            cells = [cell.strip() for cell in row.split("|")]
            assert cells == [_count(name, job) for name in names], job


def _count(api: str, job: str) -> str:
    trips = 4 if api in LIVE else 8
    return f"{trips} of {trips}" if matrix.fits(api, job) else NOT_CARRIED
