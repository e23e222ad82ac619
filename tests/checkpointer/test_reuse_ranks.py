"""Random histories of saves that reuse: every step has exactly what was saved, whatever becomes of
the others, of the number of ranks, and of the mesh."""

from __future__ import annotations

import functools
import random
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import torchrelay as tr
from tests.support.ranks import RankPool
from tests.support.rounds import rounds
from torchrelay.options import CheckpointerOptions
from torchrelay.shares import resting

NAMES = [f"w{n}" for n in range(6)]
SHAPES = [(64, 33), (64, 33), (7, 50), (1, 9), (300,), (40, 40)]
CHANGES = ["data", "view", "foreach", "in place", "swap", "none", "none", "thaw", "half"]


def whole(seed: int) -> dict[str, torch.Tensor]:
    """The values of a state, the same on every rank."""
    make = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(shape, generator=make) for name, shape in zip(NAMES, SHAPES, strict=True)
    }


def change(values: dict[str, torch.Tensor], how: str, rng: random.Random) -> None:
    name, other = rng.sample(NAMES, 2)
    if how == "data":
        values[name].data.view(-1)[rng.randrange(values[name].numel())] += 1
    elif how == "view":
        values[name].numpy().reshape(-1)[-1] = rng.random()
    elif how == "foreach":
        torch._foreach_mul_([values[name], values[other]], 1.5)
    elif how == "in place":
        values[name].normal_(generator=torch.Generator().manual_seed(rng.randrange(1 << 30)))
    elif how == "swap":
        values["w0"], values["w1"] = values["w1"].clone(), values["w0"].clone()
    elif how == "thaw":
        for one in NAMES[: rng.randrange(6)]:
            values[one] += 1
    elif how == "half":
        values[name] = values[name].half().float()


def laid_out(values: dict[str, torch.Tensor], group: Any, how: str) -> dict[str, Any]:
    """The same state as ranks have it in one of several ways."""
    world = group.size()
    if how == "plain" or world == 1:
        return {"model": {name: one.clone() for name, one in values.items()}}
    if how == "mixed" and world % 2 == 0:
        mesh = init_device_mesh("cpu", (2, world // 2))
        placements: list[Any] = [Replicate(), Shard(0)]
    else:
        mesh, placements = init_device_mesh("cpu", (world,)), [Shard(0)]
    return {
        "model": {
            name: distribute_tensor(one.clone(), mesh, placements, src_data_rank=None)
            for name, one in values.items()
        }
    }


def same(state: dict[str, Any], values: dict[str, torch.Tensor]) -> bool:
    found = {
        name: one.full_tensor() if isinstance(one, DTensor) else one
        for name, one in state["model"].items()
    }
    return all(torch.equal(found[name], one) for name, one in values.items())


def small_files(act: Any) -> Any:
    """Files of any size are taken over, in this process."""

    @functools.wraps(act)
    def acted(*arguments: Any) -> Any:
        with mock.patch.object(resting, "LEAST_BYTES", 1):
            return act(*arguments)

    return acted


@small_files
def history(rank: int, group: Any, root: str, seed: int) -> int:
    """One process after another saves some steps; then steps are deleted in any order."""
    rng, world = random.Random(seed), group.size()
    layouts = ["plain", "sharded", "mixed"]
    values, kept, reused, step = whole(seed), {}, 0, 0
    for _ in range(3):  # jobs
        how = rng.choice(layouts)
        keep = rng.choice([None, 3])
        chosen = CheckpointerOptions(full_every=rng.choice([None, 3]))
        with tr.Checkpointer(root, group=group, keep=keep, timeout=90, options=chosen) as held:
            for _ in range(rng.randrange(3, 6)):
                change(values, rng.choice(CHANGES), rng)
                state, act = laid_out(values, group, how), rng.random()
                step += act >= 0.2 or step == 0
                if rng.random() < 0.5:
                    report = held.save(step, state, overwrite=True)
                else:
                    pending = held.save_async(step, state, overwrite=True)
                    for one in state["model"].values():  # it may change at once
                        (one.to_local() if isinstance(one, DTensor) else one).zero_()
                    found = pending.result(90)
                    assert isinstance(found, tr.Report)
                    report = found
                reused += report.bytes_reused
                kept[step] = {name: one.clone() for name, one in values.items()}
                torch.distributed.barrier(group)  # old steps are removed
                steps = held.steps()
                kept = {n: one for n, one in kept.items() if n in steps}
                if act > 0.85 and len(steps) > 1:
                    step = steps[-2]
                    held.rollback(step)
                    kept = {n: one for n, one in kept.items() if n <= step}
                    values = {name: one.clone() for name, one in kept[step].items()}
            for saved, expected in kept.items():
                into = laid_out(whole(seed + 1), group, rng.choice(layouts))
                held.load(into, step=saved)
                assert same(into, expected), saved
            assert held.steps() == sorted(kept)
    with tr.Checkpointer(root, group=group, timeout=90) as held:
        order = sorted(kept)
        rng.shuffle(order)
        for gone in order:
            if rank == 0:
                assert held.verify(gone) == gone
            into = laid_out(whole(seed + 1), group, rng.choice(layouts))
            held.load(into, step=gone)
            assert same(into, kept[gone]), gone
            torch.distributed.barrier(group)
            if rank == 0:
                held.delete(gone)
            torch.distributed.barrier(group)
    assert world >= 1
    return reused


@small_files
def other_ranks(rank: int, group: Any, root: str, seed: int, first: int) -> int:
    """A job of another number of ranks continues where one ended."""
    values, reused = whole(seed), 0
    with tr.Checkpointer(root, group=group, timeout=90) as held:
        if first > 1:
            into = laid_out(whole(seed + 1), group, "sharded")
            assert held.restore(into) == first - 1
        for step in range(first, first + 3):
            values["w3"] = whole(seed + step)["w3"]
            reused += held.save(step, laid_out(values, group, "sharded")).bytes_reused
        for step in range(max(1, first - 3), first + 3):
            into = laid_out(whole(seed + 1), group, "plain")
            held.load(into, step=step)
            expected = whole(seed) | {"w3": whole(seed + step)["w3"]}
            assert same(into, expected), step
    return reused


@pytest.mark.parametrize("world", [1, 2, 4])
def test_every_step_is_what_was_saved(
    world: int, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    reused = 0
    pool: RankPool = request.getfixturevalue(f"pool{world}") if world > 1 else RankPool(1)
    for seed in range(rounds(60, 20)):
        print(f"seed {seed}")
        root = tmp_path / f"{world}-{seed}"
        reused += sum(pool.run(history, str(root), seed))
    assert reused > 0
    if world == 1:
        pool.close()


def test_another_number_of_ranks(pool2: RankPool, pool4: RankPool, tmp_path: Path) -> None:
    root = str(tmp_path / "steps")
    reused = [
        sum(pool.run(other_ranks, root, 5, first))
        for pool, first in ((pool2, 1), (pool4, 4), (pool2, 7))
    ]
    assert all(reused)
