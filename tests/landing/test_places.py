"""Where bytes go as they arrive (`atomic=False`): each of them has one place."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import torchrelay as tr
from torchrelay.describing.snapshot import capture
from torchrelay.errors import UnsupportedLeafError
from torchrelay.landing.commit.landing import Landing
from torchrelay.landing.land import land
from torchrelay.landing.options import LandingOptions

DIRECT = LandingOptions(atomic=False)


def written(state: Any, into: Any) -> Landing:
    """A landing that all bytes have come to."""
    snapshot = capture(state)
    landing = land(snapshot.record, into, DIRECT)
    for chunk, size in enumerate(landing.chunks.sizes):
        data = torch.empty(size, dtype=torch.uint8)
        snapshot.read(chunk, data)
        landing.target().write(chunk, data)
    return landing


def test_a_tied_tensor_for_two_of_its_own_is_held_until_the_commit() -> None:
    tied = torch.arange(64.0)
    into = {"a": torch.zeros(64), "b": torch.zeros(64), "c": torch.zeros(8)}
    landing = written({"a": tied, "b": tied.view(64), "c": torch.ones(8)}, into)
    assert landing.torn and into["c"].sum() == 8
    assert not into["a"].any() and not into["b"].any()
    landing.commit()
    assert torch.equal(into["a"], tied) and torch.equal(into["b"], tied)


def test_tied_tensors_for_tied_ones_are_written_at_once() -> None:
    tied, mine = torch.arange(64.0), torch.zeros(64)
    landing = written({"a": tied, "b": tied.view(64)}, {"a": mine, "b": mine.view(64)})
    assert torch.equal(mine, tied) and landing.torn
    landing.commit()


def test_other_strides_wait_for_the_commit_and_the_same_do_not() -> None:
    source = torch.arange(120.0).view(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)
    same = torch.zeros(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)
    other, gaps = torch.zeros(2, 3, 4, 5), torch.zeros(2, 3, 4, 10)[..., ::2]
    for mine, at_once in ((same, True), (other, False), (gaps, False)):
        landing = written({"w": source}, {"w": mine})
        assert landing.torn is at_once and torch.equal(mine, source) is at_once
        landing.commit()
        assert torch.equal(mine, source)


class Sealed:
    """It travels, and does not open again."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


tr.register(Sealed, encode=lambda one: [one.tensor], decode=lambda body: Sealed(body["tensor"]))


def test_a_missing_type_that_cannot_be_made_is_found_before_anything_is_written() -> None:
    snapshot, into = capture({"w": torch.ones(8), "sealed": Sealed(torch.ones(8))}), torch.zeros(8)
    options = LandingOptions(strict=False, make_missing=True)
    landing = land(snapshot.record, {"w": into}, options)
    for chunk, size in enumerate(landing.chunks.sizes):
        data = torch.empty(size, dtype=torch.uint8)
        snapshot.read(chunk, data)
        landing.target().write(chunk, data)
    with pytest.raises(UnsupportedLeafError, match="cannot be rebuilt"):
        landing.commit()
    assert not into.any()
