"""Stock torch and this library read one another's messages; a refusal changes nothing."""

from __future__ import annotations

import collections
import pickle
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup, Work
from torch.distributed._shard import sharded_tensor
from torch.distributed.checkpoint._pg_transport import PGTransport
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils._pytree import tree_flatten_with_path

from tests.support.ranks import RankPool
from torchrelay.dropin._torch_wire import LENGTH_TAG, recv_torch, send_torch
from torchrelay.errors import (
    MismatchError,
    RemoteProtocolError,
    ResourceError,
    UnsupportedLeafError,
)
from torchrelay.memory import free

CPU = torch.device("cpu")


def wait(work: Work, what: str) -> None:
    assert what
    work.wait(timedelta(seconds=20))


def recv(group: ProcessGroup, into: object = None) -> Any:
    length = torch.zeros(1, dtype=torch.int64)
    wait(group.recv([length], 0, LENGTH_TAG), "length")
    places = None if into is None else dict(tree_flatten_with_path(into)[0])
    return recv_torch(group, 0, int(length), CPU, wait, places)


def stock(group: ProcessGroup, into: object = None) -> PGTransport:
    state_dict: Callable[[], object] | None = None if into is None else lambda: into
    return PGTransport(group, timedelta(seconds=20), CPU, state_dict)


def state() -> dict[str, Any]:
    torch.manual_seed(0)
    base = torch.arange(1000.0)
    return {
        "plain": torch.randn(3, 4),
        "long": torch.arange(5),
        "bool": torch.tensor([True, False]),
        "half": torch.randn(7).to(torch.bfloat16),
        "float8": torch.randn(7).to(torch.float8_e4m3fn),
        "complex": torch.randn(3, dtype=torch.complex64),
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 3),
        "transposed": torch.randn(3, 4).t(),
        "view": base[10:20],
        "holes": base.reshape(10, 100)[:, 3],
        "expanded": torch.tensor([3.0]).expand(4, 2),
        "images": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "nested": collections.OrderedDict(step=4, lr=[0.1, (None, "x")], raw=b"abc"),
        "many": [torch.full((2,), float(i)) for i in range(40)],
    }


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().resolve_conj().contiguous().flatten().view(torch.uint8)


def assert_same(got: Any, want: Any) -> None:
    (ours, our_spec), (theirs, their_spec) = map(tree_flatten_with_path, (got, want))
    assert our_spec == their_spec
    for (path, a), (_, b) in zip(ours, theirs, strict=True):
        if isinstance(b, torch.Tensor):
            assert (a.dtype, a.shape) == (b.dtype, b.shape), path
            assert bits(a).equal(bits(b)), path
        else:
            assert type(a) is type(b), path
            assert a == b, path


