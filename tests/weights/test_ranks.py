"""Four trainer ranks that publish, and workers of another mesh that follow them."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

import torchrelay as tr

TIMEOUT = 60
_kept: dict[str, Any] = {}  # in a rank: what stays between two calls

SHAPES: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
    "wide": ((64, 48), torch.bfloat16),
    "uneven": ((37, 23), torch.float32),
    "deep": ((6, 10, 14), torch.float64),
    "line": ((65,), torch.int64),
    "few": ((3, 5), torch.complex64),
}
# How the ranks of a worker cut each tensor: along rows, along columns, or not at all.
CUTS = {"wide": 1, "uneven": 0, "deep": 2, "line": 0, "few": None}


def whole(name: str, version: int) -> torch.Tensor:
    shape, dtype = SHAPES[name]
    draw = torch.Generator().manual_seed(100 * version + list(SHAPES).index(name))
    if dtype == torch.int64:
        return torch.randint(-999, 999, shape, generator=draw)
    return torch.randn(shape, generator=draw, dtype=torch.float32).to(dtype)


def trained(version: int, dims: int) -> dict[str, Any]:
    """What a trainer has: shards of rows, on a mesh of one or two dimensions."""
    if dims == 1:
        mesh, places = init_device_mesh("cpu", (4,)), [Shard(0)]
    else:
        mesh, places = init_device_mesh("cpu", (2, 2)), [Replicate(), Shard(0)]
    state: dict[str, Any] = {
        name: distribute_tensor(whole(name, version), mesh, places) for name in SHAPES
    }
    state["plain"] = torch.full((5,), float(version))
    return state | {"tied": state["plain"], "version": version, "name": f"v{version}"}


def blank(version: int = -1) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    state: dict[str, Any] = {}
    for name, cut in CUTS.items():
        places: list[Placement] = [Replicate() if cut is None else Shard(cut)]
        state[name] = distribute_tensor(whole(name, version), mesh, places)
    plain = torch.full((5,), float(version))
    return state | {"plain": plain, "tied": plain, "version": version, "name": f"v{version}"}


def version_of(state: dict[str, Any]) -> int:
    """The version that this rank's part of a state is of; -99 for a mixture."""
    version = state["version"]
    wanted = blank(version)
    for name, value in wanted.items():
        found = state[name]
        if isinstance(value, DTensor):
            found, value = found.to_local(), value.to_local()
        same = torch.equal(found, value) if isinstance(value, torch.Tensor) else found == value
        if not same:
            return -99
    return int(version)


def serve(rank: int, group: Any, dims: int, version: int) -> str:
    _kept["endpoint"] = tr.serve(trained(version, dims), step=version, timeout=TIMEOUT)
    _kept["dims"] = dims
    return str(_kept["endpoint"].url)


def publish(rank: int, group: Any, version: int) -> None:
    _kept["endpoint"].publish(trained(version, _kept["dims"]), step=version).result(TIMEOUT)


def end_serving(rank: int, group: Any) -> None:
    _kept.pop("endpoint").close()


def subscribe(rank: int, group: Any, urls: list[str], same_host: bool) -> None:
    _kept["into"] = blank()
    _kept["subscription"] = tr.subscribe(
        urls, into=_kept["into"], same_host=same_host, timeout=TIMEOUT
    )


def update(rank: int, group: Any, at_least: int) -> tuple[int | None, int, dict[Any, int]]:
    """The step, the version of `into`, and how many bytes came from each server."""
    got = _kept["subscription"].update(at_least=at_least)
    return got.step, version_of(_kept["into"]), got.report.sources


def needed(rank: int, group: Any) -> int:
    """Bytes of this rank's own tensors, each once."""
    tensors = {id(x): x for x in _kept["into"].values() if isinstance(x, torch.Tensor)}
    local = [x.to_local() if isinstance(x, DTensor) else x for x in tensors.values()]
    return sum(x.numel() * x.element_size() for x in local)


@pytest.fixture
def trainer(pool4: Any) -> Iterator[Callable[..., str]]:
    begun = []

    def begin(dims: int, version: int) -> str:
        found: list[str] = pool4.run(serve, dims, version)
        begun.append(found)
        return found[0]

    yield begin
    if begun:
        pool4.run(end_serving)


@pytest.mark.parametrize("same_host", [False, True])
@pytest.mark.parametrize("dims", [1, 2])
def test_two_ranks_of_another_mesh_follow_four(
    trainer: Callable[..., str], pool4: Any, pool2: Any, dims: int, same_host: bool
) -> None:
    url = trainer(dims, 1)
    pool2.run(subscribe, [url], same_host)
    for version in (1, 2, 4):
        if version > 1:
            pool4.run(publish, version)
        found = pool2.run(update, version)
        assert [(step, has) for step, has, _ in found] == [(version, version)] * 2
    assert [sources for *_, sources in pool2.run(update, 4)] == [{}, {}]  # nothing newer
    if not same_host:
        pool4.run(publish, 5)
        for (_, _, sources), most in zip(pool2.run(update, 5), pool2.run(needed), strict=True):
            # The packed bytes, and a few more for each chunk and server.
            assert sum(sources.values()) <= most + 1000


