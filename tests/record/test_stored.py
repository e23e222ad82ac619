"""Boxes in columns say what a list of boxes says: written, read, joined and looked up."""

from __future__ import annotations

import random
from itertools import accumulate, pairwise, product

import msgspec
import pytest

import torchrelay as tr
from torchrelay.geometry.boxes import shared
from torchrelay.record.checkpoint.joined import joined
from torchrelay.record.checkpoint.places import check_tensors
from torchrelay.record.schema import VolumeRecord
from torchrelay.plan.stored import Shard, Shards, StoredTensor, Tensors
from torchrelay.stores.shares.commit_record import commit_record
from torchrelay.stores.shares.outlines import Outlines
from torchrelay.stores.shares.share import Written

SEED = 5


def grid(rng: random.Random, shape: tuple[int, ...]) -> list[tuple[tuple[int, ...], ...]]:
    """A tensor cut along some of its dimensions, in uneven parts."""
    cuts = []
    for length in shape:
        parts = rng.randint(1, min(length, 6))
        inner = sorted(rng.sample(range(1, length), parts - 1))
        cuts.append([(at, end - at) for at, end in pairwise([0, *inner, length])])
    return [tuple(zip(*cell, strict=True)) if cell else ((), ()) for cell in product(*cuts)]


def some_tensors(rng: random.Random) -> list[StoredTensor]:
    shapes = [tuple(rng.randint(1, 12) for _ in range(rng.randint(0, 3))) for _ in range(3)]
    ways = [(rng.choice(("float32", "int8")), shape, grid(rng, shape)) for shape in shapes]
    found = []
    for n in range(8):
        dtype, shape, boxes = rng.choice(ways)
        ends = list(accumulate((96 for _ in boxes), initial=96 * n))
        shards = [Shard(*box, rng.randrange(4), at) for box, at in zip(boxes, ends, strict=False)]
        found.append(StoredTensor(f"t{n}", dtype, shape, shards))
    return found


def listed(tensors: Tensors) -> list[tuple[object, ...]]:
    return [(one.name, one.dtype, one.shape, sorted(map(repr, one.shards))) for one in tensors]


def test_columns_say_what_lists_say() -> None:
    print(f"seed {SEED}")
    for n in range(200):
        rng = random.Random(SEED * 1000 + n)
        given = some_tensors(rng)
        told = [(one.name, one.dtype, one.shape, sorted(map(repr, one.shards))) for one in given]
        made = Tensors.of(given)
        check_tensors(made, [1 << 20] * 4)
        for form in (msgspec.json, msgspec.msgpack):
            again = form.decode(form.encode(made), type=Tensors)
            assert again == made and listed(again) == told
        assert Tensors.of(made) == made

        # Each box is told of by one of three ranks, whose files count from a number of its own.
        ranks: list[list[StoredTensor]] = [[], [], []]
        for one in given:
            of_each: list[list[Shard]] = [[], [], []]
            for shard in one.shards:
                of_each[rng.randrange(3)].append(shard)
            for rank, shards in zip(ranks, of_each, strict=True):
                if shards:
                    rank.append(msgspec.structs.replace(one, shards=shards))
        parts = [Tensors.of(rank) for rank in ranks]
        for part in parts:
            check_tensors(part, [1 << 20] * 4, whole=False)
        whole = joined(parts, [0, 0, 0])
        assert sorted(listed(whole)) == sorted(told)
        assert len(whole.tilings) == len(made.tilings)


def test_boxes_near_a_box_are_those_that_share_elements_with_it() -> None:
    rng = random.Random(SEED)
    cells = [((i, 3 * j), (1, 3)) for i in range(20) for j in range(4)]
    shards = [Shard(*cell, 0, 8 * n) for n, cell in enumerate(cells)]
    (tensor,) = Tensors.of([StoredTensor("x", "int8", (20, 12), shards)])
    assert isinstance(tensor.shards, Shards)
    for _ in range(100):
        offsets = rng.randrange(20), rng.randrange(12)
        box = offsets, (rng.randint(1, 20 - offsets[0]), rng.randint(1, 12 - offsets[1]))
        near = [tensor.shards[n] for n in tensor.shards.tiling.near(box)]
        assert near == [s for s in tensor.shards if shared((s.offsets, s.sizes), box)]


def test_ranks_that_do_not_agree_on_a_tensor_are_refused() -> None:
    one = Tensors.of([StoredTensor("x", "int8", (4,), [Shard((0,), (2,), 0, 0)])])
    other = Tensors.of([StoredTensor("x", "int16", (4,), [Shard((2,), (2,), 0, 0)])])
    with pytest.raises(tr.ManifestError, match="int16"):
        joined([one, other], [0, 1])
    said = [Written([DataFile("a", 8, 8, bytes(16))], part, []) for part in (one, other)]
    with pytest.raises(tr.CheckpointError, match="int16") as refused:
        commit_record(1, said, Outlines((), (), ()), "0")
    assert (refused.value.phase, refused.value.path) == ("commit", "x")
    past = Tensors.of([StoredTensor("x", "int8", (4,), [Shard((2,), (2,), 0, 7)])])
    said[1] = Written([DataFile("b", 8, 8, bytes(16))], past, [])
    with pytest.raises(tr.CheckpointError, match="not in file 0") as refused:
        commit_record(1, said, Outlines((), (), ()), "0")
    assert refused.value.rank == 1
    assert joined([one], [0]) is one and len(joined([], [])) == 0
