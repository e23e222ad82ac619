"""Ctrl-C at any line of an update: the destination has one version, and the next update is right."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import torchrelay as tr
from tests.support.interrupts import interrupted, lines_of
from tests.support.rounds import rounds

TIMEOUT = 30
PARTS = ("weights/", "checkpointer/", "landing/", "sources/", "stores/reading/", "parts/")
SHARE = 12  # of the lines, every day


def weights(version: int) -> dict[str, Any]:
    return {
        "rows": torch.arange(3000.0).reshape(60, 50) + version,
        "half": torch.arange(777).bfloat16() * version,
        "tied": (same := torch.full((9,), version)),
        "again": same,
        "version": version,
    }


@pytest.mark.parametrize("same_host", [False, True])
def test_an_update_that_is_interrupted(same_host: bool) -> None:
    with tr.serve(weights(1), step=1, timeout=TIMEOUT) as endpoint:
        into = weights(-1)
        subscription = tr.subscribe(
            endpoint.url, into=into, same_host=same_host, timeout=TIMEOUT
        )
        version = 2

        def publish() -> None:
            while endpoint.publish(weights(version), step=version).result(TIMEOUT) is None:
                pass  # an interrupted reader is still taken to read

        def has(number: int) -> bool:
            wanted = weights(number)
            return into["version"] == number and all(
                torch.equal(into[name], one)
                for name, one in wanted.items()
                if isinstance(one, torch.Tensor)
            )

        endpoint.publish(weights(2), step=2).result(TIMEOUT)
        lines = lines_of(lambda: subscription.update(), PARTS)
        assert has(2) and len(lines) > 300
        chosen = lines[:: max(1, len(lines) // rounds(len(lines), SHARE))]
        print(f"{len(chosen)} of {len(lines)} lines")
        torn = []
        for line in chosen:
            version += 1
            publish()
            if not interrupted(lambda: subscription.update(), PARTS, line):
                continue
            if not (has(version - 1) or has(version)):
                torn.append(line)
            assert subscription.update(timeout=TIMEOUT).step == version and has(version), line
        assert not torn, torn
