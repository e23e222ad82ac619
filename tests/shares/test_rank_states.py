"""Every rank of a step finds its own state in the one record, whatever the ranks have in common."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from tests.support.states import assert_same
from torchrelay.landing.options import LandingOptions
from torchrelay.loading.rank_load import RankLoad
from torchrelay.record.encoding import encode
from torchrelay.shares.commit_record import commit_record, decode_shares, sealed
from torchrelay.shares.comparison import Assignment, DetailsRequest
from torchrelay.shares.planner import SavePlan, SharePlanner
from torchrelay.stores.locate import open_store
from torchrelay.stores.opening import open_step
from torchrelay.stores.tokens import new_token

SEED = 3
TRIALS = 60
answer_of = msgspec.msgpack.Decoder(DetailsRequest | Assignment)


KINDS = 14


def leaf(dice: random.Random, value: float, kind: int) -> Any:
    """A leaf; a record has each kind of them in another way."""
    tensor = torch.arange(12.0).reshape(3, 4) + value
    makes: list[Any] = [
        tensor,
        tensor[: dice.choice([1, 3])].clone(),
        tensor.t(),
        tensor.to(torch.float64),
        torch.nn.Parameter(tensor),
        torch.ones(0, 2),
        torch.complex(tensor, tensor).conj(),
        [tensor[0], tensor[0, 1:], tensor],
        tensor[0].expand(5, 4),
        np.full(dice.choice([2, 3]), value, ">i4"),
        tensor.to(torch.float8_e5m2),
        tensor.to_sparse(),
        value,
        {"deep": value, "more": tensor + 1},
    ]
    assert len(makes) == KINDS
    return makes[kind]


def states(dice: random.Random) -> list[dict[str, Any]]:
    """Ranks that share most of their state; some leaves differ, are tied, or are missing."""
    world = dice.randint(1, 4)
    kinds = {f"k{n}": dice.randrange(KINDS) for n in range(dice.randint(1, 8))}
    shared = {name: leaf(dice, float(n), kinds[name]) for n, name in enumerate(kinds)}
    if dice.random() < 0.5:
        shared["tied"] = shared["k0"]
    found = [dict(shared) for _ in range(world)]
    alike = dice.random() < 0.6
    for name, kind in kinds.items():
        if dice.random() < 0.4:
            for state in found:
                if dice.random() < 0.5:
                    other = kind if alike else dice.randrange(KINDS)
                    state[name] = leaf(dice, float(dice.randint(0, 2)), other)
                elif not alike and dice.random() < 0.2:
                    del state[name]
    return found


def save(root: Path, all_ranks: list[dict[str, Any]]) -> None:
    """What `Checkpointer.save` does on each rank, one rank after the other."""
    world = len(all_ranks)
    plans = [
        SavePlan(SharePlanner(rank, world, None), state) for rank, state in enumerate(all_ranks)
    ]
    answers = list(map(answer_of.decode, plans[0].compare([one.digests() for one in plans])))
    if isinstance(answers[0], DetailsRequest):
        said = [one.details(answer) for one, answer in zip(plans, answers, strict=True)]
        answers = list(map(answer_of.decode, plans[0].assign(said)))
    draft = open_store(root).draft(1, new_token())
    draft.begin()
    shares = []
    for plan, answer in zip(plans, answers, strict=True):
        share = plan.share(answer)
        shares.append(encode(share.written(share.write_to(draft) if share.files else [])))
    assert plans[0].outlined is not None
    draft.commit(sealed(commit_record(1, decode_shares(1, shares), plans[0].outlined)))


def test_every_rank_finds_its_state(tmp_path: Path) -> None:
    print(f"seed {SEED}")
    outlines = differences = 0
    for trial in range(TRIALS):
        all_ranks = states(random.Random(SEED * 1000 + trial))
        root = tmp_path / str(trial)
        save(root, all_ranks)
        opened = open_step(open_store(root), 1)
        outlines += len(opened.record.outlines) > 1
        differences += bool(opened.record.differences)
        for rank, state in enumerate(all_ranks):
            options = LandingOptions(rank=rank)
            load = RankLoad(opened.files, opened.record, None, options, world=len(all_ranks))
            load.check()
            load.make(verify=True)
            assert_same(state, load.end(verify=True).state, at_rest=True)
        opened.close()
    assert outlines > TRIALS // 10 and differences > TRIALS // 10
