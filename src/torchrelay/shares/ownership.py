"""Which rank writes what of a save: a rule, and the exceptions from it. Pure.

Where all ranks have the same, each knows by the rule alone what is its own to write, and nothing is
gathered anywhere. Where they differ (`comparison`), the coordinator sees the rows and assigns them.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from torchrelay.errors import CheckpointError
from torchrelay.geometry import DIGEST_BYTES
from torchrelay.record.manifest import Shape
from torchrelay.shares.comparison import BUCKETS, Assignment, Details, RankTensor, Row, number_of
from torchrelay.shares.replicas import Disagreement, disagreement, listed
from torchrelay.state.replicas import ReplicaKind

_Rows = Sequence[tuple[int, Row]]  # of one name: the ranks that have it, and their rows


def written_by_rule(tensors: Iterable[RankTensor]) -> set[str]:
    """The names of the tensors that this rank writes, where every rank has the same ones.

    Of each team, the largest tensor that is left goes to the rank with the least to write. Two
    ranks that have the same four tensors:

        tensor   bytes   to write so far   writer
        a        8       0, 0              rank 0
        b        6       8, 0              rank 1
        c        4       8, 6              rank 1
        d        2       8, 10             rank 0
    """
    teams: defaultdict[bytes, list[RankTensor]] = defaultdict(list)
    mine = set()
    for one in tensors:
        if one.replicas > 1:
            teams[one.team].append(one)
        else:
            mine.add(one.name)
    for members in teams.values():
        loads = [(0, replica) for replica in range(members[0].replicas)]
        for one in sorted(members, key=lambda one: (-one.nbytes, one.name)):
            load, replica = loads[0]
            heapq.heapreplace(loads, (load + one.nbytes, replica))
            if replica == one.replica:
                mine.add(one.name)
    return mine


def written_by_name(one: RankTensor) -> bool:
    """Whether this rank writes its part of a distributed tensor that not all ranks have."""
    return number_of(one.name) // BUCKETS % one.replicas == one.replica


class _Exceptions:
    """What becomes an `Assignment` of one rank."""

    def __init__(self) -> None:
        self.renamed: dict[str, str] = {}
        self.of_others: list[str] = []
        self.boxes_of_others: dict[str, list[int]] = {}
        self.also: list[str] = []


def assignments(
    details: Sequence[Details],
    buckets: Sequence[int],
    names: Collection[str],
    distributed: Sequence[Disagreement] = (),
) -> list[Assignment]:
    """The assignment of each rank for the buckets that differ. `names`: of all outlines that were
    sent, so that no new name is one of them. `distributed`: the distributed tensors whose replicas
    differ. The value of the most ranks is written, by the lowest of these.

    Equal rows have one writer, by the hash of the name; a different row keeps its writer and gets a
    name of its own. Letters stand for the facts of rows on three ranks:

        name   rank 0   rank 1   rank 2         name of the others   not written by
        w      A        A        -              -                    rank 0 (say)
        rng    B        C        D              rng@rank-1, -2       -
        lr     E        F        E              lr@rank-1            rank 2 (say)
    """
    rows: defaultdict[str, list[tuple[int, Row]]] = defaultdict(list)
    taken = set(names)
    for rank, one in enumerate(details):
        for row in one.tensors:
            rows[row.name].append((rank, row))
            taken.add(row.name)
    ranks = [_Exceptions() for _ in details]
    for name, several in rows.items():
        if any(row.boxes is not None for _, row in several):
            _assign_boxes(name, several, ranks)
        elif several[0][1].mesh:
            _assign_distributed(name, several, ranks)
        else:
            _assign_plain(name, several, ranks, taken)
    for found in distributed:
        ranks[found.right[0]].also.append(found.path)
        for rank in found.ranks:
            if rank != found.right[0]:
                ranks[rank].of_others.append(found.path)
    differing, count = listed([*_differing(rows), *distributed])
    return [
        Assignment(
            tuple(buckets),
            one.renamed,
            tuple(one.of_others),
            {name: tuple(numbers) for name, numbers in one.boxes_of_others.items()},
            tuple(one.also),
            differing,
            count,
        )
        for one in ranks
    ]


def _differing(rows: Mapping[str, _Rows]) -> Iterator[Disagreement]:
    """Plain tensors that differ within a team that holds them in common."""
    for name, several in rows.items():
        teams: defaultdict[tuple[bytes, ReplicaKind], dict[int, bytes]] = defaultdict(dict)
        for rank, row in several:
            if row.kind is not None:
                teams[row.team, row.kind][rank] = row.fact[-DIGEST_BYTES:]
        for (_, kind), facts in teams.items():
            if len(set(facts.values())) > 1:
                yield disagreement(name, kind, facts)


def _assign_plain(
    name: str, several: _Rows, ranks: Sequence[_Exceptions], taken: Collection[str]
) -> None:
    """Ranks whose tensor differs from that of the first write their own, by another name."""
    first = several[0][1]
    same = [rank for rank, row in several if row.fact == first.fact]
    for rank, row in several:
        if row.fact == first.fact:
            continue
        if row.mesh:
            why = "it is a plain tensor on some ranks and a distributed one on others"
            raise CheckpointError(why, rank=rank, phase="plan", path=name)
        new = f"{name}@rank-{rank}"
        while new in taken:
            new += "~"
        ranks[rank].renamed[name] = new
    writer = same[number_of(name) // BUCKETS % len(same)]
    for rank in same:
        if rank != writer:
            ranks[rank].of_others.append(name)


def _assign_distributed(name: str, several: _Rows, ranks: Sequence[_Exceptions]) -> None:
    """The ranks of the first mesh write it; other meshes have the same tensor."""
    _check_distributed(name, several)
    for rank, row in several:
        if row.mesh != several[0][1].mesh:
            ranks[rank].of_others.append(name)


def _assign_boxes(name: str, several: _Rows, ranks: Sequence[_Exceptions]) -> None:
    """Each box that several ranks have is written by one of them. Whether the boxes cover the
    tensor is seen when they are joined.

    A vector of 6 elements; two ranks have boxes of it:

        rank 0: box 0 is [0, 2), box 1 is [2, 4)      boxes of others: one of "0: 1" and "1: 0",
        rank 1: box 0 is [2, 4), box 1 is [4, 6)      for [2, 4) is on both
    """
    first = several[0][1]
    owners: defaultdict[tuple[Shape, Shape], list[tuple[int, int, bytes]]] = defaultdict(list)
    for rank, row in several:
        if row.boxes is None:
            why = "some ranks have boxes of it, and others a tensor that names none"
            raise CheckpointError(why, rank=rank, phase="plan", path=name)
        if (row.dtype, row.shape) != (first.dtype, first.shape):
            why = (
                f"it is {row.dtype} of shape {row.shape} as a whole on this rank, and {first.dtype}"
                f" of shape {first.shape} on another"
            )
            raise CheckpointError(why, rank=rank, phase="plan", path=name)
        for number, (offsets, sizes, value) in enumerate(row.boxes):
            owners[offsets, sizes].append((rank, number, value))
    for index, (box, same) in enumerate(owners.items()):
        writer = (number_of(name) // BUCKETS + index) % len(same)
        for at, (rank, number, value) in enumerate(same):
            if value != same[0][2]:
                why = (
                    f"ranks have other values in the same box of it, {box[1]} at {box[0]}: give "
                    "tensors that differ different names"
                )
                raise CheckpointError(why, rank=rank, phase="plan", path=name)
            if at != writer:
                ranks[rank].boxes_of_others.setdefault(name, []).append(number)


def _check_distributed(name: str, several: _Rows) -> None:
    """Ranks that each have a mesh of their own must have the same tensor on them."""
    first = several[0][1]
    known: dict[bytes, bytes] = {}
    for rank, row in several:
        place, value = row.part
        if row.fact != first.fact or not row.mesh:
            why = "ranks have it in different layouts"
        elif place and known.setdefault(place, value) != value:
            why = "ranks with a mesh of their own have other values"
        else:
            continue
        why += ": give tensors that differ different names"
        raise CheckpointError(why, rank=rank, phase="plan", path=name)
