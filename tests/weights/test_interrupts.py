"""Ctrl-C at any line of an update: one version is there, and the next update is right."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

import torchrelay as tr
from tests.support.interrupts import interrupted, lines_of
from tests.support.rounds import rounds

TIMEOUT = 30
PARTS = ("weights/", "checkpointer/", "landing/", "sources/", "stores/reading/", "parts/")
SHARE = 40  # of the lines, every day


def weights(version: int) -> dict[str, Any]:
    return {
        "rows": torch.arange(3000.0).reshape(60, 50) + version,
        "half": torch.arange(777).bfloat16() * version,
        "tied": (same := torch.full((9,), version)),
        "again": same,
        "version": version,
    }


@pytest.mark.timeout(600)  # an update for each line
@pytest.mark.parametrize("same_host", [False, True])
def test_an_update_that_is_interrupted(same_host: bool) -> None:
    with tr.serve(weights(1), step=1, timeout=TIMEOUT) as endpoint:
        into = weights(-1)
        subscription = tr.subscribe(endpoint.url, into=into, same_host=same_host, timeout=TIMEOUT)
        version = 2

        def publish() -> None:
            while endpoint.publish(weights(version), step=version).result(TIMEOUT).skipped:
                pass  # an interrupted reader is still taken to read

        def has(number: int) -> bool:
            wanted = weights(number)
            return into["version"] == number and all(
                torch.equal(into[name], one)
                for name, one in wanted.items()
                if isinstance(one, torch.Tensor)
            )

        endpoint.publish(weights(2), step=2).result(TIMEOUT)
        lines = lines_of(subscription.update, PARTS)
        assert has(2) and len(lines) > 300
        chosen = lines[:: max(1, len(lines) // rounds(len(lines), SHARE))]
        print(f"{len(chosen)} of {len(lines)} lines")
        torn = []
        for line in chosen:
            version += 1
            publish()
            if not interrupted(subscription.update, PARTS, line):
                continue
            if not (has(version - 1) or has(version)):
                torn.append(line)
            assert subscription.update(timeout=TIMEOUT).step == version and has(version), line
        assert not torn, torn


@pytest.mark.timeout(600)  # with all rounds it compares 7 GB
@pytest.mark.parametrize("same_host", [False, True])
def test_an_update_whose_time_is_over_while_it_lands(same_host: bool) -> None:
    """Deadlines of all lengths: some of them pass within the landing."""
    size, count = 1 << 18, 24

    def state(version: int) -> dict[str, Any]:
        return {f"t{n}": torch.full((size,), version) for n in range(count)}

    with tr.serve(state(1), step=1, timeout=TIMEOUT) as endpoint:
        into = state(-1)
        subscription = tr.subscribe(endpoint.url, into=into, same_host=same_host, timeout=TIMEOUT)
        begun = time.monotonic()
        subscription.update()
        longest, failed = time.monotonic() - begun, 0
        for version in range(2, 2 + rounds(150, 10)):
            while endpoint.publish(state(version), step=version).skipped is not None:
                pass  # a reader that gave up is still taken to read
            endpoint._publisher.settle(TIMEOUT)
            seconds = longest * (version % 25 + 1) / 25
            try:
                subscription.update(at_least=version, timeout=seconds)
            except tr.errors.RelayError:
                failed += 1
            assert len({int(one[at]) for one in into.values() for at in (0, -1)}) == 1
            assert all(bool((one == one[0]).all()) for one in into.values())
        print(f"{failed} updates of {version - 1} were late")
        assert failed
        assert subscription.update(timeout=TIMEOUT).step == version == int(into["t0"][0])