def emptied(what: dict[str, Any]) -> dict[str, Any]:
    """The same shapes, all zero, each in a dense storage of its own where torch needs that."""

    def zero(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return torch.zeros(value.shape, dtype=value.dtype)
        if isinstance(value, list):
            return [zero(item) for item in value]
        return value

    return {key: zero(value) for key, value in what.items()}


# We send to a stock receiver --------------------------------------------------------------------


def ours_to_stock(rank: int, group: ProcessGroup) -> None:
    sent = state()
    sent["parameter"] = nn.Parameter(torch.randn(3))
    sent["conj"] = torch.randn(3, dtype=torch.complex64).conj()
    if rank == 0:
        send_torch(group, [1], sent, CPU, wait)
    else:
        assert_same(stock(group).recv_checkpoint(0), sent)


def test_a_stock_receiver_reads_what_we_send(pool2: RankPool) -> None:
    pool2.run(ours_to_stock, fresh_group=True)


def ours_to_stock_in_place(rank: int, group: ProcessGroup) -> None:
    sent = {"a": torch.randn(4), "b": [torch.randn(2, 2)]} if rank == 0 else None
    boxed = [sent]
    dist.broadcast_object_list(boxed, 0)
    if rank == 0:
        send_torch(group, [1], sent, CPU, wait)
    else:
        into = {"a": torch.zeros(4), "b": [torch.zeros(2, 2)]}
        stock(group, into).recv_checkpoint(0)
        assert_same(into, boxed[0])


def test_a_stock_receiver_takes_it_in_place(pool2: RankPool) -> None:
    pool2.run(ours_to_stock_in_place, fresh_group=True)


def ours_to_many(rank: int, group: ProcessGroup) -> None:
    if rank == 0:
        send_torch(group, [1, 2, 3], state(), CPU, wait)
    elif rank == 1:
        assert_same(recv(group), state())
    else:
        assert_same(stock(group).recv_checkpoint(0), state())


def test_several_receivers_of_both_kinds(pool4: RankPool) -> None:
    pool4.run(ours_to_many, fresh_group=True)


def refuses_before_a_byte(rank: int, group: ProcessGroup) -> None:
    if rank == 0:
        for bad in (torch.ones(2, device="meta"), lambda: None):
            with pytest.raises(UnsupportedLeafError) as caught:
                send_torch(group, [1], {"ok": torch.ones(1), "bad": bad}, CPU, wait)
            assert caught.value.path == "['bad']"
        send_torch(group, [1], {"fine": torch.ones(2)}, CPU, wait)
    else:
        assert_same(recv(group), {"fine": torch.ones(2)})


def test_a_refused_leaf_leaves_no_message_behind(pool2: RankPool) -> None:
    pool2.run(refuses_before_a_byte, fresh_group=True)


# A stock sender, and we receive ------------------------------------------------------------------


def stock_to_ours(rank: int, group: ProcessGroup) -> None:
    if rank == 0:
        stock(group).send_checkpoint([1], state())
        return
    got = recv(group)
    assert_same(got, state())
    for key in ("view", "holes", "expanded", "transposed", "images"):
        tensor = got[key]
        dense = tensor.numel() * tensor.element_size()
        assert tensor.untyped_storage().nbytes() <= dense, key
    assert got["images"].is_contiguous(memory_format=torch.channels_last)
    assert got["expanded"].stride() == (0, 0)


def test_we_read_what_a_stock_sender_sends(pool2: RankPool) -> None:
    pool2.run(stock_to_ours, fresh_group=True)


def stock_odd_storage(rank: int, group: ProcessGroup) -> None:
    odd = torch.empty(0, dtype=torch.int32).set_(torch.UntypedStorage(10), 1, (1,), (1,))
    odd.fill_(77)
    if rank == 0:
        stock(group).send_checkpoint([1], {"odd": odd})
        send_torch(group, [1], {"odd": odd}, CPU, wait)
    else:
        for _ in range(2):
            assert recv(group)["odd"].tolist() == [77]


def test_storage_that_is_no_whole_number_of_items(pool2: RankPool) -> None:
    pool2.run(stock_odd_storage, fresh_group=True)


def stock_to_ours_in_place(rank: int, group: ProcessGroup) -> None:
    if rank == 0:
        stock(group).send_checkpoint([1], state())
        return
    into = emptied(state())
    around = torch.zeros(30)
    into["view"] = around[10:20]
    into["images"] = torch.zeros(2, 3, 4, 5)
    into["plain"] = nn.Parameter(torch.zeros(4, 3).t())
    into["complex"] = torch.zeros(3, dtype=torch.complex64).conj()
    into.pop("long")
    into["nested"] = None
    places = [leaf for _, leaf in tree_flatten_with_path(into)[0]]
    got = recv(group, into)
    assert_same(got, state())
    for place in places:
        if isinstance(place, torch.Tensor):
            assert any(leaf is place for _, leaf in tree_flatten_with_path(got)[0])
    assert around[:10].eq(0).all()
    assert around[20:].eq(0).all()
    assert around[10:20].tolist() == list(range(10, 20))


def test_in_place_writes_the_destinations_and_nothing_beside_them(pool2: RankPool) -> None:
    pool2.run(stock_to_ours_in_place, fresh_group=True)


def stock_to_ours_with_ties(rank: int, group: ProcessGroup) -> None:
    def tied(values: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"embedding": values, "head": values, "part": values[2:4]}

    if rank == 0:
        stock(group).send_checkpoint([1], tied(torch.arange(6.0)))
    else:
        into = tied(torch.zeros(6))
        recv(group, into)
        assert_same(into, tied(torch.arange(6.0)))


def test_tied_and_overlapping_tensors_are_filled(pool2: RankPool) -> None:
    """A stock sender sends each of them, and does not say that they share memory."""
    pool2.run(stock_to_ours_with_ties, fresh_group=True)


SENT = {"first": torch.ones(4), "second": torch.ones(2, 3), "last": torch.ones(2)}


def _inference() -> torch.Tensor:
    with torch.inference_mode():
        return torch.zeros(2, 3)


MISFITS: dict[str, Callable[[], object]] = {
    "dtype of the same width": lambda: torch.zeros(2, 3, dtype=torch.int32),
    "shape of the same size": lambda: torch.zeros(3, 2),
    "size": lambda: torch.zeros(2, 4),
    "expanded": lambda: torch.zeros(1, 3).expand(2, 3),
    "meta": lambda: torch.zeros(2, 3, device="meta"),
    "sparse": lambda: torch.zeros(2, 3).to_sparse(),
    "inference": _inference,
}


def stock_to_misfit(rank: int, group: ProcessGroup, what: str) -> None:
    if rank == 0:
        stock(group).send_checkpoint([1], SENT)
        stock(group).send_checkpoint([1], SENT)
        return
    into = {"first": torch.zeros(4), "second": MISFITS[what](), "last": torch.zeros(2)}
    with pytest.raises(MismatchError) as caught:
        recv(group, into)
    assert caught.value.path == "['second']"
    assert into["first"].eq(0).all()
    assert into["last"].eq(0).all()
    assert_same(recv(group), SENT)


@pytest.mark.parametrize("what", MISFITS)
def test_a_misfit_writes_nothing_and_the_next_transfer_is_right(pool2: RankPool, what: str) -> None:
    pool2.run(stock_to_misfit, what, fresh_group=True)


def value_for_tensor(rank: int, group: ProcessGroup) -> None:
    if rank == 0:
        stock(group).send_checkpoint([1], {"a": torch.ones(2), "step": 3})
    else:
        into = {"a": torch.zeros(2), "step": torch.zeros(())}
        with pytest.raises(MismatchError, match="int was sent"):
            recv(group, into)
        assert into["a"].eq(0).all()


def test_a_value_sent_for_a_tensor_is_a_misfit(pool2: RankPool) -> None:
    pool2.run(value_for_tensor, fresh_group=True)


def quantized_from_stock(rank: int, group: ProcessGroup) -> None:
    if rank == 0:
        bad = torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)
        stock(group).send_checkpoint([1], {"q": bad, "w": torch.ones(2)})
        stock(group).send_checkpoint([1], SENT)
    else:
        with pytest.raises(UnsupportedLeafError, match="scale"):
            recv(group)
        assert_same(recv(group), SENT)


