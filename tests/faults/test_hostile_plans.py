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
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

import torchrelay as tr
from tests.support.ranks import RankPool
from torchrelay.checkpointer.saves import agreement
from torchrelay.errors import CheckpointError, ManifestError
from torchrelay.plan.outline import outline
from torchrelay.record import manifest as m
from torchrelay.record.checkpoint.schema import Checkpoint, DataFile, Outline
from torchrelay.record.checkpoint.stored import Shard, StoredTensor, Tensors
from torchrelay.resharding import record
from torchrelay.resharding.owners import whole_of
from torchrelay.resharding.record import LiveRank
from torchrelay.stores.shares import plan_limits
from torchrelay.stores.shares.drafting import sealed
from torchrelay.stores.shares.given_planner import PlannerPlanning, local_plan
from torchrelay.stores.shares.plans import Item, merge_outlines

SECONDS = 2.0  # of the processor, for any input of 2 MB
ROWS = 4000


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


def planning() -> tuple[PlannerPlanning, bytes]:
    """A coordinator of two ranks that has planned its own share, and that share."""
    mine = PlannerPlanning(DefaultSavePlanner(flatten_state_dict=False), 0, 2, None)
    return mine, mine.begin(outline({"w": torch.zeros(4, 4)}))


def item(offsets: tuple[int, ...], sizes: tuple[int, ...], shape: tuple[int, ...]) -> list[Any]:
    return ["w", "SHARD", offsets, None, (offsets, sizes), "float32", shape]


def colliding() -> list[Any]:
    """Offsets with one hash: Python hashes whole numbers modulo a prime."""
    prime = (1 << 61) - 1
    choices = [prime * k for k in range(8)]
    places = [(a, b, c, d, 0) for a in choices for b in choices for c in choices for d in choices]
    return [item(place, (1,) * 5, (8 * prime,) * 5) for place in places]


PLANS: dict[str, Callable[[], list[Any]]] = {
    "offsets with one hash": colliding,
    "many dimensions": lambda: [item((0,) * 60_000, (1 << 50,) * 60_000, (1 << 50,) * 60_000)],
    "boxes that overlap": lambda: [item((0, n), (1, 9), (1, ROWS)) for n in range(ROWS - 9)],
    "boxes side by side": lambda: [
        item((n, 0), (1, ROWS + 1), (ROWS, ROWS + 1)) for n in range(ROWS)
    ],
    "a box out of its tensor": lambda: [item((3,), (2,), (4,))],
    "another number of dimensions": lambda: [item((0,), (4,), (4, 4))],
    "a tensor too large": lambda: [item((0, 0), (1, 1), (1 << 40, 1 << 40))],
    "an empty tensor too large": lambda: [item((0, 0), (0, 1), (0, 1 << 60))],
    "a negative size": lambda: [item((0,), (-1,), (4,))],
    "an unknown kind": lambda: [["w", "SPARK", None, None]],
    "an object with an offset": lambda: [["w", "BYTE_IO", (1, 2), None]],
}


@pytest.mark.parametrize("name", PLANS)
def test_a_plan_that_would_take_long_is_refused_by_its_rank(name: str) -> None:
    mine, local = planning()
    data = msgspec.msgpack.encode([None, PLANS[name](), b"", True, {}])
    assert len(data) < 2_000_000
    begun = time.process_time()
    with pytest.raises(CheckpointError) as refused:
        mine.decide([local, data])
    assert time.process_time() - begun < SECONDS
    assert refused.value.rank == 1 and refused.value.phase == "plan", refused.value


@pytest.mark.parametrize("strides", [slow_numbers, lambda: [7, 7]], ids=["slow", "twice"])
def test_strides_of_another_rank_that_make_no_good_dict_are_refused(
    strides: Callable[[], list[int]],
) -> None:
    local = local_plan(planning()[1], 0)
    assert local.outline is not None
    told = msgspec.structs.replace(
        local.outline, names=("x",), strides=tuple((index, ()) for index in strides())
    )
    hostile = msgspec.structs.replace(local, outline=told)
    data = msgspec.msgpack.encode(hostile)
    begun = time.process_time()
    merged = merge_outlines([local, local_plan(data, 1)], [{}, {}])
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


def test_boxes_of_several_ranks_and_of_one_pass() -> None:
    boxes = [item((n, 0), (1, 8), (64, 8)) for n in range(64)]
    items = [msgspec.convert(one, Item) for one in boxes]
    plan_limits.check_items(items, 1)
    plan_limits.check_items([msgspec.convert(item((), (), ()), Item)], 1)
    plan_limits.check_items([msgspec.convert(item((0,), (0,), (0,)), Item)], 1)


def test_a_live_rank_whose_boxes_have_one_hash_is_refused() -> None:
    prime = (1 << 61) - 1
    places = itertools.islice(itertools.product((0, prime), repeat=14), 2000)
    shards = [Shard(place, (1,) * 14, 0, 0) for place in places]
    part = Checkpoint(
        step=1,
        time="",
        torch="",
        torchrelay="",
        outlines=(Outline(m.DictNode("dict", (), ()), (), ()),),
        ranks=(0,),
        tensors=Tensors.of([StoredTensor("w", "float32", (2 * prime,) * 14, shards)]),
        files=(DataFile("memory", 4, 4, b""),),
    )
    data = record.encode(LiveRank(step=1, part=part, replicas={}))
    begun = time.process_time()
    with pytest.raises(ManifestError):
        whole_of({0: record.decode(data)})
    assert time.process_time() - begun < SECONDS


def speaks_nonsense(rank: int, group: Any, root: str) -> str:
    checkpointer = tr.Checkpointer(root, group=group, timeout=20)
    if rank == 1:
        agreement.msgspec = _Garbled()  # type: ignore[attr-defined]
    try:
        checkpointer.save(1, {"w": torch.zeros(3)})
    except tr.RelayError as fault:
        return f"{type(fault).__name__}: {fault}"
    finally:
        agreement.msgspec = msgspec  # type: ignore[attr-defined]
        checkpointer.close()
    return "saved"


class _Garbled:
    """The encoder of a rank whose messages are cut short."""

    class msgpack:
        @staticmethod
        def encode(value: object) -> bytes:
            return msgspec.msgpack.encode(value)[:-3]


def test_a_damaged_message_fails_the_save_by_name_on_every_rank(
    pool2: RankPool, tmp_path: Any
) -> None:
    told = pool2.run(speaks_nonsense, str(tmp_path), timeout=60, fresh_group=True)
    for text in told:
        assert text.startswith("CheckpointError: ") and "rank 1" in text, told
