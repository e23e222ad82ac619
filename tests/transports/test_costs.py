"""What a transfer should cost: predictions that have all phases, and that get better."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import torchrelay as tr
from torchrelay.transports.protocol.fanout import by_machine
from torchrelay.transports.routes.costs import Costs, copy_rate


def test_more_costs_more() -> None:
    costs = Costs()
    small = costs.predict("recv", "host", leaves=10, nbytes=1 << 20)
    large = costs.predict("recv", "host", leaves=10, nbytes=1 << 30)
    many = costs.predict("recv", "host", leaves=10_000, nbytes=1 << 20)
    assert large["data"] > 10 * small["data"] and large["join"] == small["join"]
    assert all(many[phase] > small[phase] for phase in small)
    assert costs.predict("send", "group", leaves=1, nbytes=1 << 30)["data"] > large["data"]
    staged = costs.predict("recv", "host", leaves=10, nbytes=1 << 30, staged=True)
    assert staged["commit"] > large["commit"]


def test_a_fast_device_costs_little() -> None:
    costs = Costs()
    by = {
        route: costs.predict("recv", route, leaves=1, nbytes=8 << 30)["data"]
        for route in ("cuda_ipc", "host", "group")
    }
    assert by["cuda_ipc"] < by["host"] < by["group"]


def test_it_learns() -> None:
    costs = Costs()
    for _ in range(20):
        found = costs.predict("send", "host", leaves=100, nbytes=1 << 30)
        costs.learn("send", "host", found, {"data": 7.0, "unknown": 1.0})
    assert found["data"] == pytest.approx(7.0, rel=0.01)
    other = costs.predict("send", "group", leaves=100, nbytes=1 << 30)
    assert other == Costs().predict("send", "group", leaves=100, nbytes=1 << 30)


def test_the_rate_is_that_of_a_machine() -> None:
    assert 1e8 < copy_rate() < 1e12


def reports(rank: int, group: Any, atomic: bool) -> Any:
    relay = tr.Relay(group, timeout=30)
    state = {"w": torch.full((1 << 20,), float(rank))}
    found = []
    for _ in range(3):
        if rank == 0:
            found.append(relay.send(state, to=1))
        else:
            found.append(relay.recv(0, into=state, atomic=atomic).report)
    relay.close()
    return [(report.predicted, report.seconds, report.explain()) for report in found]


@pytest.mark.parametrize("atomic", [True, False])
def test_reports_explain_themselves(pool2: Any, atomic: bool) -> None:
    for ours in pool2.run(reports, atomic):
        for predicted, seconds, text in ours:
            assert set(predicted) <= set(seconds) and predicted["data"] > 0
            assert "by route host" in text and "not by cuda_ipc:" in text
            for phase in seconds:
                assert phase in text
            assert "predicted" in text and "total" in text


def test_machines_stay_together() -> None:
    where = {1: "a", 2: "b", 3: "a", 4: "", 5: "b", 6: "a"}
    assert by_machine([1, 2, 3, 4, 5, 6], where.__getitem__) == [1, 3, 6, 2, 5, 4]
    assert by_machine([], where.__getitem__) == []
