"""States of several ranks: saved by some, loaded by others, cut in any way, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import torchrelay as tr
from tests.support import flat, meshes
from tests.support.ranks import RankPool
from tests.support.states import assert_same, bits
from torchrelay.planning.stored import stored_tensors

# torch warns that ShardedTensor will go away one day.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")

TIMEOUT = 20.0


def checkpointer(root: str, group: Any = None, **options: Any) -> tr.Checkpointer:
    return flat.checkpointer(root, group=group, timeout=TIMEOUT, **options)


@contextmanager
def one_rank() -> Iterator[None]:
    """A group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    meshes.mesh.cache_clear()
    try:
        yield
    finally:
        dist.destroy_process_group()
        meshes.mesh.cache_clear()


# Every layout, by one, two and four ranks, into every other.


def save_layouts(rank: int, group: Any, root: str, first: int) -> list[str]:
    """Save the same values in each layout, a step for each; every other one asynchronously."""
    with checkpointer(root, group) as there:
        for step, layout in enumerate(meshes.LAYOUTS, first):
            if step % 2:
                there.save(step, meshes.state(layout))
            else:
                there.save_async(step, meshes.state(layout)).result(TIMEOUT)
    return meshes.LAYOUTS


def load_layouts(rank: int, group: Any, root: str, every: int) -> list[str]:
    """Load every step into each `every`th layout, and as whole tensors; what came out wrong."""
    problems = []
    with checkpointer(root, group) as there:
        for place, step in enumerate(there.steps()):
            got = there.load(step=step).state
            problems += [f"step {step}, new: {name}" for name in meshes.wrong(got, "plain")]
            for number, layout in enumerate(meshes.LAYOUTS[place % every :: every]):
                into = meshes.blank(layout)
                tensors = list(into["model"].values())
                got = there.load(into=into, step=step, atomic=bool(number % 2)).state
                found = meshes.wrong(got, layout)
                if any(a is not b for a, b in zip(tensors, got["model"].values(), strict=True)):
                    found.append("other objects")
                problems += [f"step {step}, {layout}: {name}" for name in found]
    return problems


@pytest.fixture(scope="module")
def layouts(tmp_path_factory: Any, pool2: Any, pool4: Any) -> str:
    """Steps of every layout, by no group, a group of one, two and four ranks."""
    root = str(tmp_path_factory.mktemp("layouts"))
    with checkpointer(root) as there:
        there.save(0, meshes.state("plain"))
    with one_rank():
        save_layouts(0, dist.group.WORLD, root, 100)
    pool2.run(save_layouts, root, 200)
    pool4.run(save_layouts, root, 400, timeout=60)
    return root


def test_every_layout_by_a_process_without_group(layouts: str) -> None:
    with checkpointer(layouts) as there:
        assert len(there.steps()) == 1 + 3 * len(meshes.LAYOUTS)
        for step in there.steps():
            assert meshes.wrong(there.load(step=step).state, "plain") == []
            into = meshes.blank("plain")
            assert meshes.wrong(there.load(into=into, step=step).state, "plain") == []
            there.verify(step)


def test_every_layout_by_one_rank(layouts: str) -> None:
    with one_rank():
        assert load_layouts(0, dist.group.WORLD, layouts, 4) == []


def test_every_layout_by_two_ranks(layouts: str, pool2: Any) -> None:
    assert pool2.run(load_layouts, layouts, 4, timeout=100) == [[], []]


@pytest.mark.slow
def test_every_layout_by_four_ranks(layouts: str, pool4: Any) -> None:
    assert pool4.run(load_layouts, layouts, 4, timeout=100) == [[], [], [], []]


@pytest.mark.slow
@pytest.mark.timeout(300)  # for both pools
def test_every_layout_into_every_other(layouts: str, pool2: Any, pool4: Any) -> None:
    assert pool2.run(load_layouts, layouts, 1, timeout=100) == [[], []]
    assert pool4.run(load_layouts, layouts, 1, timeout=100) == [[], [], [], []]


