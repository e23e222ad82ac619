"""What an endpoint reports of its readers: how each ended, how much it took, however many."""

from __future__ import annotations

import http.client
import itertools
import secrets
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import torchrelay as tr
from torchrelay.endpoint.front import Endpoint

STATE = {"model": {"w": torch.arange(100_000.0)}, "other": torch.ones(500_000)}


@pytest.fixture(scope="module")
def endpoint() -> Iterator[Endpoint]:
    with tr.serve(STATE, step=1, no_dist=True, timeout=60) as made:
        tr.pull(made.url, timeout=60)
        yield made


def ended(endpoint: Endpoint, count: int) -> list[dict[str, Any]]:
    """The transfers that are over, once there are so many."""
    while True:
        found: list[dict[str, Any]] = endpoint.status()["finished"]
        if len(found) >= count:
            return found


def test_a_mapped_pull_that_fails_is_reported_as_failed(endpoint: Endpoint) -> None:
    before = len(endpoint.status()["finished"])
    outcomes = _outcomes(endpoint)
    with pytest.raises(tr.errors.MismatchError):
        into = {"model": {"w": torch.zeros(3)}, "other": torch.zeros(500_000)}
        tr.pull(endpoint.url, into=into, timeout=60)
    last = ended(endpoint, before + 1)[-1]
    assert (last["kind"], last["outcome"]) == ("mapped", "failed"), last
    assert last["bytes"] == 0 and "shape" in last["reason"]
    assert _outcomes(endpoint) == {**outcomes, "failed": outcomes["failed"] + 1}


def test_a_mapped_pull_of_a_part_is_reported_with_its_bytes(endpoint: Endpoint) -> None:
    before = len(endpoint.status()["finished"])
    got = tr.pull(endpoint.url, include="model.*", timeout=60)
    last = ended(endpoint, before + 1)[-1]
    assert (last["kind"], last["outcome"]) == ("mapped", "done")
    assert last["bytes"] == got.report.bytes == 400_000
    tr.pull(endpoint.url, timeout=60)
    assert ended(endpoint, before + 2)[-1]["bytes"] == 2_400_000


def _outcomes(endpoint: Endpoint) -> dict[str, int]:
    found = {}
    for line in _get(endpoint, "/metrics").decode().splitlines():
        if line.startswith("torchrelay_transfers_total"):
            name, count = line.split('"')[1], line.split()[-1]
            found[name] = int(count)
    return found


def _get(endpoint: Endpoint, path: str, **headers: str) -> bytes:
    line = http.client.HTTPConnection(endpoint.url.removeprefix("http://"), timeout=30)
    try:
        line.request("GET", path, headers=headers)
        return line.getresponse().read()
    finally:
        line.close()


def test_status_while_many_readers_come_and_go(endpoint: Endpoint) -> None:
    """Readers are entered on the event loop, and the status is made there too."""
    over = threading.Event()
    faults: list[BaseException] = []

    def read() -> None:
        line = http.client.HTTPConnection(endpoint.url.removeprefix("http://"), timeout=30)
        try:
            for number in itertools.count():
                name = secrets.token_hex(16)
                line.request("GET", "/record?step=1", headers={"Torchrelay-Reader": name})
                line.getresponse().read()
                if number > 200:  # there are many by now, and from here on as many
                    kind = {"Content-Type": "application/json"}
                    line.request("POST", f"/readers/{name}", b'{"outcome": "done"}', kind)
                    line.getresponse().read()
                if over.is_set():
                    return
        except BaseException as fault:
            faults.append(fault)
        finally:
            line.close()

    readers = [threading.Thread(target=read) for _ in range(4)]
    for reader in readers:
        reader.start()
    try:
        for _ in range(400):
            endpoint.status()
    finally:
        over.set()
        for reader in readers:
            reader.join(30)
    assert not faults, faults
