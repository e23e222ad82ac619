"""How ranks find out what they have alike, and the messages by which they do. Pure.

Ranks of a job have mostly the same: the same leaves, the same plain tensors, and their parts of the
same distributed ones. So each sends digests first: its tensors and leaves fall into buckets, by the
hash of a name and by the number of a leaf, and each bucket has one digest. Only buckets that differ
are sent in full.

    two ranks, and the buckets of three tensors     digests        sent in full
    3   w (equal on both)                            a1   a1        -
    7   rng (rank 0 and rank 1 have their own)       b1   b2        the rows of bucket 7
    9   b, only on rank 1                            c0   c1        the rows of bucket 9
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Annotated, NamedTuple

import msgspec
import numpy as np
import xxhash

from torchrelay.geometry import DIGEST_BYTES
from torchrelay.geometry.boxes import Numbers
from torchrelay.record.manifest import DTensorLeaf, Leaf, Shape, ShardedLeaf
from torchrelay.record.rows import LeafRows
from torchrelay.record.schema import LeafKind, MeshSharding, Record
from torchrelay.results import Differing
from torchrelay.shares.replicas import Replica, TeamDigests, requested, splits
from torchrelay.state.replicas import ReplicaKind

BUCKETS = 64
_Buckets = Annotated[tuple[Annotated[int, msgspec.Meta(ge=0, lt=BUCKETS)], ...], msgspec.Meta()]
_Digests = Annotated[
    bytes, msgspec.Meta(min_length=BUCKETS * DIGEST_BYTES, max_length=BUCKETS * DIGEST_BYTES)
]
_encode = msgspec.msgpack.Encoder().encode


class RankTensor(NamedTuple):
    """A tensor that this rank has, or has a part of.

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
    holders: bytes = b""  # of a distributed tensor: the ranks that have these elements, if several
    value: bytes = b""  # and the digest of their bytes here


class Row(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A `RankTensor` as it is reported to the coordinator. Of a distributed one, `part` identifies
    the elements that this rank has: which they are, and their values. A plain one has its dtype and
    shape, and so has one that names its `boxes`, each with a digest of its values. A plain
    tensor that is a replica has its `kind` and `team`."""

    name: str
    fact: bytes
    mesh: bytes = b""
    part: tuple[bytes, bytes] = (b"", b"")
    dtype: str = ""
    shape: tuple[int, ...] = ()
    boxes: tuple[tuple[Shape, Shape, bytes], ...] | None = None
    kind: ReplicaKind | None = None
    team: bytes = b""


class StateDigests(msgspec.Struct, array_like=True, frozen=True):
    """The first message of a rank: digests of its tensors and leaves."""

    shape: bytes  # of its outline but for the leaves
    leaves: _Digests
    tensors: _Digests
    teams: TeamDigests = {}  # of distributed tensors that this rank has in common with others


class DetailsRequest(msgspec.Struct, array_like=True, frozen=True, tag="details"):
    """The coordinator's answer where ranks differ: the buckets whose rows it must see."""

    tensors: _Buckets
    leaves: _Buckets
    outline: bool  # whether the whole outline is needed too
    teams: tuple[bytes, ...] = ()  # whose tensors it must see


class Details(msgspec.Struct, array_like=True, frozen=True):
    """The answer of a rank to a `DetailsRequest`."""

    tensors: list[Row]
    leaves: list[tuple[int, Leaf]]
    outline: bytes | None = None  # a record, encoded
    replicas: list[Replica] = []


class Assignment(msgspec.Struct, array_like=True, frozen=True, tag="assignment"):
    """The exceptions of a rank from the rule. In these buckets it writes what it has, by these
    names, but for what other ranks write: all of a tensor, or some of its boxes here. `also`: what
    it writes against the rule, for its replica is the one that is kept.

    `differing`: replicas that should be equal and are not, on any rank; there are `differ` of them.
    """

    buckets: _Buckets = ()
    renamed: dict[str, str] = {}
    of_others: tuple[str, ...] = ()
    boxes_of_others: dict[str, tuple[int, ...]] = {}
    also: tuple[str, ...] = ()
    differing: tuple[Differing, ...] = ()
    differ: int = 0


def number_of(name: str) -> int:
    """A number by which buckets and writers are chosen, the same in every process."""
    return xxhash.xxh32_intdigest(name.encode("utf-8", "surrogatepass"))


def bucket_of(name: str) -> int:
    return number_of(name) % BUCKETS


def digests_of_tensors(tensors: Iterable[RankTensor]) -> bytes:
    """The digest of each bucket of rows."""
    buckets: list[list[tuple[str, bytes, bytes]]] = [[] for _ in range(BUCKETS)]
    for one in tensors:
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


def differing(all_digests: Sequence[bytes]) -> tuple[int, ...]:
    """The buckets that are not the same on all ranks."""
    distinct = set(all_digests)
    cuts = [slice(n * DIGEST_BYTES, (n + 1) * DIGEST_BYTES) for n in range(BUCKETS)]
    return tuple([n for n, cut in enumerate(cuts) if len({known[cut] for known in distinct}) > 1])


def replicas_of(tensors: Iterable[RankTensor]) -> list[Replica]:
    """The distributed tensors that this rank has in common with others."""
    return [Replica(one.holders, one.name, "DTensor", one.value) for one in tensors if one.holders]


def detail_requests(digests: Sequence[StateDigests]) -> list[DetailsRequest] | None:
    """The coordinator's request to each rank, the coordinator included; None if all have the same.
    One rank of each shape of outline sends it whole."""
    tensors = differing([one.tensors for one in digests])
    split = splits([one.teams for one in digests])
    shapes: defaultdict[bytes, list[int]] = defaultdict(list)
    for rank, one in enumerate(digests):
        shapes[one.shape].append(rank)
    alike = len(shapes) == 1 and len({one.leaves for one in digests}) == 1
    if alike and not tensors and not split:
        return None
    requests = [DetailsRequest(tensors, (), False)] * len(digests)
    for ranks in shapes.values():
        leaves = differing([digests[rank].leaves for rank in ranks])
        for rank in ranks:
            first = rank == ranks[0] and rank != 0
            requests[rank] = DetailsRequest(tensors, leaves, first, requested(split, rank))
    return requests
