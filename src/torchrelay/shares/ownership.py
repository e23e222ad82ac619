"""Which rank writes what of a save: a rule, and how ranks find out where it may be used. Pure.

Ranks of a job have mostly the same: the same leaves, the same plain tensors, and their parts of the
same distributed ones. Where all have the same, each rank knows by the rule alone what is its own to
write, and nothing is gathered anywhere. To see where that is so, every rank says the digests of its
rows, a row for each tensor and each leaf, in buckets of rows. Only the rows of buckets that are not
the same everywhere go to the coordinator, which says who writes those.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from typing import Annotated, NamedTuple

import msgspec
import numpy as np
import xxhash

from torchrelay.errors import CheckpointError
from torchrelay.geometry import DIGEST_BYTES
from torchrelay.geometry.boxes import Numbers
from torchrelay.record.manifest import DTensorLeaf, Leaf, Shape, ShardedLeaf
from torchrelay.record.rows import LeafRows
from torchrelay.record.schema import LeafKind, MeshSharding, Record

BUCKETS = 64
_Buckets = Annotated[tuple[Annotated[int, msgspec.Meta(ge=0, lt=BUCKETS)], ...], msgspec.Meta()]
_Digests = Annotated[
    bytes, msgspec.Meta(min_length=BUCKETS * DIGEST_BYTES, max_length=BUCKETS * DIGEST_BYTES)
]
_encode = msgspec.msgpack.Encoder().encode


class HeldTensor(NamedTuple):
    """A tensor that this rank has, or has a part of, as a plan sees it.

    The rank is number `replica` of the `replicas` ranks that have these elements. `team` is the
    same on all of them, and for all tensors that the same ranks share in this way.
    """

    name: str
    fact: bytes  # equal where ranks have the same tensor: for a plain one, of the same bytes
    nbytes: int  # of what this rank has of it
    replica: int
    replicas: int
    team: bytes
    mesh: bytes = b""  # which ranks have a distributed tensor


class Row(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A `HeldTensor` as it is reported to the coordinator. Of a distributed one, `part` identifies
    the elements that this rank has: which they are, and their values. A plain one has its dtype and
    shape, and so has one that names its `boxes`, each with a digest of its values."""

    name: str
    fact: bytes
    mesh: bytes = b""
    part: tuple[bytes, bytes] = (b"", b"")
    dtype: str = ""
    shape: tuple[int, ...] = ()
    boxes: tuple[tuple[Shape, Shape, bytes], ...] | None = None


class Statement(msgspec.Struct, array_like=True, frozen=True):
    """The first message of a rank: digests of its tensors and leaves."""

    shape: bytes  # of its outline but for the leaves
    leaves: _Digests
    tensors: _Digests


class Question(msgspec.Struct, array_like=True, frozen=True, tag="question"):
    """The coordinator's answer where ranks differ: the buckets whose rows it must see."""

    tensors: _Buckets
    leaves: _Buckets
    outline: bool  # whether the whole outline is wanted too


class Details(msgspec.Struct, array_like=True, frozen=True):
    """The answer of a rank to a question."""

    tensors: list[Row]
    leaves: list[tuple[int, Leaf]]
    outline: bytes | None = None  # a record, encoded


class Ruling(msgspec.Struct, array_like=True, frozen=True, tag="ruling"):
    """The exceptions of a rank from the rule. In these buckets it writes what it has, by these
    names, but for what is left to another rank: all of a tensor, or some of its boxes here."""

    buckets: _Buckets = ()
    renamed: dict[str, str] = {}
    left: tuple[str, ...] = ()
    left_boxes: dict[str, tuple[int, ...]] = {}


def _number(name: str) -> int:
    return xxhash.xxh32_intdigest(name.encode("utf-8", "surrogatepass"))


def bucket_of(name: str) -> int:
    return _number(name) % BUCKETS


def digests_of_tensors(held: Iterable[HeldTensor]) -> bytes:
    """The digest of each bucket of rows."""
    buckets: list[list[tuple[str, bytes, bytes]]] = [[] for _ in range(BUCKETS)]
    for one in held:
        buckets[bucket_of(one.name)].append((one.name, one.fact, one.mesh))
    return b"".join(xxhash.xxh3_128_digest(_encode(sorted(rows))) for rows in buckets)


def buckets_of_leaves(rows: LeafRows) -> Numbers:
    """The bucket of each leaf. Distributed ones, which name all ranks of their mesh, have buckets
    of their own, so that a value that differs from rank to rank does not bring them."""
    half = BUCKETS // 2
    buckets: Numbers = np.arange(len(rows)) % half
    buckets[rows.leaves[rows.is_sharded]] += half
    others = rows.others.items()
    buckets[[at for at, leaf in others if isinstance(leaf, DTensorLeaf | ShardedLeaf)]] += half
    return buckets


def digests_of_leaves(rows: LeafRows) -> bytes:
    """The digest of each bucket of leaves: of the kinds and places of rows, and of other leaves."""
    record = rows.record
    buckets = buckets_of_leaves(rows)
    kinds = _fingerprints([_spelled(record, kind) for kind in record.kinds])
    images = _fingerprints([(kind.dtype, kind.shape) for kind in record.image_kinds])
    columns = [rows.leaves, rows.offsets]
    if len(rows.leaves):
        columns += [*kinds[rows.kinds].T, *images[record.image_kind[rows.images]].T]
    table, of_rows = np.stack(columns, 1), buckets[rows.leaves]
    others: list[list[tuple[int, Leaf]]] = [[] for _ in range(BUCKETS)]
    for at, leaf in rows.others.items():
        others[buckets[at]].append((at, leaf))
    return b"".join(
        xxhash.xxh3_128_digest(table[of_rows == bucket].tobytes() + _encode(more))
        for bucket, more in enumerate(others)
    )