def odd_tensors(rank: int, group: Any, root: str) -> list[str]:
    """Zero elements, no dimension, frozen parameters, non-contiguous local parts."""
    mesh = meshes.mesh(1)
    turned = torch.arange(24.0).reshape(4, 6).t()
    state = {
        "none": distribute_tensor(torch.empty(0, 3), mesh, [Shard(0)]),
        "scalar": distribute_tensor(torch.tensor(2.5), mesh, [Replicate()]),
        "frozen": nn.Parameter(
            distribute_tensor(torch.arange(8.0), mesh, [Shard(0)]), requires_grad=False
        ),
        "parameter": nn.Parameter(distribute_tensor(torch.arange(8.0) + 1, mesh, [Shard(0)])),
        "turned": DTensor.from_local(turned, mesh, [Shard(1)], run_check=False),
    }
    with checkpointer(root, group) as there:
        there.save(0, state)
        got = there.load().state
        expected = {name: value.full_tensor() for name, value in state.items()}
        problems = [name for name in state if bits(got[name]) != bits(expected[name])]
        if not isinstance(got["parameter"], nn.Parameter) or not got["parameter"].requires_grad:
            problems.append("no longer a parameter")
        if not isinstance(got["frozen"], nn.Parameter) or got["frozen"].requires_grad:
            problems.append("no longer frozen")
        into = {
            name: torch.zeros_like(value).requires_grad_(value.requires_grad)
            for name, value in state.items()
        }
        there.load(into=into)
        problems += [
            f"{name} in place"
            for name, value in state.items()
            if meshes.local_bits(into[name]) != meshes.local_bits(value)
        ]
    return problems


def test_odd_tensors(pool2: Any, tmp_path: Path) -> None:
    assert pool2.run(odd_tensors, str(tmp_path)) == [[], []]
    with checkpointer(str(tmp_path)) as there:
        got = there.load().state
    assert got["none"].shape == (0, 3) and got["scalar"].item() == 2.5


# FSDP2: a real model and its optimizer.


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)
        self.norm = nn.LayerNorm(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        out: torch.Tensor = x + self.down(self.up(x).relu())
        return out


class Transformer(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(11, 8)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(8, 11)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        out: torch.Tensor = self.head(x)
        return out


def plain_job(seed: int) -> dict[str, Any]:
    model = Transformer(seed)
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=0.01)}


def sharded_job(seed: int, dims: int) -> dict[str, Any]:
    """FSDP2 over all ranks, or over pairs that hold the same (HSDP)."""
    model = Transformer(seed)
    for block in model.blocks:
        fully_shard(block, mesh=meshes.mesh(dims))
    fully_shard(model, mesh=meshes.mesh(dims))
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=0.01)}


def train(job: dict[str, Any], steps: range) -> None:
    for step in steps:
        torch.manual_seed(step)
        tokens = torch.randint(0, 11, (2, 5))
        nn.functional.cross_entropy(job["model"](tokens).flatten(0, 1), tokens.flatten()).backward()
        job["optimizer"].step()
        job["optimizer"].zero_grad()


def wholes(job: dict[str, Any]) -> dict[str, bytes]:
    """Every tensor of a job's state, whole."""
    found: dict[str, bytes] = {}

    def take(name: str, value: Any) -> None:
        if isinstance(value, dict):
            for key, inner in value.items():
                take(f"{name}.{key}", inner)
        elif isinstance(value, torch.Tensor):
            value = value.detach()
            found[name] = bits(value.full_tensor() if isinstance(value, DTensor) else value)

    for key, part in job.items():
        take(key, part.state_dict())
    return found


def fsdp_save(rank: int, group: Any, root: str, dims: int) -> dict[str, bytes]:
    job = sharded_job(1, dims)
    train(job, range(2))
    with checkpointer(root, group) as there:
        there.save_async(2, job).result(TIMEOUT)
        expected = wholes(job)
        train(job, range(2, 4))
        there.save(4, job)
    return expected


def fsdp_load(rank: int, group: Any, root: str, dims: int, begun: bool) -> Any:
    """Into a job of another seed, new or under way; what it holds, and after two more steps."""
    job = sharded_job(2, dims)
    if begun:
        train(job, range(1))
    parameters = list(job["model"].parameters())
    with checkpointer(root, group) as there:
        there.load(into=job, step=2)
        loaded = wholes(job)
        assert all(a is b for a, b in zip(parameters, job["model"].parameters(), strict=True))
        for value in job["optimizer"].state[parameters[0]].values():
            assert isinstance(value, DTensor) == (value.ndim > 0)
        train(job, range(2, 4))
        later = wholes(job)
        there.load(into=job, step=4)
        return loaded, later, wholes(job)


