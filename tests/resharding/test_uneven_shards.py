"""Weights with uneven rows that tensor parallelism and then FSDP2 have cut, on every path.

Six ranks, three times two, hold the state; two others have another mesh. torch's own list of chunks
is wrong for such weights: two of the six ranks would have each other's row.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Placement, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

import torchrelay as tr
from torchrelay import dropin
from torchrelay.dcp import Reader, Writer
from torchrelay.weights import Encoding

SECONDS = 60.0
SIX, TWO = list(range(6)), [6, 7]
COPIED = {4: 6, 5: 7}  # who sends its part as it is, and to whom: torch mistakes these two
SHAPES = {"seven": (7, 5), "thirteen": (13, 2), "even": (12, 2), "few": (2, 3)}


def whole(name: str, step: int) -> torch.Tensor:
    rows, columns = SHAPES[name]
    return torch.arange(float(rows * columns)).reshape(rows, columns) + 1000 * step


class Job:
    """A rank's process groups, and states of the two meshes."""

    def __init__(self, rank: int) -> None:
        self.six = DeviceMesh("cpu", torch.tensor(SIX).view(3, 2), mesh_dim_names=("dp", "tp"))
        self.two = DeviceMesh("cpu", TWO)
        self.groups = [dist.new_group(SIX), dist.new_group(TWO)]
        self.is_six = rank in SIX
        self.group = self.groups[0 if self.is_six else 1]

    def state(self, step: int) -> dict[str, Any]:
        """This rank's part of the values of a step."""
        tensors = {name: whole(name, step) for name in SHAPES}
        if not self.is_six:
            cut: list[Placement] = [Shard(0)]
            return {
                name: distribute_tensor(x, self.two, cut, src_data_rank=None)
                for name, x in tensors.items()
            }
        found: dict[str, Any] = self.model(tensors).state_dict()
        assert any(isinstance(p, _StridedShard) for x in found.values() for p in x.placements)
        return found

    def model(self, tensors: dict[str, torch.Tensor]) -> nn.Module:
        """A module of one of the six ranks, with these parameters."""
        model = nn.Module()
        for name, x in tensors.items():
            part = distribute_tensor(x, self.six["tp"], [Shard(0)], src_data_rank=None)
            model.register_parameter(name, nn.Parameter(part))
        fully_shard(model, mesh=self.six["dp"])
        return model

    def wrong(self, state: dict[str, Any], step: int) -> list[str]:
        """Names of the tensors that are not what this rank has at a step."""
        wanted = self.state(step)
        return [
            name for name in SHAPES if not torch.equal(_local(state[name]), _local(wanted[name]))
        ]


def _local(tensor: Any) -> torch.Tensor:
    found: torch.Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return found.detach()


def stored(rank: int, group: Any, root: str) -> list[str]:
    job = Job(rank)
    with tr.Checkpointer(root, group=job.group, timeout=SECONDS) as there:
        if job.is_six:
            there.save(1, job.state(1))
        dist.barrier()
        into = job.state(0)
        there.load(into=into, step=1)
        wrong = job.wrong(into, 1)
        found = there.load(step=1).state
        wrong += [
            f"whole {name}" for name in SHAPES if not torch.equal(found[name], whole(name, 1))
        ]
        if not job.is_six:
            there.save(2, job.state(2))
        dist.barrier()
        there.load(into=into, step=2)
        return wrong + job.wrong(into, 2)


def test_saved_and_loaded_by_other_ranks(pool8: Any, tmp_path: Path) -> None:
    assert pool8.run(stored, str(tmp_path), timeout=90, fresh_group=True) == [[]] * 8


