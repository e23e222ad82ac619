"""The order of images in a stream."""

from __future__ import annotations

import numpy as np
import torch

from torchrelay.describing.description import Description
from torchrelay.describing.state_plan import StatePlan, _order
from torchrelay.geometry.chunks import SMALL_BYTES
from torchrelay.state.tree import flatten


def test_storages_stay_together_and_small_ones_come_first() -> None:
    """The example of the docstring."""
    shared, large = torch.zeros(8), torch.zeros(SMALL_BYTES // 4)
    state = {"a": shared[5:], "b": large, "c": shared[:5], "d": torch.zeros(2)}
    record, chunks, place = StatePlan.build(Description(flatten(state)), None, 1, None)
    assert place.tolist() == [1, 3, 0, 2]
    assert record.storage_of is not None and record.storage_of.tolist() == [0, 0, 1, 2]
    assert record.box_bytes.tolist() == [20, 12, 8, large.nbytes]
    assert chunks.sizes[0] < large.nbytes  # the small ones share a chunk


def test_small_storages_of_one_device_are_next_to_each_other() -> None:
    large = torch.zeros(SMALL_BYTES // 4)
    found = Description(flatten([torch.zeros(1), torch.zeros(1), large, torch.zeros(1), large + 1]))
    place, storage_of = _order(found, np.array([0, 1, 1, 0, 0]))
    assert place.tolist() == [0, 2, 3, 1, 4] and storage_of is None


def test_a_state_without_images() -> None:
    place, storage_of = _order(Description(flatten({"a": 1})), None)
    assert len(place) == 0 and storage_of is None