def as_plain(root: str) -> list[dict[str, bytes]]:
    """The two steps, loaded into an ordinary model and its new optimizer by this process alone."""
    found = []
    with checkpointer(root) as there:
        for step in (2, 4):
            job = plain_job(3)
            there.load(into=job, step=step)
            found.append(wholes(job))
            train(job, range(1))
    return found


def test_fsdp(pool2: Any, pool4: Any, tmp_path: Path) -> None:
    root = str(tmp_path)
    expected = pool4.run(fsdp_save, root, 1, timeout=60)[0]
    first, last = as_plain(root)
    assert first == expected
    for loaded, later, again in pool4.run(fsdp_load, root, 1, False, timeout=60):
        assert loaded == expected
        assert later == again == last  # training goes on as if it had not stopped
    for pool, dims, begun in [(pool4, 2, False), (pool4, 2, True), (pool2, 1, True)]:
        for loaded, _, again in pool.run(fsdp_load, root, dims, begun, timeout=60):
            assert loaded == expected
            assert again == last


def test_fsdp_from_a_plain_job(pool2: Any, pool4: Any, tmp_path: Path) -> None:
    job = plain_job(1)
    train(job, range(2))
    with checkpointer(str(tmp_path)) as there:
        there.save(2, job)
        there.save(4, job)
    for pool, dims in [(pool2, 1), (pool4, 2)]:
        for loaded, _, again in pool.run(fsdp_load, str(tmp_path), dims, False, timeout=60):
            assert loaded == again == wholes(job)


def plain_ranks(rank: int, group: Any, root: str) -> dict[str, bytes]:
    """Replicas of a plain model on every rank, as DDP keeps them."""
    job, other = plain_job(1), plain_job(2)
    train(job, range(2))
    with checkpointer(root, group) as there:
        there.save(2, job)
        there.load(into=other)
    assert wholes(other) == wholes(job)
    return wholes(job)


def test_a_plain_job_on_every_rank(pool2: Any, pool4: Any, tmp_path: Path) -> None:
    for pool, name in [(pool2, "two"), (pool4, "four")]:
        root = tmp_path / name
        expected = pool.run(plain_ranks, str(root))[0]
        stored = sum(file.stat().st_size for file in root.rglob("*.safetensors"))
        assert stored < 2 * sum(map(len, expected.values()))  # each replica once
        other = plain_job(2)
        with checkpointer(str(root)) as there:
            there.load(into=other)
        assert wholes(other) == expected


def tensor_parallel(rank: int, group: Any, root: str) -> list[bool]:
    """FSDP2 around tensor parallel layers: shards of shards along one dimension."""

    def job(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 8))
        plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        parallelize_module(model, meshes.mesh(2)["tp"], plan)
        return fully_shard(model, mesh=meshes.mesh(2)["dp"])

    first, other = job(1), job(2)
    kinds = {type(p).__name__ for p in first.state_dict()["0.weight"].placements}
    with checkpointer(root, group) as there:
        there.save(0, first)
        there.load(into=other)
        expected = {name: value.full_tensor() for name, value in first.state_dict().items()}
        whole = there.load().state
        same = [bits(whole[name]) == bits(value) for name, value in expected.items()]
        there.save(1, whole)
        third = job(3)
        there.load(into=third, step=1)
        for made in (other, third):
            same += [
                bits(value.full_tensor()) == bits(expected[name])
                for name, value in made.state_dict().items()
            ]
    return [*same, "_StridedShard" in kinds]


def test_fsdp_around_tensor_parallel(pool4: Any, tmp_path: Path) -> None:
    for results in pool4.run(tensor_parallel, str(tmp_path)):
        assert all(results)


# What ranks have of their own.