@pytest.mark.filterwarnings("ignore")
def test_a_quantized_tensor_is_refused_and_not_taken_for_integers(pool2: RankPool) -> None:
    pool2.run(quantized_from_stock, fresh_group=True)


class Payload:
    def __reduce__(self) -> Any:
        return print, ("executed",)


def hostile_record(rank: int, group: ProcessGroup) -> None:
    data = pickle.dumps(Payload())
    if rank == 0:
        for length in (len(data), -1, 1 << 40):
            wait(group.send([torch.tensor([length])], 1, LENGTH_TAG), "length")
            if length == len(data):
                body = torch.frombuffer(bytearray(data), dtype=torch.uint8)
                wait(group.send([body], 1, 2), "record")
    else:
        for reason in ("closed list", "-1 bytes", "1099511627776 bytes"):
            with pytest.raises(RemoteProtocolError, match=reason):
                recv(group)


def test_a_hostile_sender_is_refused(pool2: RankPool) -> None:
    pool2.run(hostile_record, fresh_group=True)


class Late(Exception):
    pass


def deadline(rank: int, group: ProcessGroup) -> None:
    if rank == 0:
        stock(group).send_checkpoint([1], SENT)
        return
    calls = 0

    def impatient(work: Work, what: str) -> None:
        nonlocal calls
        calls += 1
        wait(work, what)
        if calls == 3:
            raise Late(what)

    into = {key: torch.zeros_like(value) for key, value in SENT.items()}
    length = torch.zeros(1, dtype=torch.int64)
    wait(group.recv([length], 0, LENGTH_TAG), "length")
    with pytest.raises(Late, match="receiving torch tensor 2 of 3 from 0"):
        recv_torch(group, 0, int(length), CPU, impatient, dict(tree_flatten_with_path(into)[0]))
    assert all(value.eq(0).all() for value in into.values())


def test_a_wait_that_gives_up_leaves_the_destinations_as_they_were(pool2: RankPool) -> None:
    pool2.run(deadline, fresh_group=True)


# Distributed tensors ------------------------------------------------------------------------------


def dtensors(rank: int, group: ProcessGroup, sender_is_stock: bool) -> None:
    mesh = init_device_mesh("cpu", (2,))
    whole = torch.arange(8.0).reshape(4, 2)

    def make(fill: torch.Tensor, placement: Any) -> DTensor:
        local = fill.chunk(2)[rank] if isinstance(placement, Shard) else fill
        return DTensor.from_local(local.clone(), mesh, [placement], run_check=False)

    sent = {"r": make(whole, Replicate()), "s": make(whole, Shard(0))}

    def send(what: object) -> None:
        if sender_is_stock:
            stock(group).send_checkpoint([1], what)
        else:
            send_torch(group, [1], what, CPU, wait)

    if rank == 0:
        send(sent)
        send(sent)
        send({"r": sent["r"]})
        send({"r": whole})
        return
    got = recv(group)
    assert got["r"].placements == (Replicate(),)
    assert got["r"].shape == got["s"].shape == (4, 2)
    assert torch.equal(got["s"].to_local(), whole[:2])
    into = {key: make(torch.zeros(4, 2), p) for key, p in (("r", Replicate()), ("s", Shard(0)))}
    with pytest.raises(MismatchError, match="share") as caught:
        recv(group, into)
    assert caught.value.path == "['s']"
    assert into["r"].to_local().eq(0).all()
    assert recv(group, into)["r"] is into["r"]
    assert torch.equal(into["r"].to_local(), whole)
    with pytest.raises(MismatchError, match="DTensor"):
        recv(group, into)


