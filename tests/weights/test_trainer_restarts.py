"""A trainer that is gone, and one that is back at a lower step: the worker is notified."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import torchrelay as tr
from tests.weights.conftest import Wire

TIMEOUT = 30


def weights(value: float) -> dict[str, Any]:
    return {"w": torch.full((100,), value)}


@pytest.mark.parametrize("same_host", [False, True])
def test_an_update_says_that_the_trainer_went_back(
    wires: Callable[[str], Wire], same_host: bool
) -> None:
    into = weights(0)
    options = {"no_dist": True, "timeout": TIMEOUT}
    with tr.serve(weights(5), step=500, **options) as first:
        wire = wires(first.url)
        subscription = tr.subscribe(wire.url, into=into, same_host=same_host, **options)
        got = subscription.update()
        assert got.back_from is None and "went back" not in str(got.report)
    wire.forget()
    with tr.serve(weights(4), step=400, **options) as second:
        wire.lead(second.url)
        got = subscription.update()
        assert got.step == 400 and bool((into["w"] == 4).all())
        assert got.back_from == 500 and [one.step for one in got.report.attempts] == [500]
        assert "the publisher went back to a lower step" in str(got.report)
        assert subscription.update().back_from is None
        second.publish(weights(4), step=401).result(TIMEOUT)
        assert subscription.update(at_least=401).back_from is None
    wire.forget()
    with tr.serve(weights(4), step=300, **options) as third:  # the same state
        wire.lead(third.url)
        got = subscription.update()
        assert (got.step, got.back_from) == (300, 401)
        with pytest.raises(tr.errors.TransferTimeoutError, match="the newest is 300"):
            subscription.update(at_least=401, timeout=0.5)
    subscription.close()


def test_an_update_says_why_the_trainer_cannot_be_reached() -> None:
    into = weights(0)
    with tr.serve(weights(5), step=5, no_dist=True, timeout=TIMEOUT) as endpoint:
        subscription = tr.subscribe(endpoint.url, into=into, no_dist=True, timeout=TIMEOUT)
        subscription.update()
    for at_least in (None, 6):
        with pytest.raises(tr.errors.TransferTimeoutError) as caught:
            subscription.update(at_least, timeout=1)
        text = str(caught.value)
        assert f"{endpoint.url} does not answer: Connection refused" in text
        assert "Start the publisher" in text and bool((into["w"] == 5).all())
    subscription.close()


def test_one_of_two_servers_that_is_gone_is_named() -> None:
    options = {"no_dist": True, "timeout": TIMEOUT}
    with tr.serve(weights(5), step=5, **options) as one:
        with tr.serve(weights(5), step=5, **options) as other:
            subscription = tr.subscribe([one.url, other.url], into=weights(0), **options)
            subscription.update()
        with pytest.raises(tr.errors.TransferTimeoutError) as caught:
            subscription.update(at_least=6, timeout=2)
        text = str(caught.value)
        assert "the newest is 5" in text
        assert f"{other.url} does not answer: Connection refused" in text
        subscription.close()
