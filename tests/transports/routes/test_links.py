"""Slow links: what several receivers cost where the network, not the machine, is the limit."""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.links import SIDES, STATE_BYTES, Row, measure
from benchmarks.versus import IN_PLACE
from tests.support import netns
from tests.support.forks import run_program
from tests.support.netns import HostFailed, Hosts, Switch, Unavailable
from torchrelay import Relay
from torchrelay.transports.routes.tcp import CONNECTION_BYTES

ROOT = Path(__file__).resolve().parents[3]
HOST_SECONDS = 100  # hosts start in seconds; a machine that is busy takes longer

pytestmark = pytest.mark.timeout(2 * HOST_SECONDS)


@pytest.fixture(scope="module", autouse=True)
def network() -> Iterator[Switch]:
    try:
        switch = Switch(2)
    except Unavailable as reason:
        pytest.skip(str(reason))
    with switch:
        yield switch


def measured(repeats: int, nbytes: int = STATE_BYTES) -> tuple[Row, Row]:
    """torch's and ours, to one receiver and to three."""
    stock, ours = measure([("torch", IN_PLACE), ("torchrelay", IN_PLACE)], nbytes, repeats)
    assert stock.exact and ours.exact
    return stock, ours


def test_a_state_leaves_its_sender_once_for_three_receivers() -> None:
    nbytes = STATE_BYTES // 4
    stock, ours = measured(1, nbytes)
    # What a port counts has headers and what is sent again, too.
    assert min(ours.all.sent) >= nbytes and max(ours.all.sent) <= 1.1 * nbytes
    assert min(stock.all.sent) >= 3 * nbytes


@pytest.mark.slow
def test_three_receivers_take_as_long_as_one() -> None:
    busy = os.getloadavg()[0] > (os.cpu_count() or 1)  # others take the processor from receivers
    stock, ours = measured(3)
    if min(ours.one.laps + stock.one.laps) < STATE_BYTES * 8 / netns.GIGABIT:
        pytest.skip("links of this machine's namespaces do not keep to the speed that they have")
    assert stock.ratio > 2, (stock.one.laps, stock.all.laps)
    most = stock.ratio / 2 if busy else 1.1
    assert ours.ratio <= most, (ours.one.laps, ours.all.laps)


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    out = tmp_path_factory.mktemp("links") / "small.json"
    words = ("--small", "--out", str(out))
    done = run_program("benchmarks.links", *words, folder=ROOT, seconds=HOST_SECONDS)
    assert done.code == 0, done.output
    found: dict[str, Any] = json.loads(out.read_text())
    return found


@pytest.mark.slow
def test_the_benchmark_writes_a_whole_record(result: dict[str, Any]) -> None:
    assert [(row["who"], row["mode"]) for row in result["rows"]] == SIDES
    assert result["machine"]["cores"] >= 1
    for row in result["rows"]:
        for side in (row["one"], row["3"]):
            assert side["bit_exact"] and len(side["seconds"]) == 1
            assert side["sender_port_bytes"] >= result["state_bytes"]


def own_namespace() -> str:
    return str(Path("/proc/self/ns/net").readlink())


def where(rank: int) -> tuple[str, list[str]]:
    return own_namespace(), sorted(name for _, name in socket.if_nameindex())


def fails(rank: int) -> None:
    if rank:
        raise ValueError("no such luck")


def test_hosts_are_apart_and_end_together(network: Switch) -> None:
    before = own_namespace(), socket.if_nameindex()
    with Hosts(network) as hosts:
        one, two = hosts.run(where)
        assert len({one[0], two[0], before[0]}) == 3
        assert one[1] == two[1] == ["eth0", "lo"]
        assert (own_namespace(), socket.if_nameindex()) == before
        with pytest.raises(HostFailed, match="rank 1 failed") as failed:
            hosts.run(fails)
        assert "no such luck" in str(failed.value)
        assert not any(process.is_alive() for process in hosts._processes)


def over_connections(rank: int) -> Any:
    state = {"w": torch.full((3 * CONNECTION_BYTES,), rank, dtype=torch.uint8)}
    relay = Relay(timeout=HOST_SECONDS / 2, route="tcp", connections=3)
    if rank == 0:
        report = relay.send(state, 1)
    else:
        report = relay.recv(0, into=state, atomic=False).report
        assert not state["w"].any()
    return report.traffic.connections, report.verified, report.route


def test_connections_reach_another_host(network: Switch) -> None:
    with Hosts(network) as hosts:
        for _ in range(2):  # made, and used again
            assert hosts.run(over_connections) == [(3, True, "tcp")] * 2


def test_a_machine_without_namespaces_is_told_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyroute2", None)
    with pytest.raises(Unavailable, match="pyroute2"):
        Switch(2)
