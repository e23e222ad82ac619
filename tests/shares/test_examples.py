"""The worked examples in the docstrings of `shares`, made and compared."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from tests.shares.test_ownership import plan
from torchrelay.planning.stored import Names
from torchrelay.record.kinds import KindTable
from torchrelay.record.manifest import ValueLeaf
from torchrelay.record.schema import ImageKind, Record, VolumeRecord
from torchrelay.shares.comparison import Details, RankTensor, Row, number_of
from torchrelay.shares.joined import with_boxes
from torchrelay.shares.ownership import assignments, written_by_rule


def test_written_by_rule() -> None:
    sizes = {"a": 8, "b": 6, "c": 4, "d": 2}
    written = [
        written_by_rule(RankTensor(n, b"", size, rank, 2, b"team") for n, size in sizes.items())
        for rank in range(2)
    ]
    assert written == [{"a", "d"}, {"b", "c"}]


def test_assignments() -> None:
    facts = [
        {"w": b"A", "rng": b"B", "lr": b"E"},
        {"w": b"A", "rng": b"C", "lr": b"F"},
        {"rng": b"D", "lr": b"E"},
    ]
    details = [Details([Row(name, fact) for name, fact in one.items()], []) for one in facts]
    found = assignments(details, (3,), ())
    assert [one.renamed for one in found] == [
        {},
        {"rng": "rng@rank-1", "lr": "lr@rank-1"},
        {"rng": "rng@rank-2"},
    ]
    others = [set(one.of_others) for one in found]
    assert sorted(others[0] | others[1]) in (["lr", "w"], ["w"]) and "w" not in others[2]
    assert ("w" in others[0]) != ("w" in others[1]) and ("lr" in others[0]) != ("lr" in others[2])


def test_boxes_of_a_vector() -> None:
    boxes: list[list[Any]] = [
        [((0,), (2,), b"x"), ((2,), (2,), b"y")],
        [((2,), (2,), b"y"), ((4,), (2,), b"z")],
    ]
    details = [
        Details([Row("v", b"", dtype="float32", shape=(6,), boxes=tuple(some))], [])
        for some in boxes
    ]
    found = [one.boxes_of_others for one in assignments(details, (0,), ())]
    assert found in ([{"v": (1,)}, {}], [{}, {"v": (0,)}])
    assert found[number_of("v") // 64 % 2 ^ 1] == {}, "the writer of its second box"


def part(name: str, pieces: list[tuple[str, tuple[int, int], int]]) -> Record:
    """The report of a rank with one volume: names of tensors, the rows that it has, and starts."""
    kinds = KindTable()
    of = []
    for tensor, (low, high), _ in pieces:
        shape = (4, 2) if tensor == "w" else (high,)
        at = ((low, 0), (high - low, 2)) if tensor == "w" else ((0,), (high,))
        of.append(kinds.images.number(ImageKind.of_boxes("float32", shape, [at])))
    return kinds.record(
        (),
        np.array(of),
        ranks=(),
        volumes=(VolumeRecord(name, 128, 4096),),
        volume_of=np.zeros(len(of), int),
        starts=np.array([start for _, _, start in pieces]),
        names=tuple(enumerate(tensor for tensor, _, _ in pieces)),
    )


def test_boxes_that_two_ranks_have_written() -> None:
    outlined, _, _, _ = plan([{"b": torch.zeros(2), "w": torch.zeros(4, 2)}])
    parts = [part("0", [("w", (2, 4), 64)]), part("1", [("b", (0, 2), 96), ("w", (0, 2), 64)])]
    joined = with_boxes(outlined, ["b", "w"], parts)
    assert joined.box_volumes.tolist() == [1, 1, 0] and joined.box_starts.tolist() == [96, 64, 64]
    assert [kind.count for kind in joined.image_kinds] == [1, 2]
    assert joined.image_kinds[1].columns[0].tolist() == [[0, 0], [2, 0]]


def test_outlines_of_two_ranks() -> None:
    states = [
        {"w": torch.ones(3), "rng": torch.full((2,), float(rank)), "at": rank} for rank in (0, 1)
    ]
    outlined, _, _, _ = plan(states)
    assert len(outlined.outlines) == 1 and outlined.ranks == (0, 0)
    assert Names(outlined).all() == ["w", "rng", "rng@rank-1"]
    (own,) = outlined.differences
    ((leaf, value),) = own.leaves
    assert own.rank == 1 and leaf == 2 and isinstance(value, ValueLeaf) and value.value == 1
    assert own.images == ((1, 2),)
