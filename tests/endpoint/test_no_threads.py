"""A publisher that cannot start a thread publishes all the same, and so do those that follow."""

from __future__ import annotations

import threading

import pytest
import torch

import torchrelay as tr

TIMEOUT = 30


def test_a_thread_that_cannot_be_started_does_not_stop_the_next_publish(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    refused: list[str] = []
    start = threading.Thread.start

    def cannot(self: threading.Thread) -> None:
        if self.name == "torchrelay-publish":
            refused.append(self.name)
            raise RuntimeError("can't start new thread")
        start(self)

    with tr.serve({"w": torch.zeros(9)}, step=1, no_dist=True, timeout=TIMEOUT) as endpoint:
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", cannot)
            endpoint.publish({"w": torch.full((9,), 2.0)}, step=2).result(TIMEOUT)
            assert refused
        endpoint.publish({"w": torch.full((9,), 3.0)}, step=3).result(TIMEOUT)
        got = tr.pull(endpoint.url, no_dist=True, timeout=TIMEOUT)
        assert got.step == 3 and bool((got.state["w"] == 3).all())
