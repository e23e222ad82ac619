"""Several ranks' records and one destination: what is read of each, and what comes of it.

Ranks are simulated in this process: each has its part of tensors on a mesh without process groups.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from math import prod
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.records import rank_record
from tests.support.rounds import rounds
from torchrelay.describing.snapshot import Snapshot, SnapshotPart, capture
from torchrelay.errors import ManifestError, MismatchError, RelayError
from torchrelay.geometry.boxes import Box, run_of
from torchrelay.geometry.shards import MeshCut, pieces_on_mesh
from torchrelay.landing.commit.landing import Landed
from torchrelay.landing.land import land
from torchrelay.landing.options import LandingOptions
from torchrelay.planning.destination import Destination
from torchrelay.planning.holder_reads import _shared_out
from torchrelay.record import manifest as m
from torchrelay.record.encoding import decode
from torchrelay.record.meshes import mesh_of
from torchrelay.record.rank_reads import MAX_CHUNKS, Reads, decode_reads, encode_reads
from torchrelay.state import tensors as t
from torchrelay.state.local_parts import cut
from torchrelay.state.meshes import described_mesh
from torchrelay.transports.protocol.receive_plan import HolderReads, ReceivePlan

SEED = 20261117


def dtensor(
    whole: torch.Tensor, shape: tuple[int, ...], placements: tuple[m.Placement, ...], rank: int
) -> torch.Tensor:
    """What a rank of a mesh has of a tensor."""
    mesh = mesh_of("cpu", shape, tuple(range(prod(shape))), None)
    coordinate = tuple(np.argwhere(np.arange(prod(shape)).reshape(shape) == rank)[0].tolist())
    cuts = [
        MeshCut(one.dim, size, at, max(one.split, 1))
        for one, size, at in zip(placements, shape, coordinate, strict=True)
        if one.kind in ("shard", "strided")
    ]
    (piece,) = pieces_on_mesh(tuple(whole.shape), cuts)
    local = cut(whole, *piece.box).clone()
    part = m.TensorLeaf(t.NAMES[whole.dtype], tuple(local.shape), None, 0)
    leaf = m.DTensorLeaf(
        part, mesh, placements, tuple(whole.shape), tuple(whole.stride()), coordinate
    )
    return t.dtensor(local, leaf, described_mesh(mesh, rank))


def local_of(tensor: Any) -> torch.Tensor:
    return t.dtensor_parts(tensor)[0]


def shard(dim: int) -> m.Placement:
    return m.Placement("shard", dim)


COPY = m.Placement("replicate")


def finished(plan: ReceivePlan) -> Landed:
    """The state, when all reads are here."""
    plan.make()
    return plan.commit()


class Ranks:
    """Snapshots of several ranks, and their records as another process decodes them."""

    def __init__(self, states: Mapping[int, Any], step: int | None = 3) -> None:
        self.snapshots: dict[int, Snapshot] = {n: capture(x, step) for n, x in states.items()}
        self.records = {n: decode(x.encoded()) for n, x in self.snapshots.items()}
        self.served: dict[int, int] = {}

    def plan(self, into: Any = None, **options: Any) -> ReceivePlan:
        return ReceivePlan(self.records, into, LandingOptions(**options))

    def fetch(self, rank: int, part: HolderReads, *, by_address: bool = False) -> None:
        """What a transport does, in chunks or by address."""
        snapshot = self.snapshots[rank]
        asked = decode_reads(encode_reads(part.request), snapshot.record)
        given = SnapshotPart(snapshot, asked)
        assert given.chunks.sizes == part.target.chunks.sizes
        if by_address:
            everything = torch.zeros(given.chunks.stream_bytes, dtype=torch.uint8)
            given.stream.read(0, given.chunks.stream_bytes, everything)
            places = part.target.stream
            assert not len(places.device.starts)
            places.host.scatter(0, given.chunks.stream_bytes, everything.data_ptr())
        else:
            for index in range(len(given.chunks)):
                view = given.view(index)
                chunk = torch.full((given.chunks.sizes[index],), 0xAB, dtype=torch.uint8)
                given.read(index, chunk)
                assert view is None or torch.equal(view, chunk)
                part.target.write(index, chunk)
        self.served[rank] = self.served.get(rank, 0) + part.target.chunks.nbytes

    def gather(self, into: Any = None, *, by_address: bool = False, **options: Any) -> Any:
        plan = self.plan(into, **options)
        for rank, part in plan.reads.items():
            self.fetch(rank, part, by_address=by_address)
        return finished(plan).state


# Plain states


def test_one_rank_is_like_a_receive_of_it() -> None:
    base = torch.arange(20.0)
    state = {
        "w": torch.randn(3, 4),
        "turned": torch.randn(3, 4).t(),
        "views": [base[2:9], base[4:12]],
        "expanded": torch.randn(3, 1).expand(3, 5),
        "array": np.arange(4),
        "sparse": torch.eye(3).to_sparse(),
        "empty": torch.empty(0, 2),
        "values": [1, "x", None],
        "wide": torch.randn(3, dtype=torch.complex128),
    }
    for by_address in (True, False):
        got = Ranks({4: state}).gather(by_address=by_address)
        assert torch.equal(got["w"], state["w"]) and got["values"] == [1, "x", None]
        assert torch.equal(got["turned"], state["turned"])
        assert got["turned"].stride() == state["turned"].stride()
        assert all(map(torch.equal, got["views"], state["views"]))
        assert got["views"][0].untyped_storage().data_ptr() == (
            got["views"][1].untyped_storage().data_ptr()
        )
        assert torch.equal(got["expanded"], state["expanded"])
        assert (got["array"] == state["array"]).all() and got["empty"].shape == (0, 2)
        assert torch.equal(got["sparse"].to_dense(), torch.eye(3))
        assert torch.equal(got["wide"], state["wide"])


def test_values_and_plain_tensors_are_the_first_ranks_whatever_the_receivers_rank() -> None:
    ranks = Ranks(
        {5: {"w": torch.full((3,), 5.0), "n": 5}, 9: {"w": torch.full((3,), 9.0), "n": 9}}
    )
    for rank in range(3):
        got = ranks.gather(rank=rank)
        assert got["n"] == 5 and got["w"].tolist() == [5.0] * 3
    assert set(ranks.served) == {5}


def test_ranks_of_different_trees_are_laid_over_each_other() -> None:
    """Two stages of a pipeline, and what both have."""
    first = {"stage": {"a": torch.ones(2)}, "n": 0, "both": torch.zeros(2)}
    second = {"stage": {"b": torch.full((3,), 2.0)}, "n": 1, "both": torch.ones(2)}
    got = Ranks({0: first, 1: second}).gather()
    assert got["n"] == 0 and not got["both"].any()
    assert got["stage"]["a"].tolist() == [1, 1] and got["stage"]["b"].tolist() == [2, 2, 2]
    into = {"stage": {"a": torch.zeros(2), "b": torch.zeros(3)}, "n": 9, "both": torch.ones(2)}
    assert Ranks({0: first, 1: second}).gather(into) is into
    assert into["n"] == 0 and into["stage"]["b"].tolist() == [2, 2, 2]


def test_distributed_tensors_of_different_trees_are_put_together_by_their_paths() -> None:
    whole = torch.arange(24.0).view(6, 4)
    states = {
        rank: {
            "w": dtensor(whole, (2,), (shard(0),), rank),
            f"own {rank}": torch.full((2,), float(rank)),
        }
        for rank in (0, 1)
    }
    got = Ranks(states).gather()
    assert torch.equal(got["w"], whole) and got["own 1"].tolist() == [1, 1]


# Meshes


def random_placements(chance: random.Random, dims: int) -> tuple[m.Placement, ...]:
    return tuple(chance.choice([shard(0), shard(0), shard(1), COPY]) for _ in range(dims))


def random_mesh(chance: random.Random) -> tuple[tuple[int, ...], tuple[m.Placement, ...]]:
    shape = chance.choice([(1,), (2,), (3,), (4,), (2, 2), (3, 2)])
    return shape, random_placements(chance, len(shape))


@pytest.mark.parametrize("first", range(0, 200, 50))
def test_random_meshes_and_placements(first: int) -> None:
    for seed in range(first, first + rounds(50)):
        chance = random.Random(SEED + seed)
        make = torch.Generator().manual_seed(seed)
        shapes = [(chance.randrange(1, 12), chance.randrange(1, 12)) for _ in range(5)]
        dtypes = [torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.complex128]
        wholes = [
            (torch.randn(*shape, generator=make) * 90).to(dtype)
            for shape, dtype in zip(shapes, dtypes, strict=True)
        ]
        there, theirs = random_mesh(chance)
        here, ours = random_mesh(chance)
        rank = chance.randrange(prod(here))
        case = f"seed {seed}: {there} {theirs} to rank {rank} of {here} {ours}, {shapes}"

        def parts(mesh: Any, how: Any, number: int, tensors: list[Any]) -> list[Any]:
            return [dtensor(x, mesh, how, number) for x in tensors]

        ranks = Ranks({n: parts(there, theirs, n, wholes) for n in range(prod(there))})
        got = ranks.gather(by_address=bool(seed % 2))
        assert all(map(torch.equal, got, wholes)), case
        into = parts(here, ours, rank, [torch.zeros_like(x) for x in wholes])
        wanted = parts(here, ours, rank, wholes)
        ranks.served.clear()
        ranks.gather(into, by_address=bool(seed % 3))
        pairs = [
            (t.dtensor_parts(x)[0], t.dtensor_parts(y)[0])
            for x, y in zip(into, wanted, strict=True)
        ]  # type: ignore[arg-type]
        assert all(torch.equal(a, b) for a, b in pairs), case
        # Nothing is read twice, and nothing that this rank does not need.
        assert sum(ranks.served.values()) == sum(b.nbytes for _, b in pairs), case


def test_a_plain_tensor_goes_to_a_distributed_one_and_back() -> None:
    whole = torch.arange(30.0).view(6, 5)
    into = {"w": dtensor(torch.zeros(6, 5), (3,), (shard(0),), 1)}
    Ranks({0: {"w": whole}}).gather(into)
    assert torch.equal(local_of(into["w"]), whole[2:4])
    ranks = Ranks({n: {"w": dtensor(whole, (3,), (shard(1),), n)} for n in range(3)})
    target = {"w": torch.zeros(5, 6).t()}
    ranks.gather(target)
    assert torch.equal(target["w"], whole)


def test_one_tensor_for_a_plain_and_a_distributed_place() -> None:
    """Tied where it comes from, and in two forms here."""
    whole = torch.arange(8.0).view(4, 2)
    tied = dtensor(whole, (1,), (COPY,), 0)
    into = {"a": torch.zeros(4, 2), "b": dtensor(torch.zeros(4, 2), (2,), (shard(0),), 1)}
    Ranks({0: {"a": tied, "b": tied}}).gather(into)
    assert torch.equal(into["a"], whole) and torch.equal(local_of(into["b"]), whole[2:])


def test_a_rank_that_is_not_in_the_mesh_of_a_tensor_may_come_first() -> None:
    whole = torch.arange(8.0).view(4, 2)
    mesh = mesh_of("cpu", (2,), (1, 2), None)

    def state(rank: int) -> dict[str, Any]:
        rows = {0: whole[:0], 1: whole[:2], 2: whole[2:]}[rank].clone()
        part = m.TensorLeaf("float32", tuple(rows.shape), None, 0)
        leaf = m.DTensorLeaf(part, mesh, (shard(0),), (4, 2), (2, 1), None)
        return {"w": t.dtensor(rows, leaf, described_mesh(mesh, rank)), "n": rank}

    got = Ranks({rank: state(rank) for rank in (0, 1, 2)}).gather()
    assert torch.equal(got["w"], whole) and got["n"] == 0


def test_ranks_that_disagree_on_whether_a_tensor_is_distributed_are_refused() -> None:
    whole = torch.arange(8.0).view(4, 2)
    states = {0: {"w": whole}, 1: {"w": dtensor(whole, (2,), (shard(0),), 1)}}
    with pytest.raises(MismatchError, match="rank 1 has it as a distributed tensor") as caught:
        Ranks(states).plan()
    assert caught.value.path == "['w']" and caught.value.rank == 1


def test_tied_distributed_tensors_stay_tied() -> None:
    """Also where two tensors have the same memory, as tied parameters of a sharded model do."""
    whole = torch.arange(8.0).view(4, 2)

    def state(rank: int) -> dict[str, Any]:
        one: Any = dtensor(whole, (2,), (shard(0),), rank)
        local, spec = t.dtensor_parts(one)
        return {"one": one, "other": type(one)(local, spec, requires_grad=False)}

    got = Ranks({rank: state(rank) for rank in (0, 1)}).gather()
    assert torch.equal(got["one"], whole) and torch.equal(got["other"], whole)
    assert got["one"].data_ptr() == got["other"].data_ptr()


def test_a_destination_that_is_tied_takes_equal_tensors_and_no_others() -> None:
    same = {"a": torch.arange(4.0), "b": torch.arange(4.0)}
    tied = torch.zeros(4)
    into = {"a": tied, "b": tied}
    Ranks({0: same}).gather(into)
    assert into["a"].tolist() == [0, 1, 2, 3]
    views = {"a": torch.zeros(4), "b": None}
    views["b"] = views["a"].view(4)  # type: ignore[union-attr]
    Ranks({0: same}).gather(views)
    assert views["a"].tolist() == [0, 1, 2, 3]  # type: ignore[union-attr]
    tied.zero_()
    with pytest.raises(MismatchError, match="another value is offered") as caught:
        Ranks({0: {"a": torch.arange(4.0), "b": torch.ones(4)}}).gather(into)
    assert caught.value.path == "['b']" and not tied.any()


def test_a_destination_that_is_tied_takes_tensors_of_its_own_dtype_alone() -> None:
    """Zeros are the same bytes in every dtype."""
    tied = torch.zeros(4)
    state = {"a": torch.zeros(4), "b": torch.zeros(4, dtype=torch.int32)}
    with pytest.raises(MismatchError, match="dtype differs") as caught:
        Ranks({0: state}).plan({"a": tied, "b": tied})
    assert caught.value.path == "['b']"


# Refusals


def test_a_destination_without_memory_is_refused_by_name() -> None:
    into = {"w": torch.nn.UninitializedParameter()}
    with pytest.raises(MismatchError, match="run the module once") as caught:
        Ranks({0: {"w": torch.ones(2)}}).plan(into)
    assert caught.value.path == "['w']"


@pytest.mark.parametrize(
    ("into", "words"),
    [
        (lambda: {"w": torch.zeros(4, 5), "n": 1}, "shape differs"),
        (lambda: {"w": torch.zeros(6, 4).half(), "n": 1}, "dtype differs"),
        (lambda: {"w": dtensor(torch.zeros(6, 5), (2,), (shard(0),), 0), "n": 1}, "shape differs"),
        (lambda: {"w": torch.zeros(6, 4)}, "paths differ"),
        (lambda: {"w": torch.zeros(6, 4), "n": torch.zeros(1)}, "kind differs"),
        (lambda: {"w": 3, "n": 1}, "kind differs"),
    ],
)
def test_a_destination_that_does_not_fit(into: Callable[[], Any], words: str) -> None:
    whole = torch.arange(24.0).view(6, 4)
    states = {n: {"w": dtensor(whole, (2,), (shard(0),), n), "n": 1} for n in (0, 1)}
    with pytest.raises(MismatchError, match=words):
        Ranks(states).plan(into())


def test_values_that_are_yet_to_be_reduced_are_refused() -> None:
    partial = m.Placement("partial", reduce="sum")
    state = {"a": torch.ones(2), "w": dtensor(torch.ones(4), (2,), (partial,), 0)}
    with pytest.raises(MismatchError, match="no value yet") as caught:
        Ranks({0: state}).plan()
    assert caught.value.path == "['w']"


UPPER, LOWER = ((0, 0), (2, 4)), ((2, 0), (2, 4))


def test_boxes_that_several_ranks_have_are_shared_out() -> None:
    records = {rank: rank_record([UPPER, LOWER]) for rank in (5, 9)}
    parts = ReceivePlan(records).reads
    assert {rank: part.target.chunks.nbytes for rank, part in parts.items()} == {5: 32, 9: 32}


def test_a_rank_with_all_of_a_tensor_is_asked_for_it() -> None:
    whole = ((0, 0), (4, 4))
    parts = ReceivePlan({0: rank_record([UPPER]), 1: rank_record([whole])}).reads
    assert list(parts) == [1]


@pytest.mark.parametrize(
    ("second", "words"),
    [
        (rank_record([((2, 0), (1, 4))]), "ranks 0, 1 have 12 of its 16 elements"),
        (rank_record([((1, 0), (3, 4))]), "overlapping parts"),
        (rank_record([LOWER], dtype="int32"), "rank 1 has it as int32"),
        (rank_record([((0, 0), (2, 8))], (2, 8)), r"of shape \(2, 8\)"),
    ],
)
def test_parts_that_make_no_whole_are_refused(second: Any, words: str) -> None:
    with pytest.raises(MismatchError, match=words) as caught:
        ReceivePlan({0: rank_record([UPPER]), 1: second})
    assert caught.value.path == "['w']"


def test_pieces_are_shared_out_evenly() -> None:
    chance = random.Random(SEED)
    for _ in range(300):
        loads = np.array([chance.randrange(100) for _ in range(chance.randrange(1, 6))])
        count, nbytes = chance.randrange(1, 40), chance.randrange(1, 30)
        found = _shared_out(count, nbytes, loads)
        assert found.sum() == count and (found >= 0).all()
        after = loads + found * nbytes
        given = after[found > 0]
        assert given.max() - nbytes <= after.min()  # none got a piece that another wanted more


# Losses


def replicated(count: int = 4) -> tuple[torch.Tensor, Ranks]:
    whole = torch.arange(48.0).view(12, 4)
    how = (COPY, shard(0))
    states = {
        n: {"w": [dtensor(whole + k, (2, 2), how, n) for k in range(6)], "n": n}
        for n in range(count)
    }
    return whole, Ranks(states)


@pytest.mark.parametrize("lost", [1, 2, 3])
def test_a_replica_gives_what_a_lost_rank_was_to(lost: int) -> None:
    whole, ranks = replicated()
    plan = ranks.plan()
    assert set(plan.reads) == {0, 1, 2, 3}
    for rank, part in plan.reads.items():
        if rank != lost:
            ranks.fetch(rank, part)
    before = dict(ranks.served)
    again = plan.without([lost])
    assert again is plan and set(again.reads) == {(lost + 2) % 4}
    for rank, part in again.reads.items():
        ranks.fetch(rank, part)
    got: Any = finished(again).state
    assert all(torch.equal(x, whole + k) for k, x in enumerate(got["w"])) and got["n"] == 0
    assert sum(ranks.served.values()) - sum(before.values()) < sum(before.values())


def test_values_are_those_of_one_rank_also_if_the_first_is_lost() -> None:
    whole, ranks = replicated()
    plan = ranks.plan()
    for rank in (1, 2, 3):
        ranks.fetch(rank, plan.reads[rank])
    again = plan.without([0])
    assert again is not plan
    for rank, part in again.reads.items():
        ranks.fetch(rank, part)
    got: Any = finished(again).state
    assert got["n"] == 1 and all(torch.equal(x, whole + k) for k, x in enumerate(got["w"]))


def test_what_no_other_rank_has_is_named() -> None:
    _, ranks = replicated()
    plan = ranks.plan()
    with pytest.raises(MismatchError, match="have 24 of its 48 elements") as caught:
        plan.without([1, 3])
    assert caught.value.path == "['w'][0]"
    with pytest.raises(MismatchError, match="no rank is left"):
        ranks.plan().without([0, 1, 2, 3])


# What a peer may ask, and say


STATE = {"w": torch.arange(12.0).view(3, 4), "n": 7, "s": torch.ones(4, 4)[:, ::2]}


def image_of(snapshot: Snapshot, shape: tuple[int, ...]) -> int:
    kinds = snapshot.record.image_kinds
    numbers = snapshot.record.image_kind.tolist()
    return next(image for image, n in enumerate(numbers) if kinds[n].shape == shape)


def test_boxes_are_read_from_where_they_lie() -> None:
    snapshot = capture(STATE)
    w, s = image_of(snapshot, (3, 4)), image_of(snapshot, (4, 2))
    one = np.array
    reads = Reads(
        one([w, w, s, w, s]),
        1 << 20,
        one([1, 2, 0, 0, 3]),
        (((1, 0), (2, 4)), ((0, 1), (3, 2)), ((2, 0), (2, 1))),
    )
    part = SnapshotPart(snapshot, decode_reads(encode_reads(reads), snapshot.record))
    assert part.chunks.image_bytes.tolist() == [32, 24, 32, 48, 8]
    data = torch.empty(part.chunks.stream_bytes, dtype=torch.uint8)
    part.stream.read(0, part.chunks.stream_bytes, data)
    wanted = (STATE["w"][1:], STATE["w"][:, 1:3], STATE["s"], STATE["w"], STATE["s"][2:, :1])
    for at, tensor in zip(part.chunks.places.tolist(), wanted, strict=True):
        found = data[at : at + tensor.nbytes].view(torch.float32)  # type: ignore[attr-defined]
        assert torch.equal(found.view(tensor.shape), tensor)  # type: ignore[attr-defined]
    assert len(part.stream.regions) == 3  # the others are runs of host memory
    STATE["w"].add_(0)  # type: ignore[attr-defined]
    with pytest.raises(RelayError, match="changed while it was sent"):
        part.check_unchanged()


def _reads(
    images: list[int], box_of: list[int] | None = None, *boxes: Box, chunk_bytes: int = 64
) -> Reads:
    column = None if box_of is None else np.array(box_of, np.int64)
    return Reads(np.array(images, np.int64), chunk_bytes, column, boxes)


@pytest.mark.parametrize(
    "reads",
    [
        _reads([2]),
        _reads([0], [2], ((0, 0), (1, 1))),
        _reads([0], [1], ((0,), (1,))),
        _reads([0], [1], ((2, 0), (2, 1))),
        _reads([0], [1], (((1 << 62) - 1, 0), ((1 << 62) - 1, 1))),
        _reads([0], [1], ((1 << 62, 0), (1 << 62, 1))),
        _reads([0], [1, 1], ((0, 0), (1, 1))),
        _reads([0], [1], ((0, 0, 0), (1, 1))),
        _reads([0], [1]),
        _reads([0], [1], ((0, 0), (1, 1)), ((0, 0), (1, 1))),
        _reads([0], None, ((0, 0), (1, 1))),
        _reads([0], chunk_bytes=0),
        _reads([0], chunk_bytes=1 << 40),
    ],
    ids=str,
)
def test_reads_of_what_is_not_there_are_refused(reads: Reads) -> None:
    snapshot = capture(STATE)
    decode_reads(encode_reads(_reads([0, 1, 0])), snapshot.record)
    with pytest.raises(ManifestError):
        decode_reads(encode_reads(reads), snapshot.record)


def test_reads_in_endless_chunks_are_refused() -> None:
    """A sender has a number for each chunk that a receiver asks for."""
    record = capture({"w": torch.empty(MAX_CHUNKS, dtype=torch.uint8)}).record
    decode_reads(encode_reads(_reads([0], chunk_bytes=64)), record)
    with pytest.raises(ManifestError, match="in chunks of 1 bytes"):
        decode_reads(encode_reads(_reads([0], chunk_bytes=1)), record)


def mutated(chance: random.Random, good: bytes) -> bytes:
    data = bytearray(good)
    for _ in range(chance.choice([1, 1, 2, 5])):
        at = chance.randrange(len(data))
        kind = chance.randrange(3)
        if kind == 0:
            data[at] = chance.randrange(256)
        elif kind == 1:
            data[at : at + chance.randrange(6)] = b""
        else:
            data[at:at] = chance.choice([b"\x00", b"\xff", b"\x01", b"\xc0", b"\xcd\xff\xff"])
    return bytes(data)


def test_mutants_of_reads_are_refused_or_can_be_served() -> None:
    snapshot = capture(STATE)
    w = image_of(snapshot, (3, 4))
    good = encode_reads(_reads([w, w], [0, 1], ((0, 1), (3, 2))))
    chance = random.Random(SEED)
    served = 0
    for _ in range(rounds(4000, 4)):
        try:
            reads = decode_reads(mutated(chance, good), snapshot.record)
        except ManifestError:
            continue
        served += 1
        part = SnapshotPart(snapshot, reads)
        if part.chunks.stream_bytes < 1 << 20:
            data = torch.empty(part.chunks.stream_bytes, dtype=torch.uint8)
            part.stream.read(0, part.chunks.stream_bytes, data)
    assert served > 20


def test_mutants_of_a_rank_are_refused_or_can_be_gathered() -> None:
    """No byte of a record can do more than be refused: what is asked of its rank fits its memory,
    and what is made of it fits here."""
    whole = torch.arange(24.0).view(6, 4)
    states = {
        n: {"w": dtensor(whole, (2,), (shard(0),), n), "n": n, "x": torch.ones(3)} for n in (0, 1)
    }
    ranks = Ranks(states)
    good = ranks.snapshots[1].encoded()
    chance = random.Random(SEED)
    gathered = valid = 0
    for number in range(rounds(4000, 4)):
        try:
            record = decode(mutated(chance, good))
        except ManifestError:
            continue
        valid += 1
        if record.nbytes > 1 << 20:
            continue
        into = {"w": torch.zeros(6, 4), "n": 0, "x": torch.zeros(3)} if number % 2 else None
        try:
            plan = ReceivePlan({0: ranks.records[0], 1: record}, into, LandingOptions(strict=False))
            for part in plan.reads.values():
                for index, size in enumerate(part.target.chunks.sizes):
                    part.target.write(index, torch.zeros(size, dtype=torch.uint8))
            finished(plan)
            gathered += 1
        except RelayError:
            continue
    assert valid > gathered > 20


# Geometry


def test_runs_of_boxes() -> None:
    chance = random.Random(SEED)
    for _ in range(2000):
        shape = tuple(chance.randrange(1, 4) for _ in range(chance.randrange(1, 4)))
        sizes = tuple(chance.randrange(1, n + 1) for n in shape)
        offsets = tuple(
            chance.randrange(n - size + 1) for n, size in zip(shape, sizes, strict=True)
        )
        index = tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))
        places = np.arange(prod(shape)).reshape(shape)[index].reshape(-1)
        together = bool((np.diff(places) == 1).all())
        assert run_of((offsets, sizes), shape) == (int(places[0]) if together else None)


# Cost


def best(act: Callable[[], object], laps: int = 4) -> float:
    found = []
    for _ in range(laps):
        begun = time.process_time()
        act()
        found.append(time.process_time() - begun)
    return min(found)


def many(count: int) -> dict[str, Any]:
    return {"model": {f"w{n}": torch.zeros(4) for n in range(count)}, "step": 1}


@pytest.mark.parametrize("in_place", [True, False])
def test_a_gather_of_many_tensors_costs_no_more_than_three_receives(in_place: bool) -> None:
    count = 32_000
    snapshot = capture(many(count), 1)
    record = decode(snapshot.encoded())
    into = many(count) if in_place else None

    def receive() -> None:
        landing = land(record, None if into is None else Destination(into))
        landing.target()
        landing.commit()

    def gather() -> None:
        plan = ReceivePlan({0: record}, None if into is None else Destination(into))
        for part in plan.reads.values():
            asked = decode_reads(encode_reads(part.request), snapshot.record)
            SnapshotPart(snapshot, asked)
        finished(plan)

    plain, gathered = best(receive), best(gather)
    print(f"receive {plain * 1e3:.0f} ms, gather {gathered * 1e3:.0f} ms")
    assert gathered < 3 * plain


def test_a_gather_of_very_many_distributed_tensors_ends() -> None:
    count = 20_000
    whole = torch.zeros(8, 2)
    parts = [dtensor(whole, (2,), (shard(0),), n) for n in (0, 1)]
    locals_ = [t.dtensor_parts(one) for one in parts]  # type: ignore[arg-type]
    kind: Any = type(parts[0])
    states = {
        n: {f"w{k}": kind(local.clone(), spec, requires_grad=False) for k in range(count)}
        for n, (local, spec) in enumerate(locals_)
    }
    ranks = Ranks(states)
    seconds = best(ranks.plan, laps=2)
    print(f"{seconds:.2f} s for {count} tensors of two ranks")
    assert seconds < 3