def stage_of(rank: int, value: float) -> dict[str, Any]:
    """A stage of a pipeline: a key that the others lack, and another tensor under one that they
    have, as in the state of an optimizer."""
    wide = torch.full((2 + rank % 3, 3), value + rank)
    return {
        f"layer-{rank // 2}": torch.full((3,), value + rank // 2),
        "optimizer": {0: wide.clone(), 1: wide.new_full((3, 2 + rank), value).t()},
        "step": 1,
    }


def unlike_stages(rank: int, group: Any, root: str) -> list[Any]:
    found = []
    with checkpointer(root, group) as there:
        there.save(1, stage_of(rank, 5.0))
        found.append(there.load(stage_of(rank, 0.0)).state)
    with tr.serve(stage_of(rank, 5.0), step=1, group=group, timeout=TIMEOUT) as endpoint:
        found.append(tr.pull(endpoint.url, into=stage_of(rank, 0.0), group=group).state)
        dist.barrier(group)
    return found


def test_stages_with_keys_of_their_own_and_other_tensors_under_the_same_key(
    pool4: RankPool, tmp_path: Path
) -> None:
    for rank, found in enumerate(pool4.run(unlike_stages, str(tmp_path / "job"), timeout=60)):
        for state in found:
            assert_same(stage_of(rank, 5.0), state)


def own_state(rank: int) -> dict[str, Any]:
    return {
        "rng": torch.full((40,), rank, dtype=torch.uint8),
        "x": torch.tensor([rank // 2]),
        "x@rank-1": torch.tensor([50]),
        "large": torch.full((10_000 * (1 + rank % 2), 3), rank % 2),
        "position": {"file": rank * 10, "name": f"rank {rank}", "seen": [rank] * 3},
        "flat": torch.zeros(2, 3) if rank % 2 else torch.zeros(3, 2),
        "same": torch.arange(4),
        "epoch": 6,
    }


def own(rank: int, group: Any, root: str, save: bool, expected: list[int]) -> None:
    with checkpointer(root, group) as there:
        if save:
            there.save(0, own_state(rank))
        mine = own_state(expected[rank])
        assert_same(mine, there.load().state)
        into = own_state(expected[rank] + 4)
        for value in into.values():
            if isinstance(value, torch.Tensor):
                value.fill_(9)
        assert_same(mine, there.load(into=into).state)


def test_what_differs_by_rank_comes_back_to_its_rank(
    pool2: Any, pool4: Any, tmp_path: Path
) -> None:
    four, two = str(tmp_path / "four"), str(tmp_path / "two")
    pool4.run(own, four, True, [0, 1, 2, 3])
    pool2.run(own, two, True, [0, 1])
    pool2.run(own, four, False, [0, 1])
    pool4.run(own, two, False, [0, 1, 0, 0])
    for root in (two, four):
        with checkpointer(root) as there:
            assert_same(own_state(0), there.load().state)
    names = {tensor.name for tensor in stored_tensors(there.record(0))}
    assert "rng@rank-3" in names and "same@rank-1" not in names


def again_and_again(rank: int, group: Any, root: str) -> None:
    """Saves that repeat a plan, with new tensors each, equal on all ranks or not."""
    made = []
    with checkpointer(root, group) as there:
        for step, differ in enumerate([False, False, True, True, False, True]):
            value = 10 * step + (rank if differ else 0)
            tensor = torch.full((4, 3), float(value))
            cut = distribute_tensor(tensor - rank * differ, meshes.mesh(1), [Shard(0)])
            made.append({"x": tensor, "y": torch.tensor(step), "cut": cut, "at": (rank, step)})
            there.save(step, made[-1])
        for step, state in enumerate(made):
            got = there.load(step=step).state
            state["cut"] = state["cut"].full_tensor()
            assert_same(state, got)


def test_saves_that_repeat_a_plan(pool2: Any, tmp_path: Path) -> None:
    pool2.run(again_and_again, str(tmp_path))


def stage(rank: int) -> dict[str, Any]:
    """One of several pipeline stages: other layers, other optimizer state, a common part."""
    layers = {f"layer {n}": torch.full((n + 1, 2), float(n)) for n in (2 * rank, 2 * rank + 1)}
    return {"model": layers, "common": torch.arange(3), "epoch": 2, f"only {rank}": [rank]}


def stages(rank: int, group: Any, root: str, save: bool) -> None:
    world = dist.get_world_size()
    with checkpointer(root, group) as there:
        if save:
            there.save(0, stage(rank))
            assert_same(stage(rank), there.load().state)
        else:
            assert_same(every_stage(4, rank), sorted_state(there.load().state))
        into = stage(rank if save else (rank + 1) % world)
        expected = stage(rank if save else (rank + 1) % world)
        for value in [*into["model"].values(), into["common"]]:
            value.zero_()
        assert_same(expected, there.load(into=into).state)


def sorted_state(state: dict[str, Any]) -> dict[str, Any]:
    return {
        key: state[key] if key != "model" else dict(sorted(state[key].items()))
        for key in sorted(state)
    }


def every_stage(count: int, first: int = 0) -> dict[str, Any]:
    merged: dict[str, Any] = {"model": {}}
    for rank in range(count):
        made = stage(rank)
        merged["model"].update(made.pop("model"))
        merged.update(made)
    return sorted_state(merged)


def test_pipeline_stages(pool2: Any, pool4: Any, tmp_path: Path) -> None:
    root = str(tmp_path)
    pool4.run(stages, root, True)
    pool2.run(stages, root, False)
    with checkpointer(root) as there:
        assert_same(every_stage(4), sorted_state(there.load().state))
        into = every_stage(4)
        for value in into["model"].values():
            value.zero_()
        assert_same(every_stage(4), sorted_state(there.load(into=into).state))
        with pytest.raises(tr.errors.MismatchError, match="not offered"):
            there.load(into={**every_stage(4), "only 4": 1})


# Groups.


def changed_after(rank: int, group: Any, root: str) -> None:
    state = meshes.state("rows")
    with checkpointer(root, group) as there:
        pending = there.save_async(0, state)
        for tensor in state["model"].values():
            tensor.to_local().zero_()
        state["plain"].zero_()
        loaded = there.save_async(1, meshes.state("grid"))
        pending.result(TIMEOUT)
        loaded.result(TIMEOUT)
        for step, layout in [(0, "grid"), (1, "columns")]:
            got = there.load(into=meshes.blank(layout), step=step).state
            assert meshes.wrong(got, layout) == []


def test_a_change_right_after_save_async(pool4: Any, tmp_path: Path) -> None:
    pool4.run(changed_after, str(tmp_path))


def halves(rank: int, group: Any, root: str) -> None:
    """Pairs save by themselves, in one place and in turn, and then all four together."""
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine = rank // 2
    state = {"pair": mine, "w": torch.full((3,), float(mine)), "rank": rank}
    for pair in range(2):
        if pair == mine:
            with checkpointer(root, pairs[mine]) as there:
                there.save(mine, state)
                assert_same(state, there.load(step=mine).state)
        dist.barrier()
    with checkpointer(root, group) as there:
        there.save(7, {**state, "w": torch.full((3,), 7.0)})
        assert there.load().state["rank"] == rank
        assert there.steps() == [0, 1, 7]


def test_sub_groups(pool4: Any, tmp_path: Path) -> None:
    pool4.run(halves, str(tmp_path))
    with checkpointer(str(tmp_path)) as there:
        assert there.load(step=1).state["w"].tolist() == [1, 1, 1]
        assert there.load(step=1).state["rank"] == 2


def both(rank: int, group: Any, root: str) -> None:
    """Two checkpointers of one group in one place and one in another, their calls interleaved."""
    with (
        checkpointer(f"{root}/a", group) as one,
        checkpointer(f"{root}/a", group) as other,
        checkpointer(f"{root}/b", group) as third,
    ):
        pendings = []
        for step in range(3):
            for number, there in enumerate((one, other, third)):
                made = {"n": torch.full((5,), 100.0 * step + 10 * number + rank), "rank": rank}
                pendings.append(there.save_async(10 * step + number, made))
            pendings[2].result(TIMEOUT)
            assert third.load(step=2).state["rank"] == rank
        for pending in reversed(pendings):
            pending.result(TIMEOUT)
        for step in range(3):
            assert one.load(step=10 * step + 1).state["n"][0] == 100 * step + 10 + rank
            assert other.load(step=10 * step).state["n"][0] == 100 * step + rank


def test_several_checkpointers_at_once(pool2: Any, tmp_path: Path) -> None:
    pool2.run(both, str(tmp_path))


# One rank's fault is everybody's.


def told(act: Callable[[], object]) -> tuple[str, int | None, str | None, str]:
    try:
        act()
    except tr.errors.RelayError as fault:
        return type(fault).__name__, fault.rank, fault.path, str(fault)
    return "nothing", None, None, ""


def faults(rank: int, group: Any, root: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    good = {"w": torch.arange(6.0) + 1, "n": 1}
    odd = {"w": torch.ones(6), "bad": object()} if rank == 1 else good
    with checkpointer(root, group) as there:
        found["unsupported"] = told(lambda: there.save(0, odd))
        found["asynchronously"] = told(lambda: there.save_async(0, odd))
        found["other steps saved"] = told(lambda: there.save(rank, good))
        found["other steps in the background"] = told(lambda: there.save_async(rank, good))
        assert there.steps() == []
        there.save(0, good)
        there.save(1, good)
        found["exists"] = told(lambda: there.save(1, good))
        into = {"w": torch.zeros(6 if rank != 1 else 5), "n": 0}
        for atomic in (True, False):
            found[f"mismatch, {atomic}"] = told(lambda: there.load(into=into, atomic=atomic))  # noqa: B023
            assert into["w"].count_nonzero() == 0 and into["n"] == 0
        found["missing"] = told(lambda: there.load(step=5))
        found["other steps loaded"] = told(lambda: there.load(step=rank % 2))
        assert there.load(into={"w": torch.zeros(6), "n": 0}).state["w"].tolist()[-1] == 6
        there.save_async(2, good).result(TIMEOUT)
        assert_same(good, there.load().state)
        assert there.steps() == [0, 1, 2]
    total = torch.ones(1)
    dist.all_reduce(total, group=group)
    assert total.item() == dist.get_world_size()
    return found


def test_a_fault_on_one_rank(pool4: Any, tmp_path: Path) -> None:
    expected = {
        "unsupported": ("UnsupportedLeafError", 1, "['bad']"),
        "asynchronously": ("UnsupportedLeafError", 1, "['bad']"),
        "other steps saved": ("UsageError", 0, None),
        "other steps in the background": ("UsageError", 0, None),
        "exists": ("StepExistsError", 0, None),
        "mismatch, True": ("MismatchError", 1, "['w']"),
        "mismatch, False": ("MismatchError", 1, "['w']"),
        "missing": ("StepNotFoundError", 0, None),
        "other steps loaded": ("UsageError", 0, None),
    }
    for rank, found in enumerate(pool4.run(faults, str(tmp_path))):
        assert {what: said[:3] for what, said in found.items()} == expected, rank
        for what in ("unsupported", "mismatch, True"):
            assert "rank 1" in found[what][3]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-0", "step-1", "step-2"]


def partial(rank: int, group: Any, root: str) -> list[Any]:
    mesh = meshes.mesh(1)
    unready = DTensor.from_local(torch.ones(3), mesh, [Partial()], run_check=False)
    with checkpointer(root, group) as there:
        found = [told(lambda: there.save(0, {"model": {"w": unready}}))]
        there.save(0, {"model": {"w": distribute_tensor(torch.ones(3), mesh, [Replicate()])}})
        found.append(told(lambda: there.load(into={"model": {"w": unready}})))
        assert unready.to_local().tolist() == [1, 1, 1]
    return found


def test_a_partial_placement_is_refused(pool2: Any, tmp_path: Path) -> None:
    for saved, loaded in pool2.run(partial, str(tmp_path)):
        assert (saved[0], saved[2]) == ("UnsupportedLeafError", "['model']['w']")
        assert "partial" in saved[3]
        assert (loaded[0], loaded[2]) == ("MismatchError", "['model']['w']")
        assert "partial" in loaded[3]


def _large_of_its_own(rank: int, group: Any, place: str) -> bool:
    with tr.Checkpointer(place, group=group, timeout=60) as held:
        mine = torch.full((300, 301), float(rank), dtype=torch.float64)
        shared = torch.arange(90_000.0)
        held.save(1, {"experts": mine, "shared": shared})
        record = held.record(1)
        assert [len(x.shards) for x in stored_tensors(record) if x.name == "shared"] == [1]
        into = {"experts": torch.zeros_like(mine), "shared": torch.zeros_like(shared)}
        held.load(into)
        return torch.equal(into["experts"], mine) and torch.equal(into["shared"], shared)


def test_a_large_tensor_that_differs_by_rank_comes_back_to_its_rank(
    pool2: RankPool, tmp_path: Path
) -> None:
    assert pool2.run(_large_of_its_own, str(tmp_path), timeout=60) == [True, True]


def _tied_shards(rank: int, group: Any, place: str) -> list[Any]:
    """Two names for one DTensor's memory here, two tensors in the step."""
    mesh = meshes.mesh(1)
    first = torch.arange(12.0).reshape(6, 2)
    found: list[Any] = []
    with checkpointer(place, group) as held:
        for step, second in enumerate((first.clone(), first + 1)):
            state = [distribute_tensor(x, mesh, [Shard(0)]) for x in (first, second)]
            held.save(step, {"a": state[0], "b": state[1]})
            one = distribute_tensor(torch.zeros(6, 2), mesh, [Shard(0)])
            other = DTensor.from_local(one.to_local(), mesh, [Shard(0)], run_check=False)
            found.append(told(lambda into={"a": one, "b": other}: held.load(into=into))[0])
            local = one.to_local()
            expected = first[3 * rank : 3 * rank + 3] if step == 0 else torch.zeros(3, 2)
            assert torch.equal(local, expected)
    return found


def test_tied_shards_take_equal_values_and_refuse_two(pool2: RankPool, tmp_path: Path) -> None:
    found = pool2.run(_tied_shards, str(tmp_path), timeout=60)
    assert found == [["nothing", "MismatchError"]] * 2


def without_all_of_a_mesh(rank: int, group: Any, root: str) -> list[Any]:
    """A part of the ranks of a mesh saves, serves and keeps what all of them have."""
    pair = dist.new_group([0, 1])
    mesh = dist.init_device_mesh("cpu", (4,))
    weights = distribute_tensor(torch.arange(40.0), mesh, [Shard(0)])
    replicas, alone = [torch.zeros(2), torch.ones(2), None, None], {"other": torch.ones(2)}
    found = []
    if rank < 2:
        with checkpointer(root, group=pair) as there:
            found = [
                told(lambda: there.save(1, {"w": weights, "step": 1})),
                told(lambda: there.save_async(2, {"w": weights})),
                told(lambda: tr.serve({"w": weights}, step=1, group=pair, timeout=TIMEOUT)),
                # Ranks that differ in something are asked a second time.
                told(lambda: there.save(3, {"w": weights, "mine": rank})),
                told(lambda: there.save(4, {"w": weights, "w1": replicas[rank]})),
                told(lambda: there.save(5, {"a": torch.ones(2), "w": weights} if rank else alone)),
            ]
    dist.barrier()
    return found


def test_a_group_without_all_ranks_of_a_mesh_is_told_so_before_a_byte_is_written(
    pool4: RankPool, tmp_path: Path
) -> None:
    for found in pool4.run(without_all_of_a_mesh, str(tmp_path / "job"), timeout=60)[:2]:
        assert [kind for kind, *_ in found] == ["CheckpointError"] * 6, found
        assert all("phase plan" in text for *_, text in found), found
        assert all("has 2 of its 4 shards" in text for *_, text in found), found
    assert not list((tmp_path / "job").glob("step-*"))


def one_replica_alone(rank: int, group: Any, root: str) -> int:
    """Of two replicas of a job one is saved, and served, by its own ranks; it has everything."""
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))
    whole = {f"w{n}": torch.arange(7.0 + n) for n in range(9)}
    state: dict[str, Any] = {
        name: distribute_tensor(tensor, mesh, [Replicate(), Shard(0)])
        for name, tensor in whole.items()
    }
    state["norm"] = distribute_tensor(torch.ones(3), mesh, [Replicate(), Replicate()])
    state["plain"] = torch.ones(5)
    mine = rank // 2
    with checkpointer(f"{root}/{mine}", group=pairs[mine]) as there:
        there.save(1, state)
        with tr.serve(state, step=1, group=pairs[mine], timeout=TIMEOUT) as endpoint:
            endpoint.publish(state, step=2).result(TIMEOUT)
            got = tr.pull(endpoint.url, no_dist=True, timeout=TIMEOUT)
            dist.barrier(pairs[mine])
    assert all(torch.equal(got.state[name], whole[name]) for name in whole)
    assert torch.equal(got.state["norm"], torch.ones(3))
    dist.barrier()
    return int(got.step)


def test_one_replica_of_a_job_is_saved_and_served_by_its_own_ranks(
    pool4: RankPool, tmp_path: Path
) -> None:
    assert pool4.run(one_replica_alone, str(tmp_path), timeout=60) == [2] * 4
    for replica in range(2):
        with checkpointer(str(tmp_path / str(replica)), no_dist=True) as there:
            state = there.load().state
        for number in range(9):
            assert state[f"w{number}"].tolist() == list(range(7 + number))
        assert state["norm"].tolist() == [1, 1, 1] and state["plain"].tolist() == [1] * 5
