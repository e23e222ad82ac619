"""Boxes in columns are what a list of boxes says: written, read, joined and looked up."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import accumulate, pairwise, product
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import pytest
import torch

import torchrelay as tr
from torchrelay.geometry.boxes import Box, shared
from torchrelay.planning.stored import Names, Shard, stored_tensors
from torchrelay.record import manifest as m
from torchrelay.record.checks.record import check
from torchrelay.record.encoding import decode, encode
from torchrelay.record.schema import (
    VERSION,
    ImageKind,
    LeafKind,
    Record,
    StateOutline,
    VolumeRecord,
)
from torchrelay.shares.commit_record import commit_record, decode_shares, sealed
from torchrelay.shares.joined import with_boxes

SEED = 5
VOLUMES = 4


class Tensor(NamedTuple):
    """A tensor and where its boxes lie."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    shards: list[Shard]


def grid(rng: random.Random, shape: tuple[int, ...]) -> list[Box]:
    """A tensor cut along some of its dimensions, in uneven parts."""
    cuts = []
    for length in shape:
        parts = rng.randint(1, min(length, 6))
        inner = sorted(rng.sample(range(1, length), parts - 1))
        cuts.append([(at, end - at) for at, end in pairwise([0, *inner, length])])
    cells = (tuple(zip(*cell, strict=True)) if cell else ((), ()) for cell in product(*cuts))
    return [(cell[0], cell[1]) for cell in cells]


def some_tensors(rng: random.Random) -> list[Tensor]:
    shapes = [tuple(rng.randint(1, 12) for _ in range(rng.randint(0, 3))) for _ in range(3)]
    ways = [(rng.choice(("float32", "int8")), shape, grid(rng, shape)) for shape in shapes]
    found = []
    for n in range(8):
        dtype, shape, boxes = rng.choice(ways)
        ends = list(accumulate((9600 for _ in boxes), initial=9600 * n))
        shards = [
            Shard(*box, rng.randrange(VOLUMES), at) for box, at in zip(boxes, ends, strict=False)
        ]
        found.append(Tensor(f"t{n}", dtype, shape, shards))
    return found


def outlined(tensors: Sequence[Tensor]) -> Record:
    """The outline of a dict of these tensors, without boxes."""
    names = tuple(one.name for one in tensors)
    tree = m.DictNode("dict", names, tuple(range(len(names))))
    numbers = np.arange(len(tensors))
    return Record(
        version=VERSION,
        outlines=(StateOutline(tree, len(tensors), kinds=numbers),),
        kinds=tuple(LeafKind(one.dtype, one.shape) for one in tensors),
        images=len(tensors),
        image_kinds=tuple(ImageKind(one.dtype, one.shape, None, 0) for one in tensors),
        kind_of=numbers,
    )


def part(tensors: Sequence[Tensor], prefix: str = "f") -> Record:
    """A rank's report of the boxes that it has written."""
    kinds = [ImageKind.of_boxes(t.dtype, t.shape, [s[:2] for s in t.shards]) for t in tensors]
    places = [shard for one in tensors for shard in one.shards]
    digests = bytes(16)
    return Record(
        version=VERSION,
        outlines=(),
        ranks=(),
        images=len(tensors),
        image_kinds=tuple(kinds),
        kind_of=np.arange(len(kinds)),
        volumes=tuple(
            VolumeRecord(f"{prefix}{n}", 1 << 22, 1 << 22, None, digests) for n in range(VOLUMES)
        ),
        volume_of=np.array([shard.file for shard in places], np.int64),
        starts=np.array([shard.start for shard in places], np.int64) if places else None,
        names=tuple((n, one.name) for n, one in enumerate(tensors)),
    )


def listed(record: Record) -> list[tuple[object, ...]]:
    tensors = stored_tensors(record)
    return [(one.name, one.dtype, one.shape, sorted(map(repr, one.shards))) for one in tensors]


