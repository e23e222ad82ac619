"""A distributed tensor received with no place to go to: whose part is it?"""

from __future__ import annotations

from datetime import timedelta
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.checkpoint._pg_transport import PGTransport as Stock
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
)

import torchrelay as tr
from tests.support import meshes
from tests.support.ranks import RankPool
from tests.support.torchft_files import find_torchft
from torchrelay.dropin import PGTransport

CPU = torch.device("cpu")
SECONDS = 120  # the first call imports what torch needs for meshes


@cache
def square() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))


def values() -> torch.Tensor:
    return torch.arange(24.0).reshape(6, 4)


def spread(mesh: DeviceMesh, *placements: Placement) -> DTensor:
    return distribute_tensor(values(), mesh, placements, src_data_rank=None)


def refusal(relay: tr.Relay, source: int, **how: Any) -> tr.errors.MismatchError:
    with pytest.raises(tr.errors.MismatchError) as caught:
        relay.recv(source, **how)
    for word in ("into=", 'shards="as_sent"'):
        assert word in str(caught.value)
    return caught.value


def load_by_the_tutorial(rank: int, group: Any) -> None:
    """`model.load_state_dict(got.state["model"])` on a rank of the same mesh."""
    torch.manual_seed(rank)

    def cut(_: str, module: nn.Module, mesh: DeviceMesh) -> None:
        weight = distribute_tensor(module.weight.detach(), mesh, [Shard(0)], src_data_rank=None)
        module.weight = nn.Parameter(weight)  # type: ignore[arg-type]

    mesh = init_device_mesh("cpu", (2,))
    model = distribute_module(nn.Linear(4, 6, bias=False), mesh, cut)
    before = model.weight.to_local().clone()  # type: ignore[operator]
    state = {"model": model.state_dict(), "epoch": 3}
    with tr.Relay(group, timeout=30) as relay:
        if rank == 0:
            with pytest.raises(tr.errors.PeerRefusedError):
                relay.send(state, to=1)
            relay.send(state, to=1)
        else:
            fault = refusal(relay, 0)
            assert fault.path == "['model']['weight']" and "(0,)" in str(fault)
            got = relay.recv(0, shards="as_sent").state["model"]["weight"]
            assert not torch.equal(got.to_local(), before)
    assert torch.equal(model.weight.to_local(), before)  # type: ignore[operator]


def test_the_shard_of_another_rank_of_the_mesh_is_refused_by_path(pool2: RankPool) -> None:
    pool2.run(load_by_the_tutorial, timeout=SECONDS)


def on_a_square(rank: int, group: Any) -> None:
    mesh = square()
    state = {"w": spread(mesh, Replicate(), Shard(0))}
    with tr.Relay(group, timeout=30) as relay:
        if rank == 0:
            with pytest.raises(tr.errors.PeerRefusedError) as caught:
                relay.send(state, to=[1, 2, 3])
            report: Any = caught.value.report
            assert report.receivers == (2,) and sorted(report.failed) == [1, 3]
        elif rank == 2:
            got = relay.recv(0).state["w"]
            assert torch.equal(got.to_local(), state["w"].to_local())
            state["w"].copy_(got)
        else:
            refusal(relay, 0)


def test_a_shard_that_two_ranks_of_a_mesh_have_is_the_own_of_both(pool4: RankPool) -> None:
    pool4.run(on_a_square, timeout=SECONDS)


def outside(rank: int, group: Any) -> None:
    inner = square()["inner"]  # ranks 0 and 1, ranks 2 and 3
    sharded = {"a": [spread(inner, Shard(0))], "n": 1}
    copies = {"a": [spread(inner, Replicate())], "n": 1}
    with tr.Relay(group, timeout=30) as relay:
        if rank < 2:
            with pytest.raises(tr.errors.PeerRefusedError):
                relay.send(sharded, to=rank + 2)
            relay.send(sharded, to=rank + 2)
            relay.send(copies, to=rank + 2)
            return
        fault = refusal(relay, rank - 2)
        assert fault.path == "['a'][0]" and "not in its mesh" in str(fault)
        got = relay.recv(rank - 2, shards="replica").state["a"][0]
        assert torch.equal(got.to_local(), sharded["a"][0].to_local())
        whole = relay.recv(rank - 2).state["a"][0]
        assert torch.equal(whole.to_local(), values())


def test_a_rank_outside_the_mesh_is_refused_a_shard_and_given_a_copy(pool4: RankPool) -> None:
    pool4.run(outside, timeout=SECONDS)


def sharded_tensors(rank: int, group: Any) -> None:
    state = {"t": meshes.sharded(values(), backwards=False)}
    with tr.Relay(group, timeout=30) as relay:
        if rank == 0:
            with pytest.raises(tr.errors.PeerRefusedError):
                relay.send(state, to=1)
            relay.send(state, to=1)
        else:
            assert refusal(relay, 0).path == "['t']"
            got = relay.recv(0, shards="as_sent").state["t"]
            assert isinstance(got, ShardedTensor)


