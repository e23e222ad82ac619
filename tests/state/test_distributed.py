"""DTensor and ShardedTensor, in a process group of one rank."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed._shard import sharded_tensor
from torch.distributed._shard.sharding_spec import ChunkShardingSpec
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from tests.support.states import bits
from tests.support.trips import trip
from torchrelay.describing.snapshot import capture
from torchrelay.errors import MismatchError, UnsupportedLeafError
from torchrelay.landing.land import land
from torchrelay.record.encoding import decode

# torch warns about quantized, sparse and complex32 tensors as such.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


@pytest.fixture(scope="module", autouse=True)
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def line(group: None) -> DeviceMesh:
    return DeviceMesh("cpu", [0], mesh_dim_names=("dp",))


@pytest.fixture(scope="module")
def square(group: None) -> DeviceMesh:
    return DeviceMesh("cpu", [[0]], mesh_dim_names=("dp", "tp"))


def _dtensor(mesh: DeviceMesh, *placements: Placement, shape: tuple[int, ...] = (4, 6)) -> DTensor:
    return DTensor.from_local(torch.randn(shape), mesh, placements, run_check=False)


LINES = [(Shard(0),), (Shard(1),), (Replicate(),), (Partial(),), (Partial("max"),)]
SQUARES = [
    (Shard(0), Shard(1)),
    (Replicate(), Shard(0)),
    (Shard(1), Partial()),
    (_StridedShard(0, split_factor=2), Shard(0)),
]


def _assert_same_dtensor(sent: Any, got: Any) -> None:
    assert type(got) is type(sent)
    assert isinstance(got, DTensor)
    assert got.placements == sent.placements
    assert got.shape == sent.shape and got.stride() == sent.stride() and got.dtype == sent.dtype
    assert got.requires_grad == sent.requires_grad
    assert torch.equal(got.device_mesh.mesh, sent.device_mesh.mesh)
    assert got.device_mesh.mesh_dim_names == sent.device_mesh.mesh_dim_names
    assert bits(got.to_local()) == bits(sent.to_local())


@pytest.mark.parametrize("placements", LINES, ids=str)
def test_dtensor_on_a_line(line: DeviceMesh, placements: tuple[Placement, ...]) -> None:
    sent = _dtensor(line, *placements)
    _assert_same_dtensor(sent, trip({"w": sent}, chunk_bytes=16).state["w"])


@pytest.mark.parametrize("placements", SQUARES, ids=str)
def test_dtensor_on_a_square(square: DeviceMesh, placements: tuple[Placement, ...]) -> None:
    sent = _dtensor(square, *placements)
    _assert_same_dtensor(sent, trip({"w": sent}).state["w"])


def test_dtensor_parameters_and_grad(line: DeviceMesh) -> None:
    state = {
        "parameter": torch.nn.Parameter(_dtensor(line, Shard(0))),
        "frozen": torch.nn.Parameter(_dtensor(line, Replicate()), requires_grad=False),
        "grad": _dtensor(line, Shard(0)).detach().requires_grad_(),
    }
    got = trip(state).state
    for key, value in state.items():
        _assert_same_dtensor(value, got[key])
        assert isinstance(got[key], torch.nn.Parameter) == isinstance(value, torch.nn.Parameter)


def test_dtensors_over_one_storage_stay_tied(line: DeviceMesh) -> None:
    sent = _dtensor(line, Shard(0))
    alias = DTensor.from_local(sent.to_local().t(), line, (Shard(1),), run_check=False)
    got = trip({"a": sent, "b": alias, "again": sent}).state
    assert got["a"] is got["again"]
    assert got["a"].to_local().data_ptr() == got["b"].to_local().data_ptr()


def test_a_dtensor_of_a_mesh_that_is_not_here(line: DeviceMesh) -> None:
    """The receiver need not be in the sender's mesh: the part arrives with its description."""
    data = capture({"w": _dtensor(line, Shard(0))}).encoded()
    changed = decode(data.replace(b"\x91\x00\x91\xa2dp", b"\x91\x05\x91\xa2dp"))
    assert changed.meshes[0].ranks == (5,)
    landing = land(changed)
    for index, size in enumerate(landing.chunks.sizes):
        landing.target().write(index, torch.zeros(size, dtype=torch.uint8))
    got: Any = landing.commit().state
    assert got["w"].device_mesh.mesh.tolist() == [5]
    assert torch.equal(got["w"]._local_tensor, torch.zeros(4, 6))


