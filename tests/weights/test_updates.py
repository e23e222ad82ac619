"""What travels where little has changed: changed elements, or nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import torchrelay as tr
from tests.weights.conftest import Wire
from tests.weights.test_faults import PARTS, flipped

TIMEOUT = 30
ROWS, COLUMNS = 2048, 1024
NBYTES = 2 * ROWS * COLUMNS


class Trainer:
    """Publishes a matrix of which some elements change."""

    def __init__(self, endpoint: Any, state: dict[str, Any]) -> None:
        self.endpoint, self.state, self.step = endpoint, state, 1
        self._draw = torch.Generator().manual_seed(5)

    def publish(self, share: float) -> int:
        weights = self.state["w"]
        chosen = torch.rand(weights.shape, generator=self._draw) < share
        weights[chosen] = torch.randn(int(chosen.sum()), generator=self._draw).bfloat16()
        self.step += 1
        self.state["step"] = self.step
        self.endpoint.publish(self.state, step=self.step).result(TIMEOUT)
        return self.step


def same(into: dict[str, Any], trainer: Trainer) -> bool:
    return torch.equal(into["w"], trainer.state["w"]) and into["step"] == trainer.step


@pytest.fixture
def setting(wires: Callable[[str], Wire]) -> Any:
    draw = torch.Generator().manual_seed(4)
    state = {"w": torch.randn(ROWS, COLUMNS, generator=draw).bfloat16(), "step": 1}
    with tr.serve(state, step=1, timeout=TIMEOUT) as endpoint:
        wire = wires(endpoint.url)
        into = {"w": torch.zeros(ROWS, COLUMNS, dtype=torch.bfloat16), "step": 0}
        with tr.subscribe(wire.url, into=into, same_host=False, timeout=TIMEOUT) as subscription:
            subscription.update()
            yield Trainer(endpoint, state), subscription, wire, into


def test_changed_elements_travel(setting: Any) -> None:
    trainer, subscription, wire, into = setting
    for _ in range(3):
        trainer.publish(0.02)
        before = wire.received
        subscription.update(at_least=trainer.step)
        assert same(into, trainer)
        assert wire.received - before < 0.04 * NBYTES


def test_a_worker_that_missed_steps_gets_their_changes_together(setting: Any) -> None:
    trainer, subscription, wire, into = setting
    for _ in range(3):
        trainer.publish(0.01)
    before = wire.received
    subscription.update(at_least=trainer.step)
    assert same(into, trainer) and wire.received - before < 0.06 * NBYTES
    for _ in range(6):  # more than are remembered
        trainer.publish(0.01)
    before = wire.received
    subscription.update(at_least=trainer.step)
    assert same(into, trainer) and wire.received - before > NBYTES


def test_nothing_is_read_where_nothing_changed(setting: Any) -> None:
    trainer, subscription, wire, into = setting
    trainer.publish(0.0)
    asked = wire.asked.count(PARTS)
    got = subscription.update(at_least=trainer.step)
    assert got.step == trainer.step and same(into, trainer)
    assert wire.asked.count(PARTS) == asked


@pytest.mark.parametrize("same_host", [False, True])
def test_a_step_with_the_same_content_is_not_landed(same_host: bool) -> None:
    state = {"w": torch.arange(4.0), "name": "x"}
    with tr.serve(state, step=1, timeout=TIMEOUT) as endpoint:
        into = {"w": torch.zeros(4), "name": ""}
        subscription = tr.subscribe(endpoint.url, into=into, same_host=same_host, timeout=TIMEOUT)
        subscription.update()
        into["w"].fill_(7)  # as it is not written to, this stays
        endpoint.publish(state, step=2).result(TIMEOUT)
        got = subscription.update(at_least=2)
        assert (got.step, got.report.bytes, subscription.step) == (2, 0, 2)
        assert into["w"].tolist() == [7.0] * 4
        endpoint.publish(state | {"name": "y"}, step=3).result(TIMEOUT)
        assert subscription.update(at_least=3).step == 3
        assert into["name"] == "y" and torch.equal(into["w"], state["w"])


def test_damaged_changes_are_found_and_all_is_fetched(setting: Any) -> None:
    trainer, subscription, wire, into = setting
    trainer.publish(0.02)
    done: list[int] = []

    def meddle(asked: bytes, at: int, data: bytes) -> bytes:
        if asked == PARTS and at > 40_000 and not done:
            done.append(at)
            return data[:-1] + flipped(data[-1:])
        return data

    wire.meddle = meddle
    before = wire.received
    subscription.update(at_least=trainer.step)
    assert done and same(into, trainer)
    assert wire.received - before > NBYTES // 4
