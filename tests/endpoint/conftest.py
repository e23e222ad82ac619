"""One endpoint for all tests of a file: each publishes its own step."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import Any

import pytest
import torch

import torchrelay as tr
from tests.support import flat
from torchrelay.endpoint.front import Endpoint


class Stage:
    """Publishes states at one endpoint, each as a step of its own."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self._steps = count(1)

    @property
    def url(self) -> str:
        return self.endpoint.url

    def show(self, state: object) -> int:
        step = next(self._steps)
        published = self.endpoint.publish(state, step=step)
        published.result(60)
        assert published.skipped is None
        return step

    def through(self, state: object, **options: Any) -> Any:
        """What a pull gives of a state."""
        step = self.show(state)
        return flat.pull(self.url, step=step, timeout=60, same_host=False, **options).state


@pytest.fixture(scope="module")
def stage() -> Iterator[Stage]:
    with tr.serve({"nothing": torch.zeros(1)}, step=0, timeout=60) as endpoint:
        yield Stage(endpoint)