def trained(rank: int, group: Any, root: str) -> list[str]:
    """The state of an optimizer, into a new one and whole."""
    job = Job(rank)
    if not job.is_six:
        return []

    def made(step: int) -> tuple[nn.Module, torch.optim.AdamW]:
        model = job.model({name: whole(name, step) for name in SHAPES})
        return model, torch.optim.AdamW(model.parameters())

    model, optimizer = made(1)
    for parameter in model.parameters():
        parameter.grad = parameter.detach().clone()
    optimizer.step()
    with tr.Checkpointer(root, group=job.group, timeout=SECONDS) as there:
        there.save(1, {"model": model, "optimizer": optimizer})
        other, restored = made(0)
        there.load(into={"model": other, "optimizer": restored})
        found = there.load().state["optimizer"]["state"]
    wrong = []
    pairs = zip(SHAPES, model.parameters(), other.parameters(), strict=True)
    for number, (name, one, two) in enumerate(pairs):
        if not torch.equal(_local(one), _local(two)):
            wrong.append(name)
        for key, value in optimizer.state[one].items():
            if not torch.equal(_local(value), _local(restored.state[two][key])):
                wrong.append(f"{name} {key}")
        if not torch.allclose(found[number]["exp_avg"], whole(name, 1) * 0.1):
            wrong.append(f"whole {name}")
    return wrong


def test_an_optimizer_comes_back(pool8: Any, tmp_path: Path) -> None:
    assert pool8.run(trained, str(tmp_path), timeout=90, fresh_group=True) == [[]] * 8


def live(rank: int, group: Any, route: str) -> list[str]:
    job = Job(rank)
    relay = tr.Relay(group, route=route, timeout=SECONDS)
    into = job.state(0)
    if job.is_six:
        relay.send(job.state(1), TWO)
        relay.recv(TWO, into=into)
        if rank in COPIED:
            relay.send(job.state(3), COPIED[rank])
        return job.wrong(into, 2)
    relay.recv(SIX, into=into)
    wrong = job.wrong(into, 1)
    relay.send(job.state(2), SIX)
    source = {there: here for here, there in COPIED.items()}[rank]
    found = relay.recv(source, shards="as_sent").state
    rows = {4: slice(0, 0), 5: slice(6, 7)}[source]
    if not torch.equal(_local(found["seven"]), whole("seven", 3)[rows]):
        wrong.append(f"the part of rank {source} as it was sent")
    return wrong


def test_sent_between_meshes(pool8: Any) -> None:
    for route in ("memory", "tcp"):
        assert pool8.run(live, route, timeout=90, fresh_group=True) == [[]] * 8


def served(rank: int, group: Any) -> list[str]:
    job = Job(rank)
    endpoint = (
        tr.serve(job.state(1), step=1, group=job.groups[0], timeout=SECONDS)
        if (job.is_six)
        else None
    )
    urls = [None if endpoint is None else endpoint.url]
    dist.broadcast_object_list(urls, src=0)
    wrong = []
    into = job.state(0)
    got = tr.pull(
        str(urls[0]),
        into=into,
        group=job.group,
        timeout=SECONDS,
        options=tr.options.PullOptions(same_host=False),
    )
    assert got.step == 1
    wrong += job.wrong(into, 1)
    found = tr.pull(str(urls[0]), no_dist=True, timeout=SECONDS).state
    wrong += [f"whole {name}" for name in SHAPES if not torch.equal(found[name], whole(name, 1))]
    dist.barrier()
    with tr.subscribe(str(urls[0]), into=into, group=job.group, timeout=SECONDS) as following:
        dist.barrier()
        if endpoint is not None:
            endpoint.publish(job.state(2), step=2).result(SECONDS)
        following.update(at_least=2)
        wrong += job.wrong(into, 2)
    dist.barrier()
    if endpoint is not None:
        endpoint.close()
    return wrong


def test_pulled_and_subscribed(pool8: Any) -> None:
    assert pool8.run(served, timeout=90, fresh_group=True) == [[]] * 8


def planned_by_torch(rank: int, group: Any, root: str) -> list[str]:
    """What six ranks raise; the two others have saved."""
    job = Job(rank)
    with tr.Checkpointer(root, group=job.group, timeout=SECONDS) as there:
        if not job.is_six:
            there.save(1, job.state(1))
    dist.barrier()
    if not job.is_six:
        return []
    # With other numbers of rows torch itself finds that chunks overlap.
    place, into, found = f"{root}/torch", {"seven": job.state(0)["seven"]}, []
    kept = _local(into["seven"]).clone()
    other = dropin.Checkpointer(Writer(place), Reader(root), process_group=job.group)
    acts: list[Callable[[], object]] = [
        lambda: dcp.save(into, storage_writer=Writer(place), process_group=job.group),
        lambda: other.save(into),
        lambda: other.load(into),
        lambda: dcp.load(into, storage_reader=Reader(root), process_group=job.group),
    ]
    for act in acts:
        try:
            act()
            found.append("no error")
        except (tr.errors.RelayError, CheckpointException) as fault:
            found.append(str(fault))
        if len(found) < 4 and not torch.equal(_local(into["seven"]), kept):
            found[-1] = "something was written"
    return found