@pytest.mark.parametrize("sender_is_stock", [True, False])
def test_dtensors(pool2: RankPool, sender_is_stock: bool) -> None:
    pool2.run(dtensors, sender_is_stock, fresh_group=True)


def sharded_into_replicated(rank: int, group: ProcessGroup) -> None:
    mesh = init_device_mesh("cpu", (2,))
    sharded = DTensor.from_local(torch.ones(2, 2), mesh, [Shard(0)], run_check=False)
    replicated = DTensor.from_local(torch.zeros(2, 2), mesh, [Replicate()], run_check=False)
    wide = DTensor.from_local(torch.zeros(4, 2), mesh, [Replicate()], run_check=False)
    if rank == 0:
        for _ in range(2):
            stock(group).send_checkpoint([1], {"w": sharded})
        return
    for into, why in ((replicated, "whole shape"), (wide, "placements")):
        with pytest.raises(MismatchError, match=why):
            recv(group, {"w": into})
        assert into.to_local().eq(0).all()


def test_a_sharded_source_does_not_fill_a_replicated_destination(pool2: RankPool) -> None:
    pool2.run(sharded_into_replicated, fresh_group=True)


def _sharded(rank: int) -> Any:
    """Two rows of a ShardedTensor on each of two ranks."""
    boxes = [
        sharded_tensor.ShardMetadata([2 * owner, 0], [2, 3], f"rank:{owner}/cpu")
        for owner in range(2)
    ]
    local = [sharded_tensor.Shard(torch.full((2, 3), float(5 + rank)), boxes[rank])]
    return sharded_tensor.init_from_local_shards(local, 4, 3)


def sharded(rank: int, group: ProcessGroup) -> None:
    ours = _sharded(rank)
    if rank == 0:
        stock(group).send_checkpoint([1], {"a": torch.ones(2), "w": ours})
        with pytest.raises(UnsupportedLeafError, match="DTensor") as caught:
            send_torch(group, [1], {"a": torch.ones(2), "w": ours}, CPU, wait)
        assert caught.value.path == "['w']"
        stock(group).send_checkpoint([1], {"w": torch.zeros(2, 3)})
        stock(group).send_checkpoint([1], SENT)
        return
    into = {"a": torch.zeros(2), "w": ours}
    with pytest.raises(UnsupportedLeafError, match="DTensor") as caught:
        recv(group, into)
    assert caught.value.path == "['w']"
    with pytest.raises(MismatchError, match="ShardedTensor"):
        recv(group, into)
    assert into["a"].eq(0).all() and ours.local_shards()[0].tensor.eq(6).all()
    assert_same(recv(group), SENT)


@pytest.mark.filterwarnings("ignore")
def test_sharded_tensors_are_refused_by_path_and_the_next_transfer_is_right(
    pool2: RankPool,
) -> None:
    pool2.run(sharded, fresh_group=True)


def more_than_free(rank: int, group: ProcessGroup) -> str:
    sent = {"a": torch.ones(1 << 19), "b": torch.ones(1 << 19)}  # 2 MiB each
    if rank == 0:
        stock(group).send_checkpoint([1], sent)
        return ""
    with patch.multiple(free, CHECKED_BYTES=1 << 20, free_bytes=lambda: 3 << 20):
        with pytest.raises(ResourceError) as caught:
            recv(group)
    return str(caught.value)


def test_a_state_that_does_not_fit_is_refused_with_figures(pool2: RankPool) -> None:
    """The sender, which knows nothing of it, finishes."""
    found = pool2.run(more_than_free, fresh_group=True)[1]
    assert "4194304 bytes of memory are needed, and 3145728 are free" in found


def mesh_for_another_process(rank: int, group: ProcessGroup) -> bool:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    ours = DTensor.from_local(torch.ones(2), mesh, [Replicate()], run_check=False)
    hash(ours._spec)  # torch remembers it, and that of the mesh
    if rank == 0:
        send_torch(group, [1], {"w": ours}, CPU, wait)
        return True
    got: Any = stock(group).recv_checkpoint(0)
    spec = got["w"]._spec
    same = spec.mesh == mesh and hash(spec.mesh) == hash(mesh) and hash(spec) == hash(ours._spec)
    # Torch 2.15 compares meshes by this field, which those of earlier releases lack.
    return same and spec.mesh._preserve_rank_order is False


def test_a_mesh_is_of_use_to_a_stock_receiver(pool2: RankPool) -> None:
    """Hashes differ between processes, and the fields of a mesh between releases of torch."""
    assert pool2.run(mesh_for_another_process, fresh_group=True) == [True, True]
