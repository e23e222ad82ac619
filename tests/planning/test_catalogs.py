"""The share that a destination takes of a catalog."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.transports.protocol.test_receive_plan import COPY, dtensor, shard
from torchrelay.describing.snapshot import capture
from torchrelay.errors import MismatchError
from torchrelay.landing.land import fitted
from torchrelay.landing.options import LandingOptions
from torchrelay.planning.box_catalog import BoxCatalog
from torchrelay.planning.catalog import LiveCatalog, RankShare
from torchrelay.planning.share_builder import WHOLE, ShareImages
from torchrelay.planning.union import Union
from torchrelay.record.rows import LeafRows


def share_of(state: Any, into: Any) -> RankShare:
    """The share of one rank's state, in boxes."""
    catalog = BoxCatalog(Union({0: capture(state).record}).rows)
    return fitted(catalog, into, LandingOptions()).share


def test_images_of_a_share_are_numbered_once_each_in_the_order_of_the_record() -> None:
    record = capture({"w": torch.zeros(8, 4), "b": torch.zeros(8)}).record
    images = ShareImages(record)
    upper = images.number_of(((0, 0), (4, 4)), (8, 4))
    assert images.number_of(((0, 0), (8, 4)), (8, 4)) == WHOLE != upper
    assert images.take(np.array([0]), upper).tolist() == [0]
    assert images.take(np.array([1, 0, 1])).tolist() == [2, 1, 2]
    assert images.take_one(0, upper) == 0 and len(images) == 3
    assert images.sources.tolist() == [0, 0, 1]


def test_the_share_of_a_live_rank_is_its_record() -> None:
    record = capture({"w": torch.zeros(8, 4), "n": 3}).record
    share = fitted(LiveCatalog(record), None, LandingOptions()).share
    assert share.record is record and share.sources.tolist() == [0] and not share.pairs.pairs


def test_a_destination_takes_boxes_wholes_and_both_of_one_tensor() -> None:
    w = torch.arange(32.0).view(8, 4)
    state = {"a": w, "b": torch.zeros(8), "c": w}
    half: Any = dtensor(torch.zeros(8, 4), (2,), (shard(0),), 1)
    share = share_of(state, {"a": half, "b": torch.zeros(8), "c": torch.zeros(8, 4)})
    rows = LeafRows(share.record)
    leaves = {path[0]: rows[leaf] for leaf, path, _ in share.pairs.pairs}
    assert leaves["a"].shape == (8, 4) and leaves["a"].local.shape == (4, 4)
    kinds = {
        name: share.record.kind_of_image(leaf.storage)
        for name, leaf in leaves.items()
        if name != "a"
    }
    assert kinds["b"].shape == (8,) and kinds["c"].is_whole
    box = share.record.kind_of_image(leaves["a"].local.storage).boxes
    assert box == [((4, 0), (4, 4))]
    assert (
        len(share.sources) == 3
        and share.sources[leaves["a"].local.storage] == (share.sources[leaves["c"].storage])
    )


def test_tied_destinations_take_one_of_two_tensors_and_compare_both() -> None:
    tied = torch.zeros(4)
    share = share_of({"a": torch.ones(4), "b": torch.ones(4)}, {"a": tied, "b": tied})
    assert [path for _, path, _ in share.pairs.pairs] == [("a",)]
    (equal,) = share.equal
    assert equal.path == "['b']" and {equal.first, equal.second} == {0, 1}


def test_a_view_of_an_image_of_bytes_is_deferred() -> None:
    base = torch.arange(10.0)
    views = {"a": base[:6], "b": base[4:]}
    share = share_of(views, {"a": torch.zeros(6), "b": torch.zeros(6)})
    assert share.deferred == {leaf for leaf, _, _ in share.pairs.pairs} != set()


@pytest.mark.parametrize("count", [1, 3])
def test_a_wrong_shape_is_refused_by_the_path_of_the_first(count: int) -> None:
    state = {f"w{n}": torch.zeros(6, 4) for n in range(count)}
    into = {f"w{n}": dtensor(torch.zeros(8, 4), (2,), (shard(0),), 0) for n in range(count)}
    with pytest.raises(MismatchError, match=r"shape differs: offered \(6, 4\)") as caught:
        share_of(state, into)
    assert caught.value.path == "['w0']"


def test_a_replica_takes_all_of_a_tensor() -> None:
    into = {"w": dtensor(torch.zeros(4, 2), (2,), (COPY,), 1)}
    share = share_of({"w": torch.ones(4, 2)}, into)
    assert share.record.image_kinds[0].is_whole