def test_a_plan_that_torch_makes_wrongly_is_refused(pool8: Any, tmp_path: Path) -> None:
    found = pool8.run(planned_by_torch, str(tmp_path), timeout=90, fresh_group=True)
    for texts in found[:6]:
        assert len(texts) == 4
        for text in texts:
            assert "torch's planner takes it to have" in text and "at seven" in text, text


def fused(mesh: DeviceMesh, step: int) -> dict[str, Any]:
    """Weights made of three, each of them cut: a rank has three runs of rows."""
    cut = [_StridedShard(0, split_factor=3)]
    return {
        name: distribute_tensor(whole(name, step), mesh, cut, src_data_rank=None) for name in SHAPES
    }


def several_boxes(rank: int, group: Any, root: str) -> list[str]:
    mesh = DeviceMesh("cpu", [0, 1])
    wrong: list[str] = []

    def check(what: str, state: dict[str, Any], step: int) -> None:
        wanted = fused(mesh, step)
        for name in SHAPES:
            mine = wanted[name] if isinstance(state[name], DTensor) else whole(name, step)
            if not torch.equal(_local(state[name]), _local(mine)):
                wrong.append(f"{what} {name}")

    with tr.Checkpointer(root, group=group, timeout=SECONDS) as there:
        there.save(1, fused(mesh, 1))
        check("new", there.load().state, 1)
        into = fused(mesh, 0)
        there.load(into=into)
        check("loaded", into, 1)
    with tr.serve(fused(mesh, 3), step=3, timeout=SECONDS) as endpoint:
        tr.pull(
            endpoint.url,
            into=into,
            timeout=SECONDS,
            options=tr.options.PullOptions(same_host=False),
        )
        check("pulled", into, 3)
        with tr.subscribe(endpoint.url, into=into, timeout=SECONDS) as following:
            endpoint.publish(fused(mesh, 4), step=4).result(SECONDS)
            following.update(at_least=4)
            check("followed", into, 4)
        dist.barrier()
    cast = Encoding(dtype=torch.bfloat16)
    with tr.serve(fused(mesh, 0), step=3, timeout=SECONDS, encoding=cast) as endpoint:
        found = tr.pull(
            endpoint.url, timeout=SECONDS, options=tr.options.PullOptions(same_host=False)
        ).state
        for name in SHAPES:
            wrong += [] if torch.equal(found[name], whole(name, 0).bfloat16()) else [f"cast {name}"]
        dist.barrier()
    relay = tr.Relay(group, timeout=SECONDS)
    if rank == 0:  # to one rank, as it is
        relay.send(fused(mesh, 5), 1)
        try:
            relay.send(fused(mesh, 6), 1)
            wrong.append("it was gathered")
        except tr.errors.RelayError as fault:
            wrong += [] if "strided" in str(fault) else [str(fault)]
        return wrong
    found = relay.recv(0, shards="as_sent").state
    wanted = torch.cat([chunk.chunk(2)[0] for chunk in whole("even", 5).chunk(3)])
    if not torch.equal(_local(found["even"]), wanted):
        wrong.append("sent")
    try:
        relay.recv([0], into=into)
        wrong.append("it was gathered")
    except tr.errors.MismatchError as fault:
        wrong += [] if "strided" in str(fault) and fault.path else [str(fault)]
    check("refused", into, 4)
    return wrong


def test_several_boxes_of_one_rank(pool2: Any, tmp_path: Path) -> None:
    assert pool2.run(several_boxes, str(tmp_path), timeout=90, fresh_group=True) == [[]] * 2