def refused(rank: int, group: Any, urls: list[str]) -> tuple[str, bool]:
    """One rank's destination does not fit: every rank raises before a byte moves."""
    into = blank()
    if rank == 1:
        into["more"] = torch.zeros(3)
    try:
        tr.subscribe(urls, into=into, timeout=TIMEOUT)
    except tr.errors.MismatchError as fault:
        return str(fault), version_of({k: x for k, x in into.items() if k != "more"}) == -1
    return "", False


def test_a_rank_that_does_not_fit_keeps_all_from_it(
    trainer: Callable[..., str], pool2: Any
) -> None:
    for why, untouched in pool2.run(refused, [trainer(1, 1)]):
        assert "more" in why and untouched


def share(rank: int, group: Any, version: int) -> None:
    """Ranks 0 and 1 share the same state."""
    relay = _kept.setdefault("relay", tr.Relay(timeout=TIMEOUT))
    if rank < 2 and "shared" not in _kept:
        _kept["shared"] = relay.share({"w": torch.full((5,), float(version))}, step=version)
    elif rank < 2:
        shared = {"w": torch.full((5,), float(version))}
        _kept["shared"].publish(shared, step=version).result(TIMEOUT)
    dist.barrier()


def follow_peers(rank: int, group: Any, sources: list[int], same_host: bool) -> Any:
    """Rank 2 follows ranks of its own group; the others have nothing to do with it."""
    if rank != 2:
        return None
    peers = [_kept["relay"].peer(one) for one in sources]
    into = {"w": torch.zeros(5)}
    subscription = tr.subscribe(
        peers if len(peers) > 1 else peers[0],
        into=into,
        no_dist=True,
        same_host=same_host,
        timeout=TIMEOUT,
    )
    got = subscription.update()
    return got.step, into["w"].tolist(), got.report.route, len(got.report.failed)


def end_sharing(rank: int, group: Any, only: int) -> None:
    dist.barrier()
    if rank == only:
        _kept.pop("shared").close()
    dist.barrier()


def test_a_rank_follows_ranks_of_its_group(pool4: Any) -> None:
    for version, same_host in ((1, False), (2, True)):
        pool4.run(share, version)
        for sources in ([0], [0, 1], [1]):
            found = pool4.run(follow_peers, sources, same_host)[2]
            assert found[:2] == (version, [float(version)] * 5)
            assert found[2:] == ("mapped" if same_host else "parts", 0)
    pool4.run(end_sharing, 0)
    assert pool4.run(follow_peers, [0, 1], False)[2][0] == 2  # the other one has it
    pool4.run(end_sharing, 1)


def serve_large(rank: int, group: Any) -> str:
    mesh = init_device_mesh("cpu", (4,))
    _kept["large"] = distribute_tensor(torch.arange(1 << 21).reshape(2048, 1024), mesh, [Shard(0)])
    _kept["endpoint"] = tr.serve({"w": _kept["large"]}, step=1, timeout=TIMEOUT)
    return str(_kept["endpoint"].url)


def count_what_enters(rank: int, group: Any, url: str) -> tuple[int, int, bool]:
    """Bytes that any socket of this process received in an update, those of its shard, and whether
    that is right."""
    mesh = init_device_mesh("cpu", (2,))
    wanted = distribute_tensor(torch.arange(1 << 21).reshape(2048, 1024), mesh, [Shard(1)])
    into = {"w": distribute_tensor(torch.zeros(2048, 1024, dtype=torch.int64), mesh, [Shard(1)])}
    entered = 0

    class Counting(socket.socket):
        def recv(self, *args: Any) -> bytes:
            nonlocal entered
            data = super().recv(*args)
            entered += len(data)
            return data

        def recv_into(self, *args: Any) -> int:
            nonlocal entered
            done = super().recv_into(*args)
            entered += done
            return done

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket, "socket", Counting)
        subscription = tr.subscribe(url, into=into, same_host=False, timeout=TIMEOUT)
        entered = 0  # the update may use connections that there are already
        subscription.update()
    local = into["w"].to_local()
    return entered, local.nbytes, torch.equal(local, wanted.to_local())


def test_the_needed_bytes_enter_a_worker_and_hardly_any_other(pool4: Any, pool2: Any) -> None:
    url = pool4.run(serve_large)[0]
    try:
        for entered, local, right in pool2.run(count_what_enters, url):
            assert right and local == 8 << 20
            assert local <= entered <= 1.02 * local
    finally:
        pool4.run(end_serving)
