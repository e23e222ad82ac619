"""The boxes that a rank has of a DTensor, against the rows that torch puts into its local tensor.

Each rank of a mesh is made in this process, one after the other: its process group is torch's fake
one, and every tensor is cut without communication.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import prod
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, debug, distribute_tensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, ShardOrderEntry
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.support.rounds import rounds
from torchrelay.errors import UnsupportedLeafError
from torchrelay.geometry.shards import MeshCut, pieces_at, pieces_on_mesh
from torchrelay.state.dtensor_pieces import placement_records
from torchrelay.state.local_parts import LocalBoxes, local_parts

ROWS = range(18)
SIZES = range(1, 5)


@contextmanager
def as_rank(rank: int, world: int) -> Iterator[None]:
    clear = getattr(debug, "_clear_sharding_prop_cache", None)
    if clear is None:
        pytest.skip("this torch cannot forget the meshes of other ranks")
    clear()  # a cache, which has meshes as another rank sees them
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        yield
    finally:
        dist.destroy_process_group()


def numbered(rows: int, columns: int = 2) -> torch.Tensor:
    """Each element is its place in the tensor."""
    return torch.arange(float(rows * columns)).reshape(rows, columns)


class Model(torch.nn.Module):
    def __init__(self, weights: list[torch.Tensor]) -> None:
        super().__init__()
        self.weights = torch.nn.ParameterList(map(torch.nn.Parameter, weights))


def cut_by(mesh: DeviceMesh, *placements: Placement) -> list[torch.Tensor]:
    return [
        distribute_tensor(numbered(rows), mesh, placements, src_data_rank=None) for rows in ROWS
    ]


# FSDP2 of torch 2.11 writes down a split without the strided shards that it has found.
FSDP_COUNTS_STRIDED = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 12)


def by_fsdp(mesh: DeviceMesh, *placements: Placement, over: DeviceMesh) -> list[torch.Tensor]:
    """Weights that tensor parallelism has cut, and then FSDP2."""
    model = Model(cut_by(mesh, *placements))
    fully_shard(model, mesh=over)
    return list(model.weights)


def right_order(outer: int, inner: int) -> list[torch.Tensor]:
    mesh = init_device_mesh("cpu", (outer, inner), mesh_dim_names=("dp", "tp"))
    return by_fsdp(mesh["tp"], Shard(0), over=mesh["dp"])


def inside_of_fsdp(outer: int, inner: int) -> list[torch.Tensor]:
    """The mesh dimension of FSDP2 is the inner one of the job."""
    mesh = init_device_mesh("cpu", (outer, inner), mesh_dim_names=("tp", "dp"))
    return by_fsdp(mesh["tp"], Shard(0), over=mesh["dp"])


def one_mesh(outer: int, inner: int) -> list[torch.Tensor]:
    """FSDP2 over dimensions of the mesh that its parameters have already."""
    fsdp = pytest.importorskip("torch.distributed.fsdp")
    if not hasattr(fsdp, "DataParallelMeshDims"):
        pytest.skip("no such case: this torch has no FSDP2 over dimensions of a larger mesh")
    mesh = init_device_mesh("cpu", (outer, inner), mesh_dim_names=("dp", "tp"))
    model = Model(cut_by(mesh, Replicate(), Shard(0)))
    fully_shard(model, mesh=mesh, dp_mesh_dims=fsdp.DataParallelMeshDims(shard="dp"))
    return list(model.weights)


def one_mesh_turned(outer: int, inner: int) -> list[torch.Tensor]:
    fsdp = pytest.importorskip("torch.distributed.fsdp")
    if not hasattr(fsdp, "DataParallelMeshDims"):
        pytest.skip("no such case: this torch has no FSDP2 over dimensions of a larger mesh")
    mesh = init_device_mesh("cpu", (outer, inner), mesh_dim_names=("tp", "dp"))
    model = Model(cut_by(mesh, Shard(0), Replicate()))
    fully_shard(model, mesh=mesh, dp_mesh_dims=fsdp.DataParallelMeshDims(shard="dp"))
    return list(model.weights)


def columns(outer: int, inner: int) -> list[torch.Tensor]:
    mesh = init_device_mesh("cpu", (outer, inner), mesh_dim_names=("dp", "tp"))
    return by_fsdp(mesh["tp"], Shard(1), over=mesh["dp"])


def hybrid(outer: int, inner: int) -> list[torch.Tensor]:
    mesh = init_device_mesh("cpu", (2, outer, inner), mesh_dim_names=("copies", "dp", "tp"))
    return by_fsdp(mesh["tp"], Shard(0), over=mesh["copies", "dp"])


def experts(outer: int, inner: int) -> list[torch.Tensor]:
    """Two mesh dimensions below that of FSDP2."""
    mesh = init_device_mesh("cpu", (outer, 2, inner), mesh_dim_names=("dp", "ep", "tp"))
    return by_fsdp(mesh["ep", "tp"], Shard(0), Shard(0), over=mesh["dp"])


def experts_in_turn(outer: int, inner: int) -> list[torch.Tensor]:
    """Two mesh dimensions below that of FSDP2, the second one cutting first."""
    mesh = init_device_mesh("cpu", (outer, 2, inner), mesh_dim_names=("dp", "ep", "tp"))
    if inner == 1:
        return by_fsdp(mesh["ep", "tp"], Shard(0), Shard(0), over=mesh["dp"])
    if not FSDP_COUNTS_STRIDED:
        pytest.skip("no such case: FSDP2 of this torch does not count strided shards")
    return by_fsdp_in_turn(mesh, inner)


def by_fsdp_in_turn(mesh: DeviceMesh, inner: int) -> list[torch.Tensor]:
    sub = mesh["ep", "tp"]
    made = []
    for rows in ROWS:
        first = distribute_tensor(numbered(rows), mesh["tp"], [Shard(0)], src_data_rank=None)
        local = first.to_local()
        second = distribute_tensor(local, mesh["ep"], [Shard(0)], src_data_rank=None).to_local()
        made.append(
            DTensor.from_local(
                second,
                sub,
                [_StridedShard(0, split_factor=inner), Shard(0)],
                run_check=False,
                shape=(rows, 2),
                stride=(2, 1),
            )
        )
    model = Model(made)
    fully_shard(model, mesh=mesh["dp"])
    return list(model.weights)


def left_order(outer: int, inner: int) -> list[torch.Tensor]:
    mesh = init_device_mesh("cpu", (outer, inner), mesh_dim_names=("dp", "tp"))
    return cut_by(mesh, Shard(0), Shard(0))


def grid(outer: int, inner: int) -> list[torch.Tensor]:
    mesh = init_device_mesh("cpu", (outer, inner), mesh_dim_names=("dp", "tp"))
    return cut_by(mesh, Shard(1), Shard(0))


def several_pieces(outer: int, inner: int) -> list[torch.Tensor]:
    """Strided shards of one mesh dimension, as of a fused weight: several runs of rows."""
    mesh = init_device_mesh("cpu", (outer, inner), mesh_dim_names=("dp", "tp"))
    return cut_by(mesh["tp"], _StridedShard(0, split_factor=outer + 1))


# A test each; the first half of them every day.
ALL = [[(outer, inner) for inner in (3, 2, 4, 1)] for outer in SIZES]
SOME = [(3, 2), (1, 3), (2, 3)]
WAYS: list[tuple[Callable[[int, int], list[torch.Tensor]], int, list[tuple[int, int]]]] = [
    *((right_order, 1, sizes) for sizes in ALL),
    (inside_of_fsdp, 1, SOME),
    (one_mesh, 1, SOME),
    (one_mesh_turned, 1, SOME),
    (columns, 1, SOME),
    (hybrid, 2, SOME),
    (experts, 2, SOME),
    (experts_in_turn, 2, SOME),
    *((left_order, 1, sizes) for sizes in ALL),
    (grid, 1, SOME),
    *((several_pieces, 1, sizes) for sizes in ALL),
]


@pytest.mark.timeout(600)  # later versions of torch take a tenth of a second for each tensor
@pytest.mark.parametrize(("way", "more", "sizes"), WAYS, ids=lambda x: getattr(x, "__name__", ""))
def test_boxes_are_what_torch_cuts(
    way: Callable[[int, int], Any], more: int, sizes: list[tuple[int, int]]
) -> None:
    for outer, inner in sizes[: rounds(len(sizes), 2)]:
        world = outer * inner * more
        seen = [torch.zeros(rows, 2, dtype=torch.int64) for rows in ROWS]
        held = [0] * len(ROWS)
        for rank in range(world):
            with as_rank(rank, world):
                for rows, tensor in zip(ROWS, way(outer, inner), strict=True):
                    check(tensor, numbered(rows), seen[rows])
                    held[rows] += tensor.to_local().numel()
        for rows, count in zip(ROWS, seen, strict=True):  # each element in as many copies
            assert (count == held[rows] // max(rows * 2, 1)).all(), (outer, inner, rows)


def check(tensor: DTensor, whole: torch.Tensor, seen: torch.Tensor) -> None:
    """The parts are the rows that their boxes say, and all of the local tensor."""
    local, where = tensor.to_local(), f"{tensor.placements} on {tensor.device_mesh}"
    count = 0
    for (offsets, sizes), part in local_parts(tensor):
        index = tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))
        assert torch.equal(part, whole[index]) or not part.numel(), where
        seen[index] += 1
        count += part.numel()
    assert count == local.numel(), where


def test_an_uneven_strided_shard_is_not_what_torch_lists() -> None:
    """If torch's list is right one day, this module has less to do."""
    found = []
    for rank in range(6):
        with as_rank(rank, 6):
            tensor: Any = right_order(3, 2)[7]
            (theirs,) = tensor.__create_chunk_list__()
            ((_, sizes), _) = local_parts(tensor)[0]
            found.append((sizes, tuple(theirs.sizes)))
    assert [mine == theirs for mine, theirs in found] == [True] * 4 + [False] * 2, found


