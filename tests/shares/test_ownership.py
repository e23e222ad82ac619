"""Who writes what of a save: every element once, by ranks that need not tell each other much."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch.distributed._shard.sharded_tensor import Shard as OldShard
from torch.distributed._shard.sharded_tensor import init_from_local_shards
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import torchrelay as tr
from tests.support.ranks import RankPool
from torchrelay.describing.at_rest import describe
from torchrelay.errors import CheckpointError
from torchrelay.record.rows import LeafRows
from torchrelay.record.schema import Record
from torchrelay.shares import comparison, ownership
from torchrelay.shares.comparison import Assignment, Details, DetailsRequest, RankTensor, Row
from torchrelay.shares.outlines import merge
from torchrelay.shares.planner import SavePlan, SharePlanner

SEED = 11
answer_of = msgspec.msgpack.Decoder(DetailsRequest | Assignment)


def plan(states: list[Any]) -> tuple[Record, list[list[str]], int, int]:
    """Plan a save of these states, one a rank. Returns the outlines, what each rank writes by name,
    the rounds that it took, and the bytes that the coordinator got."""
    world = len(states)
    ranks = [SavePlan(SharePlanner(rank, world, None), state) for rank, state in enumerate(states)]
    said = [one.digests() for one in ranks]
    sent = sum(map(len, said))
    answers = list(map(answer_of.decode, ranks[0].compare(said)))
    rounds = 1
    if isinstance(answers[0], DetailsRequest):
        said = [one.details(answer) for one, answer in zip(ranks, answers, strict=True)]
        sent += sum(map(len, said))
        answers = list(map(answer_of.decode, ranks[0].assign(said)))
        rounds += 1
    shares = [one.share(answer) for one, answer in zip(ranks, answers, strict=True)]
    assert ranks[0].nbytes == sum(x.nbytes for one in shares for x in one.tensors)
    assert ranks[0].outlined is not None
    names = [[entry.name for entry in one.layout.entries] for one in shares]
    return ranks[0].outlined, names, rounds, sent


def test_what_all_ranks_have_is_written_once_and_in_equal_shares() -> None:
    state = {"model": {str(n): torch.full((64, n + 1), float(n)) for n in range(40)}, "step": 7}
    outlines, written, rounds, _ = plan([state] * 4)
    assert rounds == 1
    assert Counter(name for names in written for name in names) == Counter(
        f"model.{n}" for n in range(40)
    )
    sizes = [sum(int(name.split(".")[1]) + 1 for name in names) for names in written]
    assert max(sizes) - min(sizes) <= 2, sizes
    assert outlines.ranks == (0, 0, 0, 0) and not outlines.differences


def test_what_a_rank_has_of_its_own_is_written_by_it_under_its_own_name() -> None:
    shared = {str(n): torch.full((9,), float(n)) for n in range(20)}
    states = [{**shared, "rng": torch.full((5,), float(rank)), "at": rank} for rank in range(3)]
    outlines, written, rounds, _ = plan(states)
    assert rounds == 2
    found = Counter(name for names in written for name in names)
    assert found == Counter([*map(str, range(20)), "rng", "rng@rank-1", "rng@rank-2"])
    assert [f"rng@rank-{rank}" in written[rank] for rank in (1, 2)] == [True, True]
    assert len(outlines.outlines) == 1 and [own.rank for own in outlines.differences] == [1, 2]
    names = dict(outlines.names)
    assert [names[image] for _, image in outlines.differences[1].images] == ["rng@rank-2"]
    assert [rows[-1].value for rows in (LeafRows(outlines, rank) for rank in range(3))] == [0, 1, 2]


def test_a_name_that_is_taken_is_not_given_again() -> None:
    states = [{"x": torch.full((2,), float(rank)), "x@rank-1": torch.ones(3)} for rank in range(2)]
    _, written, _, _ = plan(states)
    assert sorted(name for names in written for name in names) == ["x", "x@rank-1", "x@rank-1~"]


def test_stages_of_a_pipeline_write_what_they_have() -> None:
    """Ranks 0 and 1 have the first half of a model, ranks 2 and 3 the second."""
    stages = [{f"layer.{8 * s + n}": torch.full((4,), float(n)) for n in range(8)} for s in (0, 1)]
    outlines, written, _, _ = plan([{"model": stages[rank // 2]} for rank in range(4)])
    assert Counter(name for names in written for name in names) == Counter(
        f"model.layer.{n}" for n in range(16)
    )
    assert all(written), "each of the four has something to write"
    assert outlines.ranks == (0, 0, 1, 1)


def test_little_is_told_of_what_is_the_same() -> None:
    """A thousand tensors that are the same cost the coordinator what ten of them do; what differs
    adds the rows of its bucket."""
    few, many = ({str(n): torch.full((2,), 1.0) for n in range(count)} for count in (10, 1000))
    _, _, _, little = plan([few] * 4)
    _, _, _, told = plan([many] * 4)
    assert told <= little + 64 and told < 4 * 2300
    _, _, _, more = plan([{**many, "rng": torch.full((4,), float(r))} for r in range(4)])
    assert more - told < 4 * 3 * 1001 // comparison.BUCKETS * 60


def random_world(dice: random.Random) -> list[dict[str, torch.Tensor]]:
    world = dice.randint(1, 5)
    states: list[dict[str, torch.Tensor]] = [{} for _ in range(world)]
    for number in range(dice.randint(0, 30)):
        holders = dice.sample(range(world), dice.randint(1, world))
        if dice.random() < 0.5:
            holders = list(range(world))
        kinds = dice.choice([1, 1, 1, 2])
        for rank in sorted(holders):
            value = float(dice.randrange(kinds))
            states[rank][f"t{number}"] = torch.full(
                (dice.choice([1, 7]) if kinds > 1 else 3,), value
            )
    return states


def test_every_value_of_random_worlds_is_written_once() -> None:
    print(f"seed {SEED}")
    for trial in range(200):
        states = random_world(random.Random(SEED * 1000 + trial))
        _, written, _, _ = plan(list(states))
        names = [name for names in written for name in names]
        assert len(set(names)) == len(names), trial
        first: dict[str, torch.Tensor] = {}
        for rank, state in enumerate(states):
            for name, tensor in state.items():
                if torch.equal(first.setdefault(name, tensor), tensor):
                    assert name in names, (trial, rank, name)
                else:
                    assert f"{name}@rank-{rank}" in written[rank], (trial, rank, name)


def test_rows_of_another_rank_that_cannot_be_are_refused() -> None:
    mine = describe({"w": torch.zeros(4)})
    outlined, leaf = (mine.record, mine.names), LeafRows(mine.record)[0]
    for sent, refusal in {
        (9, leaf): "leaf 9 of 1",
        (0, msgspec.structs.replace(leaf, storage=9)): "image 9 of 1",
    }.items():
        details = [Details([], []), Details([], [sent])]
        with pytest.raises(CheckpointError, match=refusal) as wrong:
            merge([b"same"] * 2, [outlined, None], details, [Assignment()] * 2)
        assert wrong.value.rank == 1
    two = [Details([Row("w", fact, mesh)], []) for fact, mesh in ((b"a", b"m"), (b"b", b"m"))]
    with pytest.raises(CheckpointError, match="different layouts") as refused:
        ownership.assignments(two, (0,), ("w",))
    assert refused.value.rank == 1 and refused.value.path == "w"
    short = msgspec.msgpack.encode([b"", bytes(16), bytes(1024)])
    planning = SavePlan(SharePlanner(0, 2, None), {"w": torch.zeros(4)})
    first = planning.digests()
    with pytest.raises(CheckpointError) as unread:
        planning.compare([first, short])
    assert unread.value.rank == 1


def test_one_of_each_team_writes_and_the_load_is_even() -> None:
    teams = [[RankTensor(str(n), b"", 1 + n % 7, r, 3, b"t") for n in range(50)] for r in range(3)]
    shares = [ownership.written_by_rule(team) for team in teams]
    assert sorted(name for share in shares for name in share) == sorted(map(str, range(50)))
    loads = [sum(1 + int(name) % 7 for name in share) for share in shares]
    assert max(loads) - min(loads) <= 7


def old_shards(whole: torch.Tensor, rank: int, pair: Any) -> Any:
    """A ShardedTensor of this rank and the one beside it, two rows each."""
    first = rank % 2 * 2
    rows = whole[first : first + 2].clone()
    mine = [OldShard.from_tensor_and_offsets(rows, [first, 0], rank)]
    return init_from_local_shards(mine, list(whole.shape), process_group=pair)


def save_on_meshes(rank: int, group: Any, root: str) -> list[str]:
    """Replicas by placement, replicas on a mesh each, and two tensors under one name."""
    found = []
    whole = torch.arange(24.0).reshape(4, 6)
    grid = DeviceMesh("cpu", torch.arange(4).reshape(2, 2))
    pairs = [DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [2, 3])]
    here = pairs[rank // 2]
    state = {
        "hybrid": distribute_tensor(whole, grid, [Replicate(), Shard(0)]),
        "apart": distribute_tensor(whole, here, [Shard(1)]),
        "old": old_shards(whole, rank, here.get_group()),  # as of FSDP1's HYBRID_SHARD
        "plain": whole.clone(),
        "rank": rank,
    }
    with tr.Checkpointer(root, group=group, timeout=60) as there:
        there.save(1, state)
        blank: dict[str, Any] = {
            name: torch.zeros_like(x) if isinstance(x, torch.Tensor) else -1
            for name, x in state.items()
            if name != "old"
        }
        blank["old"] = old_shards(torch.zeros_like(whole), rank, here.get_group())
        got: Any = there.load(into=blank).state
        for name in ("hybrid", "apart"):
            full = got[name].full_tensor() if isinstance(got[name], DTensor) else None
            if full is None or not torch.equal(full, whole):
                found.append(f"{name} is another")
        if not torch.equal(got["old"].local_tensor(), whole[rank % 2 * 2 :][:2]):
            found.append("old is another")
        if not torch.equal(got["plain"], whole) or got["rank"] != rank:
            found.append("a plain leaf is another")
        state["apart"] = distribute_tensor(whole + rank // 2, here, [Shard(1)])
        try:
            there.save(2, state)
            found.append("two tensors under one name were saved as one")
        except CheckpointError as fault:
            if "other values" not in str(fault) or fault.path != "apart":
                found.append(str(fault))
        found += [] if there.steps() == [1] else ["a step is there that failed"]
    return found


def test_replicas_on_meshes(pool4: RankPool, tmp_path: Path) -> None:
    assert pool4.run(save_on_meshes, str(tmp_path)) == [[]] * 4
    total = sum(file.stat().st_size for file in tmp_path.glob("step-1/*.safetensors"))
    assert total < 3 * 96 + 4 * 600, "each element is written once"
