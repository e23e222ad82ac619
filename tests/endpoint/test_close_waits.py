"""An endpoint that is closed while another thread publishes: its memory is freed when that ends."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

import torchrelay as tr

TIMEOUT = 30


def test_memory_is_freed_when_the_call_that_writes_to_it_is_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    endpoint = tr.serve({"w": torch.zeros(9)}, step=1, no_dist=True, timeout=TIMEOUT)
    publisher: Any = endpoint._publisher
    begun, go, order = threading.Event(), threading.Event(), []
    reserve, free = publisher._reserve, publisher._free

    def slow(*args: Any) -> Any:
        begun.set()
        assert go.wait(TIMEOUT)
        reserved = reserve(*args)
        order.append("reserved")
        return reserved

    monkeypatch.setattr(publisher, "_reserve", slow)
    monkeypatch.setattr(publisher, "_free", lambda: (order.append("freed"), free()))
    state = {"w": torch.ones(9)}
    publishing = threading.Thread(target=lambda: endpoint.publish(state, step=2), daemon=True)
    publishing.start()
    assert begun.wait(TIMEOUT)
    closing = threading.Thread(target=endpoint.close, daemon=True)
    closing.start()
    closing.join(0.3)  # one that does not wait is over by then
    go.set()
    closing.join(TIMEOUT)
    publishing.join(TIMEOUT)
    assert order == ["reserved", "freed"]