@pytest.mark.parametrize("placements", LINES, ids=str)
@pytest.mark.parametrize("atomic", [True, False])
def test_dtensor_in_place(
    line: DeviceMesh, placements: tuple[Placement, ...], atomic: bool
) -> None:
    sent = _dtensor(line, *placements)
    into = {"w": torch.nn.Parameter(_dtensor(line, *placements))}
    kept, memory = into["w"], into["w"].to_local().data_ptr()
    got = trip({"w": sent}, into=into, atomic=atomic, chunk_bytes=16).state
    assert got["w"] is kept and kept.to_local().data_ptr() == memory
    assert bits(kept.to_local()) == bits(sent.to_local())


@pytest.mark.parametrize("atomic", [True, False])
def test_what_does_not_fit_a_dtensor(line: DeviceMesh, square: DeviceMesh, atomic: bool) -> None:
    sent = _dtensor(line, Shard(0))
    for into, what in [
        (_dtensor(line, Replicate()), "placements"),
        (_dtensor(line, Shard(1)), "placements"),
        (_dtensor(line, Partial()), "placements"),
        (_dtensor(square, Shard(0), Replicate()), "mesh shape"),
        (_dtensor(line, Shard(0), shape=(6, 4)), "global shape"),
        (torch.zeros(4, 6), "kind"),
        (None, "kind"),
    ]:
        ok = torch.zeros(2)
        with pytest.raises(MismatchError, match=what) as caught:
            trip({"ok": torch.ones(2), "w": sent}, into={"ok": ok, "w": into}, atomic=atomic)
        assert caught.value.path == "['w']"
        assert ok.count_nonzero() == 0
    with pytest.raises(MismatchError, match="placements"):
        trip({"w": _dtensor(line, Partial("max"))}, into={"w": _dtensor(line, Partial("sum"))})
    with pytest.raises(MismatchError, match="kind"):
        trip({"w": torch.zeros(4, 6)}, into={"w": sent})
    meant = DTensor.from_local(torch.zeros(4, 6, dtype=torch.float64), line, (Shard(0),))
    with pytest.raises(MismatchError, match="dtype"):
        trip({"w": sent}, into={"w": meant})


def _sharded(rows: int = 4, **options: Any) -> sharded_tensor.ShardedTensor:
    spec = ChunkShardingSpec(dim=0, placements=["rank:0/cpu"])
    return sharded_tensor.rand(spec, rows, 3, **options)


def test_sharded_tensor() -> None:
    sent = _sharded(dtype=torch.float64, requires_grad=True)
    got = trip({"w": sent}, chunk_bytes=16).state["w"]
    assert isinstance(got, sharded_tensor.ShardedTensor)
    assert got.metadata() == sent.metadata()
    assert bits(got.local_tensor()) == bits(sent.local_tensor())


@pytest.mark.parametrize("atomic", [True, False])
def test_sharded_tensor_in_place(atomic: bool) -> None:
    sent, into = _sharded(), {"w": _sharded()}
    memory = into["w"].local_tensor().data_ptr()
    got = trip({"w": sent}, into=into, atomic=atomic).state["w"]
    assert got is into["w"] and got.local_tensor().data_ptr() == memory
    assert bits(got.local_tensor()) == bits(sent.local_tensor())


def test_what_does_not_fit_a_sharded_tensor(line: DeviceMesh) -> None:
    for into, what in [
        (_sharded(6), "global shape"),
        (_sharded(dtype=torch.float16), "dtype"),
        (torch.zeros(4, 3), "kind"),
        (_dtensor(line, Shard(0), shape=(4, 3)), "kind"),
    ]:
        with pytest.raises(MismatchError, match=what) as caught:
            trip({"w": _sharded()}, into={"w": into})
        assert caught.value.path == "['w']"
    with pytest.raises(MismatchError, match="kind"):
        trip({"w": torch.zeros(4, 3)}, into={"w": _sharded()})


def test_a_placement_nobody_knows_is_refused(line: DeviceMesh) -> None:
    class Odd(Shard):
        pass

    local = torch.zeros(2, 2)
    odd = DTensor.from_local(local, line, (Shard(0),), run_check=False)
    odd._spec.placements = (Odd(0),)
    with pytest.raises(UnsupportedLeafError) as caught:
        capture({"model": [odd]})
    assert caught.value.path == "['model'][0]"
