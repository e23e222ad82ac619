"""Workers of data loaders in these tests."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def forked_workers(request: pytest.FixtureRequest) -> Iterator[None]:
    """They are forked, as is the default before Python 3.14. From then on each is an interpreter
    that imports torch, for seconds; slow tests have these."""
    before = multiprocessing.get_start_method(allow_none=True)
    if request.node.get_closest_marker("slow") is None:
        multiprocessing.set_start_method("fork", force=True)
    yield
    multiprocessing.set_start_method(before, force=True)
