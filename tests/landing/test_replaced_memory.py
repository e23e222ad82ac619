"""Memory that was freed, or replaced while a state lands, is not read and not written to."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support.trips import trip
from torchrelay.describing.snapshot import capture
from torchrelay.errors import MismatchError, UnsupportedLeafError


class Rebinds:
    """An object that gives another leaf new memory when it takes its state."""

    def __init__(self, other: torch.Tensor) -> None:
        self.other, self.value = other, 0

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]
        if self.value == 1:  # its own state, when it is taken back, is 0
            self.other.data = torch.full_like(self.other, -5)


@pytest.mark.parametrize("shape", [(1000,), (20, 50)])
def test_a_tensor_that_an_object_moves_is_not_written_where_it_was(shape: tuple[int, ...]) -> None:
    live = torch.zeros(shape)
    before = live.data
    into = {"w": live if len(shape) == 1 else live.t(), "o": Rebinds(live), "v": torch.zeros(3)}
    if len(shape) > 1:  # a view keeps its memory, and is written
        into["w"] = live
    sent = {"w": torch.ones(shape), "o": {"value": 1}, "v": torch.ones(3)}
    with pytest.raises(MismatchError, match="other memory") as caught:
        trip(sent, into=into)
    assert caught.value.path == "['w']"
    assert not before.any() and not into["v"].any() and into["o"].value == 0


def freed(offset: int) -> torch.Tensor:
    tensor = torch.ones(1000)[offset:]
    tensor.untyped_storage().resize_(0)
    return tensor


@pytest.mark.parametrize("offset", [0, 10])
def test_a_tensor_whose_memory_was_freed_is_refused(offset: int) -> None:
    gone = freed(offset)
    with pytest.raises(UnsupportedLeafError, match="freed") as caught:
        capture({"a": torch.ones(3), "w": gone})
    assert caught.value.path == "['w']" and gone.untyped_storage().nbytes() == 0


@pytest.mark.parametrize("offset", [0, 10])
def test_a_destination_whose_memory_was_freed_is_refused(offset: int) -> None:
    gone, other = freed(offset), torch.zeros(3)
    with pytest.raises(MismatchError, match="freed") as caught:
        trip({"a": torch.ones(3), "w": torch.ones(1000 - offset)}, into={"a": other, "w": gone})
    assert caught.value.path == "['w']" and not other.any()