def _fingerprints(items: Sequence[object]) -> Numbers:
    digests = b"".join(xxhash.xxh3_128_digest(_encode(item)) for item in items)
    return np.frombuffer(digests, np.int64).reshape(-1, 2)


def _spelled(record: Record, kind: LeafKind) -> object:
    """A kind with what it refers to."""
    how = record.shardings[kind.sharding] if kind.sharding >= 0 else None
    mesh = record.meshes[how.mesh] if isinstance(how, MeshSharding) else None
    facts = (kind.dtype, kind.shape, kind.strides, kind.flags)
    return facts, mesh, how.placements if isinstance(how, MeshSharding) else how


def written_by_rule(held: Iterable[HeldTensor]) -> set[str]:
    """The names of those that this rank writes, where every rank has the same ones.

    Of each team, the largest tensor that is left goes to the rank with the least to write.
    """
    teams: defaultdict[bytes, list[HeldTensor]] = defaultdict(list)
    mine = set()
    for one in held:
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


def written_by_name(one: HeldTensor) -> bool:
    """Whether this rank writes its part of a distributed tensor that not all ranks have."""
    return _number(one.name) // BUCKETS % one.replicas == one.replica


def differing(all_digests: Sequence[bytes]) -> tuple[int, ...]:
    """The buckets that are not the same on all ranks."""
    distinct = set(all_digests)
    cuts = [slice(n * DIGEST_BYTES, (n + 1) * DIGEST_BYTES) for n in range(BUCKETS)]
    return tuple([n for n, cut in enumerate(cuts) if len({known[cut] for known in distinct}) > 1])


def questions(said: Sequence[Statement]) -> list[Question] | None:
    """The questions of the coordinator, rank 0, to each rank; None if all have the same."""
    tensors = differing([one.tensors for one in said])
    shapes: defaultdict[bytes, list[int]] = defaultdict(list)
    for rank, one in enumerate(said):
        shapes[one.shape].append(rank)
    if not tensors and len(shapes) == 1 and len({one.leaves for one in said}) == 1:
        return None
    asked = [Question(tensors, (), False)] * len(said)
    for ranks in shapes.values():
        leaves = differing([said[rank].leaves for rank in ranks])
        for rank in ranks:
            asked[rank] = Question(tensors, leaves, rank == ranks[0] and rank != 0)
    return asked


def rulings(
    details: Sequence[Details], asked: Sequence[int], names: Collection[str]
) -> list[Ruling]:
    """The ruling for each rank about the buckets in question. `names`: of all outlines that were
    sent."""
    holders: defaultdict[str, list[tuple[int, Row]]] = defaultdict(list)
    taken = set(names)
    for rank, one in enumerate(details):
        for row in one.tensors:
            holders[row.name].append((rank, row))
            taken.add(row.name)
    renamed: list[dict[str, str]] = [{} for _ in details]
    left: list[list[str]] = [[] for _ in details]
    boxes: list[dict[str, tuple[int, ...]]] = [{} for _ in details]
    for name, several in holders.items():
        first = several[0][1]
        if any(row.boxes is not None for _, row in several):
            for rank, numbers in _boxes_of_others(name, several).items():
                boxes[rank][name] = tuple(numbers)
            continue
        same = [(rank, row) for rank, row in several if row.fact == first.fact]
        if first.mesh:
            _check_distributed(name, several)
            for rank, row in same:
                if row.mesh != first.mesh:
                    left[rank].append(name)
            continue
        for rank, row in several:
            if row.fact != first.fact:
                if row.mesh:
                    why = "it is a plain tensor on some ranks and a distributed one on others"
                    raise CheckpointError(why, rank=rank, phase="plan", path=name)
                renamed[rank][name] = f"{name}@rank-{rank}"
                while renamed[rank][name] in taken:
                    renamed[rank][name] += "~"
        writer = same[_number(name) // BUCKETS % len(same)][0]
        for rank, _ in same:
            if rank != writer:
                left[rank].append(name)
    return [
        Ruling(tuple(asked), new, tuple(others), some)
        for new, others, some in zip(renamed, left, boxes, strict=True)
    ]


def _boxes_of_others(name: str, several: Sequence[tuple[int, Row]]) -> dict[int, list[int]]:
    """The boxes of a tensor that several ranks have, as the numbers that each rank has of those
    that another one writes. Whether the boxes cover the tensor is seen when they are joined."""
    first = several[0][1]
    holders: defaultdict[tuple[Shape, Shape], list[tuple[int, int, bytes]]] = defaultdict(list)
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
            holders[offsets, sizes].append((rank, number, value))
    left: defaultdict[int, list[int]] = defaultdict(list)
    for place, (box, same) in enumerate(holders.items()):
        writer = (_number(name) // BUCKETS + place) % len(same)
        for at, (rank, number, value) in enumerate(same):
            if value != same[0][2]:
                why = (
                    f"ranks have other values in the same box of it, {box[1]} at {box[0]}: give "
                    "tensors that differ different names"
                )
                raise CheckpointError(why, rank=rank, phase="plan", path=name)
            if at != writer:
                left[rank].append(number)
    return left


def _check_distributed(name: str, several: Sequence[tuple[int, Row]]) -> None:
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
