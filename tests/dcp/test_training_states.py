"""States of real training jobs through torch's DCP calls with `Writer` and `Reader`, on ranks.

Each trip ends in the losses of the next steps: those of the job that was never interrupted.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

import torchrelay as tr
from tests.support.ranks import RankPool
from torchrelay import dropin
from torchrelay.dcp import Reader, Writer

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")

KINDS = ["replicated", "fsdp raw", "fsdp get_state_dict", "momentum-free"]
STEPS = 3


class Job:
    """A model and its optimizer on the ranks of a mesh, which all see the same data."""

    def __init__(self, kind: str, mesh: DeviceMesh, seed: int) -> None:
        self.kind = kind
        torch.manual_seed(seed)
        self.model = torch.nn.Sequential(
            torch.nn.Linear(6, 7), torch.nn.Tanh(), torch.nn.Linear(7, 3), torch.nn.LayerNorm(3)
        )
        if kind.startswith("fsdp"):
            for part in (self.model[0], self.model[2], self.model):
                fully_shard(part, mesh=mesh)
        self.optim: torch.optim.Optimizer
        if kind == "momentum-free":
            self.optim = torch.optim.SGD(self.model.parameters(), lr=0.05)
        else:
            self.optim = torch.optim.AdamW(self.model.parameters(), lr=0.05)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optim, 2, 0.5)
        self.at = 0

    def train(self, steps: int) -> list[float]:
        losses = []
        for _ in range(steps):
            data = torch.Generator().manual_seed(self.at)
            out = self.model(torch.randn(4, 6, generator=data))
            loss = (out - torch.randn(4, 3, generator=data)).square().mean()
            loss.backward()
            self.optim.step()
            self.schedule.step()
            self.optim.zero_grad()
            self.at += 1
            losses.append(loss.item())
        return losses

    def state(self) -> dict[str, Any]:
        if self.kind.endswith("get_state_dict"):
            model, optim = get_state_dict(self.model, self.optim)
        else:
            model, optim = self.model.state_dict(), self.optim.state_dict()
        return {
            "model": model,
            "optim": optim,
            "schedule": self.schedule.state_dict(),
            "progress": {"at": self.at, "notes": ["a", None, 2.5]},
        }

    def take(self, state: dict[str, Any]) -> None:
        if self.kind.endswith("get_state_dict"):
            set_state_dict(
                self.model,
                self.optim,
                model_state_dict=state["model"],
                optim_state_dict=state["optim"],
            )
        else:
            self.model.load_state_dict(state["model"])
            self.optim.load_state_dict(state["optim"])
        self.schedule.load_state_dict(state["schedule"])
        self.at = state["progress"]["at"]


def by_dcp(state: dict[str, Any], place: str, group: Any) -> None:
    dcp.save(state, storage_writer=Writer(place), process_group=group)


def by_dcp_async(state: dict[str, Any], place: str, group: Any) -> None:
    future: Any = dcp.async_save(state, storage_writer=Writer(place), process_group=group)
    future.result(timeout=60)


def by_dropin(state: dict[str, Any], place: str, group: Any) -> None:
    dropin.Checkpointer(Writer(place), Reader(place), process_group=group).save(state)


def by_dropin_async(state: dict[str, Any], place: str, group: Any) -> None:
    held = dropin.Checkpointer(Writer(place), Reader(place), process_group=group)
    held.async_save(state).result(timeout=60)


def by_checkpointer(state: dict[str, Any], place: str, group: Any) -> None:
    with tr.Checkpointer(place, group=group) as held:
        held.save(0, state)


SAVES: dict[str, Callable[[dict[str, Any], str, Any], None]] = {
    "dcp.save": by_dcp,
    "dcp.async_save": by_dcp_async,
    "dropin.save": by_dropin,
    "dropin.async_save": by_dropin_async,
    "Checkpointer.save": by_checkpointer,
}


def load_dcp(state: dict[str, Any], place: str, group: Any) -> None:
    dcp.load(state, storage_reader=Reader(place), process_group=group)


def load_dropin(state: dict[str, Any], place: str, group: Any) -> None:
    dropin.Checkpointer(Writer(place), Reader(place), process_group=group).load(state)


def load_checkpointer(state: dict[str, Any], place: str, group: Any) -> None:
    with tr.Checkpointer(place, group=group) as held:
        assert held.load(into=state).report.verified


LOADS = {"dcp.load": load_dcp, "dropin.load": load_dropin, "Checkpointer.load": load_checkpointer}


def first_ranks(count: int) -> DeviceMesh:
    """The first ranks of the world in a row; made on all of them, as a group is."""
    return DeviceMesh("cpu", list(range(count)))


def trips(
    rank: int,
    group: Any,
    place: str,
    save: str,
    kinds: list[str],
    savers: int,
    loaders: tuple[int, ...],
) -> dict[str, bool]:
    """Which kinds, loaded by which call on how many ranks, go on as the job that was saved."""
    meshes = {count: first_ranks(count) for count in dict.fromkeys((savers, *loaders))}
    found = {}
    for kind in kinds:
        here = f"{place}/{kind.replace(' ', '-')}"
        expected: list[float] = []
        if rank < savers:
            job = Job(kind, meshes[savers], seed=1)
            job.train(2)
            SAVES[save](job.state(), here, meshes[savers].get_group())
            expected = job.train(STEPS)
        told = [expected]
        dist.broadcast_object_list(told, src=0)
        for count in loaders:
            for name, load in LOADS.items():
                if rank >= count:
                    continue
                other = Job(kind, meshes[count], seed=2)
                other.train(1)
                state = other.state()
                load(state, here, meshes[count].get_group())
                other.take(state)
                losses = torch.tensor(other.train(STEPS))
                close = torch.allclose(losses, torch.tensor(told[0]), rtol=1e-5, atol=1e-7)
                found[f"{kind}, {name} on {count}"] = close
            dist.barrier()
    return found


def test_a_job_saved_by_dcp_save_goes_on(pool2: RankPool, tmp_path: Path) -> None:
    found = pool2.run(trips, str(tmp_path), "dcp.save", KINDS, 2, (2,), timeout=120)
    assert all(all(each.values()) for each in found), found


@pytest.mark.parametrize("save", sorted(SAVES.keys() - {"dcp.save"}))
def test_a_job_saved_by_another_call_goes_on(pool2: RankPool, tmp_path: Path, save: str) -> None:
    found = pool2.run(trips, str(tmp_path), save, KINDS[:1], 2, (2, 1), timeout=120)
    assert all(all(each.values()) for each in found), found


def test_a_job_of_three_ranks_goes_on_with_four(pool4: RankPool, tmp_path: Path) -> None:
    found = pool4.run(trips, str(tmp_path), "dcp.save", ["fsdp raw"], 3, (4,), timeout=120)
    assert all(all(each.values()) for each in found), found


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("savers", [1, 2, 3, 4])
@pytest.mark.parametrize("save", SAVES)
def test_a_job_goes_on_with_any_number_of_ranks(
    pool4: RankPool, tmp_path: Path, save: str, savers: int
) -> None:
    found = pool4.run(trips, str(tmp_path), save, KINDS, savers, (1, 2, 3, 4), timeout=300)
    assert all(all(each.values()) for each in found), found


def nested_trip(rank: int, group: Any, place: str) -> None:
    dcp.save(nested(), storage_writer=Writer(place))


def nested() -> dict[str, Any]:
    """Dicts and lists in each other, whose tensors two ranks share out among them."""
    weights = [torch.full((n + 1,), float(n)) for n in range(6)]
    return {
        "z": {"b": weights[0], "a": weights[1]},
        "y": weights[2],
        "x": [{"q": weights[3], "n": 1}, weights[4], {"deep": {"er": weights[5], "no": None}}],
        "w": "text",
        "optim": {
            "state": {10: {"step": torch.tensor(3.0)}, 2: {"step": torch.tensor(4.0)}},
            "param_groups": [{"lr": 0.5, "params": [10, 2]}],
        },
        "fresh": {"state": {}, "param_groups": [{"lr": 0.5, "params": [0]}]},
        "empty": torch.empty(0, 3),
    }


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and bool(one == other)


def test_nested_containers_come_back_as_they_were(pool2: RankPool, tmp_path: Path) -> None:
    """Keys in their order, an optimizer's numbers as numbers, its empty state as one."""
    pool2.run(nested_trip, str(tmp_path), timeout=60)
    with tr.Checkpointer(tmp_path, no_dist=True) as held:
        got = held.load().state
    assert same(got, nested()), got
    assert list(got) == list(nested()) and list(got["z"]) == ["b", "a"]
    into = nested()
    for tensor in (into["y"], into["z"]["a"], into["optim"]["state"][2]["step"]):
        tensor.zero_()
    with tr.Checkpointer(tmp_path, no_dist=True) as held:
        held.load(into=into)
    assert same(into, nested())
    dcp.load(into, storage_reader=Reader(tmp_path), no_dist=True)
    assert same(into, nested())