def test_columns_say_what_lists_say() -> None:
    print(f"seed {SEED}")
    for n in range(200):
        rng = random.Random(SEED * 1000 + n)
        given = some_tensors(rng)
        told = [(one.name, one.dtype, one.shape, sorted(map(repr, one.shards))) for one in given]
        alone = commit_record(1, decode_shares(1, [encode(part(given))]), outlined(given))
        assert listed(alone) == told and sealed(alone)

        # Each box is written by one of three ranks, whose volumes are counted from its first.
        ranks: list[list[Tensor]] = [[], [], []]
        for one in given:
            of_each: list[list[Shard]] = [[], [], []]
            for shard in one.shards:
                of_each[rng.randrange(3)].append(shard)
            for rank, shards in zip(ranks, of_each, strict=True):
                if shards:
                    rank.append(one._replace(shards=shards))
        said = [encode(part(rank, f"rank{r}-")) for r, rank in enumerate(ranks)]
        whole = commit_record(1, decode_shares(1, said), outlined(given))
        assert sealed(whole) and len(whole.volumes) == 3 * VOLUMES
        for one, other in zip(stored_tensors(whole), given, strict=True):
            found = [shard._replace(file=shard.file % VOLUMES) for shard in one.shards]
            assert (one.name, one.dtype, one.shape) == other[:3]
            assert sorted(map(repr, found)) == sorted(map(repr, other.shards))
        assert len(whole.image_kinds) == len(alone.image_kinds)


def test_boxes_near_a_box_are_those_that_share_elements_with_it() -> None:
    rng = random.Random(SEED)
    cells = [((i, 3 * j), (1, 3)) for i in range(20) for j in range(4)]
    kind = ImageKind.of_boxes("int8", (20, 12), cells)
    for _ in range(100):
        offsets = rng.randrange(20), rng.randrange(12)
        box = offsets, (rng.randint(1, 20 - offsets[0]), rng.randint(1, 12 - offsets[1]))
        wanted = [cell for cell in cells if shared(cell, box)]
        assert [cells[n] for n in kind.candidates(box)] == wanted


def test_ranks_that_do_not_agree_on_a_tensor_are_refused() -> None:
    one = Tensor("x", "int8", (4,), [Shard((0,), (2,), 0, 0)])
    other = Tensor("x", "int16", (4,), [Shard((2,), (2,), 0, 0)])
    shares = [part([one], "a"), part([other], "b")]
    with pytest.raises(tr.errors.ManifestError, match="int16"):
        with_boxes(outlined([one]), ["x"], shares)
    with pytest.raises(tr.errors.CheckpointError, match="int16") as refused:
        commit_record(1, shares, outlined([one]))
    assert (refused.value.phase, refused.value.path) == ("commit", "x")
    past = Tensor("x", "int8", (4,), [Shard((2,), (2,), 0, (1 << 22) - 1)])
    with pytest.raises(tr.errors.CheckpointError, match="not in volume 0") as refused:
        decode_shares(1, [encode(part([one])), encode(part([past]))])
    assert refused.value.rank == 1
    with pytest.raises(tr.errors.CheckpointError, match="would not be whole") as refused:
        commit_record(1, [shares[0]], outlined([one]))
    assert refused.value.path == "x"


def test_a_part_names_each_of_its_images() -> None:
    one = Tensor("x", "int8", (4,), [Shard((0,), (4,), 0, 0)])
    unnamed = part([one])
    unnamed = type(unnamed)(**{**fields(unnamed), "names": ()})
    with pytest.raises(tr.errors.CheckpointError, match="with a name"):
        commit_record(1, [decode(encode(unnamed), "part")], outlined([one]))


def fields(record: Record) -> dict[str, object]:
    return {name: getattr(record, name) for name in record.__struct_fields__}


def test_names_are_paths_but_for_those_that_are_given() -> None:
    tensors = [Tensor(name, "int8", (1,), []) for name in ("a", "b", "c")]
    record = outlined(tensors)
    assert Names(record).all() == ["a", "b", "c"]
    given = type(record)(**{**fields(record), "names": ((1, "other"),)})
    assert Names(given).all() == ["a", "other", "c"]
    twice = type(record)(**{**fields(record), "names": ((1, "c"),)})
    with pytest.raises(tr.errors.ManifestError, match="one name"):
        Names(twice).all()


def test_memory_that_views_share_ends_where_the_last_of_them_does(tmp_path: Path) -> None:
    memory = torch.arange(8.0)
    with tr.Checkpointer(tmp_path) as there:
        there.save(1, {"low": memory[:6], "high": memory[3:]})
        record = there.record(1)
    check(record, "whole")
    shorter = tuple(
        msgspec.structs.replace(kind, shape=(4,)) if kind.shape == (5,) else kind
        for kind in record.kinds
    )
    assert shorter != record.kinds
    with pytest.raises(tr.errors.ManifestError, match="has 32 bytes, its leaves reach 28"):
        check(msgspec.structs.replace(record, kinds=shorter), "whole")
