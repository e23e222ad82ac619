"""`compare_ranks` finds one bit on one rank, and leaves out what a rank has for itself."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import torchrelay as tr
from tests.support.ranks import RankPool
from tests.support.replicated_jobs import KINDS, flip, job
from tests.support.rounds import rounds
from torchrelay.errors import ReplicaError, UsageError

TRIALS, STEPS = 504, 504  # over twelve jobs
WORLDS = (2, 3, 4, 8)
JOBS = [(kind, world) for kind in KINDS for world in WORLDS]


def trials(rank: int, group: Any, kind: str, count: int) -> int:
    """Each trial flips one bit on one rank, and takes it back."""
    world, found = group.size(), 0
    one = job(kind, rank, world, group)
    for step in range(2):
        one.train(step)
    mine = one.replicas()
    paths: list[Any] = [None] * world
    dist.all_gather_object(paths, sorted(mine), group=group)
    assert tr.compare_ranks(one.state, group).raise_if_different().tensors == len(mine)
    for trial in range(count):
        dice = random.Random(f"{kind} {world} {trial}")
        victim = dice.randrange(world)
        kinds = ["optimizer", "model"] if paths[victim] else []
        chosen = [path for path in paths[victim] if path.startswith(dice.choice(kinds))]
        path = dice.choice(chosen or paths[victim])
        if rank == victim:
            flip(mine[path], random.Random(trial))
        comparison = tr.compare_ranks(one.state, group, detail=trial % 5 == 0)
        if rank == victim:
            flip(mine[path], random.Random(trial))
        (differing,) = comparison.differing
        assert differing.path == path and victim in differing.ranks, (comparison, path, victim)
        team = 2 if kind != "ddp" and world % 2 == 0 and not path.endswith("step") else world
        assert len(differing.ranks) == (2 if team == 2 else 1), (comparison, victim)
        if trial % 5 == 0:
            (how,) = comparison.details
            assert how.counted and how.differing == 1 and victim in how.ranks
            assert rank not in how.ranks or how.elements == mine[path].numel()
        found += 1
    assert tr.compare_ranks(one.state, group).equal
    return found


@pytest.mark.parametrize(("kind", "world"), JOBS)
def test_a_flipped_bit_is_found(kind: str, world: int, request: pytest.FixtureRequest) -> None:
    pool: RankPool = request.getfixturevalue(f"pool{world}")
    count = rounds(TRIALS // len(JOBS))
    assert pool.run(trials, kind, count) == [count] * world


def undisturbed(rank: int, group: Any, kind: str, count: int, folder: str) -> None:
    one = job(kind, rank, group.size(), group)
    with tr.Checkpointer(folder, group=group, keep=1) as checkpointer:
        for step in range(count):
            one.train(step)
            found = tr.compare_ranks(one.state, group)
            assert found.equal and found.tensors == len(one.replicas()), found
            if step % 10 == 0:
                assert checkpointer.save(step, one.state).differing == ()


@pytest.mark.parametrize(("kind", "world"), JOBS)
def test_undisturbed_steps_are_no_alarm(
    kind: str, world: int, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    pool: RankPool = request.getfixturevalue(f"pool{world}")
    pool.run(undisturbed, kind, rounds(STEPS // len(JOBS)), str(tmp_path))


def named(rank: int, group: Any) -> None:
    state = {
        "w": {"a": torch.arange(1000.0).view(10, 100), "b": torch.ones(7, dtype=torch.bfloat16)},
        "rng": torch.full((4,), rank),
        "other": torch.ones(rank + 1),
    }
    with pytest.raises(UsageError, match="replicated="):
        tr.compare_ranks(state, group)
    assert tr.compare_ranks(state, group, replicated="w").tensors == 2
    assert tr.compare_ranks(state, group, replicated=["w", "other"]).equal  # of other shapes
    if rank == 2:
        state["w"]["a"][3, 4] = -1.0
        state["w"]["a"][9, 99] = 5.0
        state["w"]["b"][6] = 2.0
    found = tr.compare_ranks(state, group, replicated="w", detail=True)
    assert [one.ranks for one in found.differing] == [(2,), (2,)]
    first, second = found.details
    assert (first.path, first.at, first.elements, first.differing) == ("w.a", (3, 4), 1000, 2)
    assert first.ranks == (0, 2)
    assert first.values == ("304.0 (0x43980000)", "-1.0 (0xbf800000)")
    assert second.at == (6,) and second.values == ("1.0 (0x3f80)", "2.0 (0x4000)")
    text = str(found)
    assert "replicas of 2 tensors differ: 2 tensors of 4,014 bytes" in text
    assert "element (3, 4) is -1.0 (0xbf800000) on rank 2 and 304.0 (0x43980000) on rank 0" in text
    with pytest.raises(ReplicaError, match=r"w\.a \(named\) on rank 2; w\.b") as caught:
        found.raise_if_different()
    assert caught.value.differing == found.differing
    state["w"]["c"] = torch.ones(3)
    assert tr.compare_ranks(state, group, replicated="w", exclude=["w.a", "w.b*"]).tensors == 1


def test_tensors_of_plain_dicts(pool3: RankPool) -> None:
    with pytest.raises(Exception, match="replicated="):
        pool3.run(nothing_left)
    pool3.run(named)


def nothing_left(rank: int, group: Any) -> None:
    tr.compare_ranks({"w": torch.ones(2)}, group, replicated="w", exclude="*")


def drifted(rank: int, group: Any) -> None:
    """A rank that drifted in much of a large tensor, and in more tensors than are listed."""
    torch.manual_seed(rank == 1)
    state = {"large": torch.randn(3_000_000), "some": [torch.randn(3) for _ in range(300)]}
    found = tr.compare_ranks(state, group, replicated="*", detail=True)
    assert found.differ == 301 and len(found.differing) == 256 and not found.equal
    assert {one.ranks for one in found.differing} == {(0, 1)}
    assert len(found.details) == 16
    large = found.details[0]
    assert large.path == "large" and not large.counted and large.at == (0,)
    assert 60_000 < large.differing < large.elements == 3_000_000
    assert "at least" in str(large) and str(found).endswith("and 45 more")
    with pytest.raises(ReplicaError, match="and 297 more"):
        found.raise_if_different()


def test_a_rank_that_drifted(pool2: RankPool) -> None:
    pool2.run(drifted)


def kept_structure(rank: int, group: Any) -> None:
    """The structure of a state is kept between calls; each change of it counts."""
    state: dict[str, Any] = {"a": torch.ones(5), "b": torch.ones(5)}
    assert tr.compare_ranks(state, group, replicated="a").tensors == 1
    assert tr.compare_ranks(state, group, replicated="*").tensors == 2
    state["c"] = torch.ones(3) * rank
    found = tr.compare_ranks(state, group, replicated="*")
    assert [one.path for one in found.differing] == ["c"]
    state["c"] = torch.ones(3).to_sparse()  # is taken apart
    assert tr.compare_ranks(state, group, replicated=["a", "b"]).tensors == 2
    state["a"] = torch.full((5,), float(rank))  # another tensor of the same structure
    del state["c"]
    found = tr.compare_ranks(state, group, replicated="*")
    assert [one.path for one in found.differing] == ["a"]
    state["b"] = torch.ones(0)
    tr.compare_ranks({**state, "a": torch.ones(5)}, group, replicated="*").raise_if_different()
    state["b"] = torch.full((2,), float(rank))  # was empty
    found = tr.compare_ranks({**state, "a": torch.ones(5)}, group, replicated="*")
    assert [one.path for one in found.differing] == ["b"]
    state["b"] = torch.full((2,), rank + 1.0).to_sparse()  # in the same place
    found = tr.compare_ranks({**state, "a": torch.ones(5)}, group, replicated="*")
    assert all(one.path.startswith("b") for one in found.differing) and not found.equal
    state["b"] = torch.ones(2)
    state["a"] = torch.ones(10)[::2]
    assert tr.compare_ranks(state, group, replicated="*").equal  # however the elements lie


def test_a_structure_that_changes(pool2: RankPool) -> None:
    pool2.run(kept_structure)


def test_a_process_alone_has_nothing_to_compare() -> None:
    found = tr.compare_ranks({"w": torch.ones(3)})
    assert found.equal and found.tensors == 0
    assert str(found).startswith("replicas are equal: 0 tensors of 0 bytes compared")


def test_bad_arguments() -> None:
    with pytest.raises(UsageError, match="replicated"):
        tr.compare_ranks({}, replicated=3)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="exclude"):
        tr.compare_ranks({}, exclude=[3])  # type: ignore[list-item]


def test_memory_that_is_not_there_is_refused() -> None:
    tensor = torch.ones(4)
    tensor.untyped_storage().resize_(8)
    with pytest.raises(tr.errors.UnsupportedLeafError, match=r"at w"):
        tr.compare_ranks({"w": tensor}, replicated="w")
