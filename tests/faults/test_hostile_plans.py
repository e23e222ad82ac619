"""Plans of ranks that are damaged or hostile: refused in time, by the rank that sent them.

A message of another rank may hold any numbers. Each test has one whose reading would take minutes,
or end in an error that says nothing.
"""

from __future__ import annotations

import itertools
import time
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

import torchrelay as tr
from tests.support.ranks import RankPool
from tests.support.records import rank_record
from torchrelay.describing.at_rest import describe
from torchrelay.errors import CheckpointError, ManifestError, MismatchError
from torchrelay.record.checks.record import check
from torchrelay.record.encoding import decode, encode
from torchrelay.record.schema import VolumeRecord
from torchrelay.shares import planner
from torchrelay.shares.comparison import Details
from torchrelay.shares.outlines import shape_of
from torchrelay.transports.protocol.receive_plan import ReceivePlan

SECONDS = 2.0  # of the processor, for any input of 2 MB


def test_strides_of_another_rank_that_overlap_are_refused() -> None:
    mine = describe({"w": torch.zeros(4, 4).t()}).record
    assert mine.image_kinds[0].strides == (1, 4)
    kind = msgspec.structs.replace(mine.image_kinds[0], strides=(0, 0))
    with pytest.raises(ManifestError, match="strides"):
        decode(encode(msgspec.structs.replace(mine, image_kinds=(kind,))), "part")


def test_an_outline_is_the_same_after_its_way_to_another_rank() -> None:
    found = describe({"x": torch.zeros(3, 5).t(), "y": [1, torch.ones(2)]}).record
    again = decode(encode(found), "part")
    assert encode(again) == encode(found) and shape_of(again) == shape_of(found)


def test_an_outline_of_another_rank_has_no_boxes_and_names_each_tensor_once() -> None:
    mine = describe({"a": torch.zeros(3), "b": torch.ones(2)}).record
    whole = tuple(msgspec.structs.replace(kind, count=1) for kind in mine.image_kinds)
    volume = VolumeRecord("x", 64, 64)
    boxed = msgspec.structs.replace(
        mine, image_kinds=whole, volumes=(volume,), starts=np.array([0, 16])
    )
    named = msgspec.structs.replace(mine, names=((1, "a"),))
    for told, why in ((boxed, "not the outline of one rank"), (named, "one name")):
        with pytest.raises(CheckpointError, match=why) as refused:
            planner._outline(Details([], [], encode(told)), 1)
        assert refused.value.rank == 1


def test_a_live_rank_whose_boxes_have_one_hash_costs_no_more_than_others() -> None:
    prime = (1 << 61) - 1
    places = list(itertools.islice(itertools.product((0, prime), repeat=3), 8))
    shape = (2 * prime,) * 3
    with pytest.raises(ManifestError, match="elements"):
        check(rank_record([(place, (1,) * 3) for place in places], shape), "stream")
    shape = (1 << 20,) * 2
    boxes = [((row, 0), (1, 1)) for row in range(2000)]
    data = encode(rank_record(boxes, shape))
    begun = time.process_time()
    with pytest.raises(MismatchError):
        ReceivePlan({0: decode(data)})
    assert time.process_time() - begun < SECONDS


def speaks_nonsense(rank: int, group: Any, root: str) -> str:
    checkpointer = tr.Checkpointer(root, group=group, timeout=20)
    if rank == 1:
        planner._encode = lambda value: msgspec.msgpack.encode(value)[:-3]
    try:
        checkpointer.save(1, {"w": torch.zeros(3)})
    except tr.errors.RelayError as fault:
        return f"{type(fault).__name__}: {fault}"
    finally:
        planner._encode = msgspec.msgpack.encode
        checkpointer.close()
    return "saved"


def test_a_damaged_message_fails_the_save_by_name_on_every_rank(
    pool2: RankPool, tmp_path: Any
) -> None:
    told = pool2.run(speaks_nonsense, str(tmp_path), timeout=60, fresh_group=True)
    for text in told:
        assert text.startswith("CheckpointError: ") and "rank 1" in text, told