def test_a_cut_that_placements_do_not_tell_is_refused() -> None:
    """`distribute_tensor` cuts from left to right, whatever the split stands for. Some rank has
    another number of rows wherever that makes a difference."""
    for outer in SIZES:
        for inner in range(2, 5):
            for rows in ROWS:
                refused = differs = False
                for rank in range(outer * inner):
                    place = divmod(rank, inner)
                    cuts = [MeshCut(0, outer, place[0], inner), MeshCut(0, inner, place[1])]
                    theirs, ours = (act((rows,), cuts) for act in (pieces_at, pieces_on_mesh))
                    differs |= theirs != ours
                    refused |= sum(x.box[1][0] for x in theirs) != sum(x.box[1][0] for x in ours)
                assert refused == differs
    with as_rank(4, 6):
        mesh = init_device_mesh("cpu", (3, 2))
        odd = cut_by(mesh, _StridedShard(0, split_factor=2), Shard(0))[7]
        with pytest.raises(UnsupportedLeafError, match="local tensor has the shape"):
            local_parts(odd)


def test_placements_with_two_readings_are_refused() -> None:
    with as_rank(0, 4):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        fused = distribute_tensor(
            numbered(12), mesh["tp"], [_StridedShard(0, split_factor=3)], src_data_rank=None
        )
        model = Model([fused])
        fully_shard(model, mesh=mesh["dp"])
        with pytest.raises(UnsupportedLeafError, match="in which order"):
            local_parts(model.weights[0])