def test_the_shards_of_another_ranks_sharded_tensor_are_refused(pool2: RankPool) -> None:
    pool2.run(sharded_tensors, timeout=SECONDS)


def a_bad_word(rank: int, group: Any) -> None:
    with tr.Relay(group, timeout=30) as relay:
        if rank == 0:
            relay.send({"n": 1}, to=1)
        else:
            with pytest.raises(tr.errors.UsageError, match="as_sent"):
                relay.recv(0, shards="mine")  # type: ignore[arg-type]
            assert relay.recv(0).state == {"n": 1}


def test_an_unknown_word_for_shards_is_refused_before_anything_is_taken(pool2: RankPool) -> None:
    pool2.run(a_bad_word, timeout=SECONDS)


# The drop-in, where a replica sends to its counterpart.


def between_replicas(rank: int, group: Any, protocol: str) -> None:
    """Rank i of a replica sends to rank i of another: the same as with torch's own class."""
    inner = square()["inner"]
    state = {"w": spread(inner, Shard(0)), "p": spread(inner, Partial()), "lr": 0.5}
    wait = timedelta(seconds=30)
    transport = PGTransport(group, wait, CPU, protocol=protocol if rank < 2 else "relay")
    # A sender whose relay is not known yet is taken for torch's class, whose message is then
    # received here, before the stock receiver asks for it.
    dist.barrier(group)
    if rank < 2:
        transport.send_checkpoint([rank + 2], state)
        Stock(group, wait, CPU).send_checkpoint([rank + 2], state)
        return
    got: Any = transport.recv_checkpoint(rank - 2)
    stock: Any = Stock(group, wait, CPU).recv_checkpoint(rank - 2)
    assert got["lr"] == stock["lr"] == 0.5
    for name in ("w", "p"):
        ours, theirs = got[name], stock[name]
        assert torch.equal(ours.to_local(), theirs.to_local())
        assert torch.equal(ours.to_local(), state[name].to_local())
        assert ours.placements == theirs.placements and ours.shape == theirs.shape


@pytest.mark.parametrize("protocol", ["relay", "torch"])
def test_the_drop_in_takes_a_counterparts_shard_as_torch_does(
    pool4: RankPool, protocol: str
) -> None:
    # A rank that has a relay on its group is expected to send by it.
    pool4.run(between_replicas, protocol, timeout=SECONDS, fresh_group=True)


def in_one_mesh(rank: int, group: Any) -> None:
    state = {"w": spread(init_device_mesh("cpu", (2,)), Shard(0))}
    transport = PGTransport(group, timedelta(seconds=30), CPU)
    if rank == 0:
        with pytest.raises(tr.errors.PeerRefusedError):
            transport.send_checkpoint([1], state)
    else:
        with pytest.raises(tr.errors.MismatchError, match="sender's shard"):
            transport.recv_checkpoint(0)


def test_the_drop_in_refuses_the_shard_of_another_rank_of_the_mesh(pool2: RankPool) -> None:
    pool2.run(in_one_mesh, timeout=SECONDS)


def into_its_own(rank: int, group: Any) -> None:
    """With a `state_dict` callback the parameters here are written, on their own mesh."""
    inner = square()["inner"]
    mine = {"w": spread(inner, Shard(0)), "step": torch.tensor(float(dist.get_rank()))}
    mine["w"].mul_(1 + rank)
    transport = PGTransport(group, timedelta(seconds=30), CPU, state_dict=lambda: mine)
    if rank < 2:
        transport.send_checkpoint([rank + 2], mine)
        return
    transport.recv_checkpoint(rank - 2)
    assert mine["w"].device_mesh == inner and mine["step"] == rank - 2
    assert torch.equal(mine["w"].full_tensor()[rank % 2 * 3], values()[rank % 2 * 3] * (rank - 1))


def test_the_drop_in_fills_the_shard_of_a_counterpart(pool4: RankPool) -> None:
    pool4.run(into_its_own, timeout=SECONDS)


def by_torchft(rank: int, group: Any) -> bool:
    if not find_torchft():
        return False
    from torchrelay.integrations.torchft import RelayTransport

    wait = timedelta(seconds=30)
    inner = square()["inner"]
    state = {"w": spread(inner, Shard(0)), "lr": 0.5}
    transport: Any = RelayTransport(group, wait)
    metadata: list[Any] = [None] * 4  # torchft's manager carries it
    dist.all_gather_object(metadata, transport.metadata(), group=group)
    if rank < 2:
        transport.send_checkpoint([rank + 2], 7, state, wait)
    else:
        got = transport.recv_checkpoint(rank - 2, metadata[rank - 2], 7, wait)
        assert torch.equal(got["w"].to_local(), state["w"].to_local())
    transport.shutdown()
    return True


def test_torchft_recovers_the_shard_of_a_counterpart(pool4: RankPool) -> None:
    if not all(pool4.run(by_torchft, timeout=SECONDS)):
        pytest.skip("torchft is not installed, and its wheel could not be fetched")
