"""The boxes of a tensor that one place of a mesh has, by how the mesh dimensions cut the tensor.

A mesh dimension cuts a tensor dimension into one chunk for each of its places, as `torch.chunk`
does: chunks have the rounded-up size, and the last ones may be short or empty. Two mesh dimensions
that cut the same tensor dimension do it one after the other, and the order matters. Seven rows on a
mesh of 3 x 2, cut by the inner dimension first, as FSDP2 does with a tensor that tensor
parallelism has cut:

    rows 0..6   inner place 0: 0 1 2 3         inner place 1: 4 5 6
                outer: 0 1 | 2 3 | -           outer: 4 | 5 | 6

torch writes this as the placements (strided shard with a split factor of 2, shard). Another reading
of these placements is to cut from left to right. Then the rows are first split into 2 pieces, each
outer place takes its chunk of both pieces, and the inner places cut these chunks together. With
even rows both readings give the same boxes. Here outer place 2 would take row 6 alone, and inner
place 0 would have it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from math import prod
from typing import NamedTuple, NoReturn

from torchrelay.errors import UnsupportedLeafError
from torchrelay.geometry.boxes import Box

MAX_PIECES = 1 << 16  # of one tensor on one process

_Run = tuple[int, int]  # the first row, and the end


class MeshCut(NamedTuple):
    """A mesh dimension of `size` places cuts the tensor dimension `dim`; this is place `at`.

    With a `split` above 1 the rows are first split into that many pieces, and this place has its
    chunk of each.
    """

    dim: int
    size: int
    at: int
    split: int = 1


class ShardPiece(NamedTuple):
    """A box of the whole tensor, and where it begins in the tensor of this process."""

    box: Box
    at: tuple[int, ...]


def pieces_on_mesh(shape: Sequence[int], cuts: Sequence[MeshCut]) -> list[ShardPiece]:
    """The boxes that a place has, by the cuts of its mesh from the first dimension to the last.

    Splits stand for the order of the cuts. If some cannot, torch cuts from left to right.
    `UnsupportedLeafError` where that is not what the other splits stand for: then the placements
    have two readings.
    """
    order, is_order = in_order_of_splits(cuts)
    found = pieces_at(shape, order)
    if not is_order and found != pieces_at(shape, cuts):
        refuse_two_readings()
    return found


def refuse_two_readings() -> NoReturn:
    raise UnsupportedLeafError(
        "its placements do not say in which order the mesh dimensions cut it: redistribute it "
        "to placements without strided shards first"
    )


def in_order_of_splits(cuts: Sequence[MeshCut]) -> tuple[list[MeshCut], bool]:
    """The cuts of a mesh in the order that their splits stand for, and whether all splits do.

    A cut whose split is the number of places of the first cuts to its right is made after those, of
    their chunks, and splits no rows. A cut with another split is made before all those to its
    right, and keeps the split.
    """
    orders: dict[int, list[MeshCut]] = {}
    is_order = True
    for cut in reversed(cuts):
        order = orders.setdefault(cut.dim, [])
        sizes = [earlier.size for earlier in order]
        places = [prod(sizes[:n]) for n in range(len(sizes) + 1)]
        if cut.split in places:
            order.insert(places.index(cut.split), cut._replace(split=1))
        else:
            order.insert(0, cut)
            is_order = False
    return [cut for order in orders.values() for cut in order], is_order


def pieces_at(shape: Sequence[int], cuts: Sequence[MeshCut]) -> list[ShardPiece]:
    """The boxes that a place has after cuts that are made one after the other.

    They are disjoint, and together they are the tensor of this process, row by row in the order in
    which they lie there. Without elements there is one box, which is empty.

    `UnsupportedLeafError` if there are more than `MAX_PIECES`.
    """
    runs: list[list[_Run]] = [[(0, size)] for size in shape]
    for cut in cuts:
        runs[cut.dim] = _cut(runs[cut.dim], cut)
    for dim, found in enumerate(runs):
        if not found:
            runs[dim] = [(shape[dim], shape[dim])]
    if prod(map(len, runs)) > MAX_PIECES:
        raise UnsupportedLeafError(
            f"the part on this rank is {prod(map(len, runs))} separate boxes of the tensor: "
            "redistribute it first"
        )
    starts = [_starts(found) for found in runs]
    return [
        ShardPiece(
            (tuple([first for first, _ in some]), tuple([end - first for first, end in some])),
            tuple([start[n] for start, n in zip(starts, numbers, strict=True)]),
        )
        for numbers in product(*(range(len(found)) for found in runs))
        for some in [[found[n] for found, n in zip(runs, numbers, strict=True)]]
    ]


def size_of(pieces: Sequence[ShardPiece]) -> tuple[int, ...]:
    """The shape of the tensor that pieces make up: the last of them ends where it ends."""
    box, at = pieces[-1]
    return tuple([start + size for start, size in zip(at, box[1], strict=True)])


def _starts(runs: Sequence[_Run]) -> list[int]:
    found, at = [], 0
    for first, end in runs:
        found.append(at)
        at += end - first
    return found


def _cut(runs: list[_Run], cut: MeshCut) -> list[_Run]:
    """The rows that a place has of these after a cut, in runs one after the other."""
    rows = sum(end - first for first, end in runs)
    if not rows:
        return []
    length = -(-rows // cut.split)
    if rows > length * MAX_PIECES:
        raise UnsupportedLeafError(
            f"its rows are split into {-(-rows // length)} pieces: redistribute it first"
        )
    wanted = []
    for start in range(0, rows, length):
        piece = min(length, rows - start)
        chunk = -(-piece // cut.size)
        wanted.append(
            (start + min(chunk * cut.at, piece), start + min(chunk * (cut.at + 1), piece))
        )
    return _rows_of(runs, wanted)


def _rows_of(runs: Sequence[_Run], wanted: Sequence[_Run]) -> list[_Run]:
    """The rows at ascending positions among those of `runs`. Both lists are walked once."""
    found: list[_Run] = []
    number, begin = 0, 0  # a run, and the position of its first row
    for low, high in wanted:
        while low < high:
            first, end = runs[number]
            if low >= begin + end - first:
                begin += end - first
                number += 1
                continue
            upto = min(high, begin + end - first)
            start, stop = first + low - begin, first + upto - begin
            if found and found[-1][1] == start:
                found[-1] = found[-1][0], stop
            else:
                found.append((start, stop))
            low = upto
    return found
