"""Plans of ranks that are damaged or hostile: refused in time, by the rank that sent them.

A message of another rank may hold any numbers. Each test has one whose reading would take minutes,
or end in an error that says nothing.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

import torchrelay as tr
from tests.support.ranks import RankPool
from tests.support.records import rank_record
from torchrelay.errors import CheckpointError, ManifestError, MismatchError
from torchrelay.landing.gathering import plan_gather
from torchrelay.plan.outline import outline
from torchrelay.record.checkpoint.schema import Checkpoint, DataFile, Outline
from torchrelay.plan.stored import Shard, StoredTensor, Tensors
from torchrelay.record.checks.record import check
from torchrelay.record.encoding import decode, encode
from torchrelay.stores.shares import planner
from torchrelay.stores.shares.commit_record import sealed
from torchrelay.stores.shares.outlines import RankOutline, merge

SECONDS = 2.0  # of the processor, for any input of 2 MB


def slow_numbers() -> list[int]:
    """Numbers that a dict looks up slowly: half of them fill places that follow each other in its
    search, and the search for each of the others begins there."""
    filled, total = 60_000, 87_300  # of a dict's table of 2**17 places
    mask = (1 << 17) - 1
    turn = np.full(mask + 1, -1)
    place, first = 0, []
    for number in range(filled):
        turn[place] = number
        first.append(place)
        place = (5 * place + 1) & mask
    found = np.arange(mask + 1, 1 << 24)
    at, rest = found & mask, found.copy()
    fits = turn[at] >= 0
    while rest.any():
        rest >>= 5
        at = (5 * at + rest + 1) & mask
        fits &= turn[at] >= 0
    fits &= turn[at] < filled // 4
    return first + found[fits][: total - filled].tolist()


@pytest.mark.parametrize("strides", [slow_numbers, lambda: [7, 7]], ids=["slow", "twice"])
def test_strides_of_another_rank_that_make_no_good_dict_are_refused(
    strides: Callable[[], list[int]],
) -> None:
    mine = outline({"w": torch.zeros(4, 4)}).outline
    told = msgspec.structs.replace(
        mine, names=("x",), strides=tuple((index, ()) for index in strides())
    )
    data = msgspec.msgpack.encode(told)
    begun = time.process_time()
    hostile = msgspec.msgpack.decode(data, type=Outline)
    merged = merge([RankOutline.whole(one, {}) for one in (mine, hostile)])
    tensors = Tensors.of([StoredTensor("x", "int8", (1,), [Shard((0,), (1,), 0, 0)])])
    record = Checkpoint(
        step=1,
        time="",
        torch="",
        torchrelay="",
        outlines=merged.outlines[1:],
        ranks=(0,),
        tensors=tensors,
        files=(DataFile("x", 1, 1, bytes(16)),),
    )
    with pytest.raises(CheckpointError, match="strides that have no place"):
        sealed(record)
    assert time.process_time() - begun < SECONDS


def test_an_outline_is_the_same_after_its_way_to_another_rank() -> None:
    found = outline({"x": torch.zeros(3, 5).t(), "y": [1, torch.ones(2)]}).outline
    assert found.strides
    data = msgspec.msgpack.encode(found)
    assert msgspec.msgpack.decode(data, type=Outline) == found


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
        plan_gather({0: decode(data)})
    assert time.process_time() - begun < SECONDS


def speaks_nonsense(rank: int, group: Any, root: str) -> str:
    checkpointer = tr.Checkpointer(root, group=group, timeout=20)
    if rank == 1:
        planner._encode = lambda value: msgspec.msgpack.encode(value)[:-3]
    try:
        checkpointer.save(1, {"w": torch.zeros(3)})
    except tr.RelayError as fault:
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