@pytest.mark.skipif(
    FSDP_COUNTS_STRIDED, reason="no such case: FSDP2 of this torch counts strided shards"
)
def test_fsdp_that_does_not_count_strided_shards() -> None:
    """Where its split gives other boxes than those that it cut, they are refused."""
    wrong = 0
    for rank in range(8):
        with as_rank(rank, 8):
            mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("dp", "ep", "tp"))
            for rows, tensor in zip(ROWS, by_fsdp_in_turn(mesh, 2), strict=True):
                try:
                    check(tensor, numbered(rows), torch.zeros(rows, 2, dtype=torch.int64))
                except UnsupportedLeafError:
                    wrong += 1
    assert wrong


def test_an_order_that_placements_do_not_tell() -> None:
    """Some of torch's calls keep the order of the cuts apart from the placements."""
    with as_rank(2, 6):
        mesh = init_device_mesh("cpu", (3, 2))
        wanted: Any = right_order(3, 2)[7]
        if not hasattr(wanted._spec, "use_strided_shard_as_shard_order"):
            pytest.skip("no such case: this torch has the order in the placements alone")
        order = (ShardOrderEntry(0, (1, 0)),)
        specs = [
            DTensorSpec(mesh, (Shard(0), Shard(0)), wanted._spec.tensor_meta, order),
            DTensorSpec(mesh, (Shard(0), Shard(0)), wanted._spec.tensor_meta),
        ]
        turned, plain = (
            DTensor(wanted.to_local().detach(), one, requires_grad=False) for one in specs
        )
        assert local_parts(turned)[0].box == local_parts(wanted)[0].box == ((2, 0), (2, 2))
        with pytest.raises(UnsupportedLeafError, match="the order in which"):
            placement_records(turned)
        assert [one.kind for one in placement_records(plain)] == ["shard", "shard"]
        assert [one.kind for one in placement_records(wanted)] == ["strided", "shard"]


def test_very_many_pieces_are_refused() -> None:
    with pytest.raises(UnsupportedLeafError, match="pieces"):
        pieces_at((1 << 40,), [MeshCut(0, 2, 0, 1 << 39)])
    with pytest.raises(UnsupportedLeafError, match="boxes"):
        pieces_at((1 << 12, 1 << 12), [MeshCut(d, 2, 0, 1 << 10) for d in (0, 1)])
    assert len(pieces_at((1 << 40,), [MeshCut(0, 2, 0, 1 << 10)])) == 1 << 10
    assert prod(pieces_at((1 << 40,), [MeshCut(0, 2, 1)])[0].box[1]) == 1 << 39


def test_local_tensors_of_other_shapes_are_refused() -> None:
    with as_rank(1, 2):
        mesh = init_device_mesh("cpu", (2,))
        odd = DTensor.from_local(
            torch.zeros(3), mesh, [Shard(0)], run_check=False, shape=(4,), stride=(1,)
        )
        even = DTensor.from_local(torch.zeros(2), mesh, [Shard(0)], run_check=False)
        copy = DTensor.from_local(torch.zeros(4), mesh, [Replicate()], run_check=False)
        boxes = LocalBoxes()
        assert boxes.of(even)[0].box == ((2,), (2,))
        assert boxes.of(copy)[0].box == ((0,), (4,))
        with pytest.raises(UnsupportedLeafError, match=r"\(3,\).*\(2,\)"):
            boxes.of(odd)  # of the same spec
