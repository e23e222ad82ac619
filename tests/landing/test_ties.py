"""Destinations in one piece of memory: apart or not, as counting each byte would tell."""

from __future__ import annotations

from itertools import product
from random import Random

import pytest
import torch

from tests.support.trips import trip
from torchrelay.errors import MismatchError
from torchrelay.landing.checks.ties import _are_disjoint, _Claim


def bytes_of(claim: _Claim) -> set[int]:
    steps = (range(0, n * s, s) for n, s in zip(claim.shape, claim.strides, strict=True))
    return {claim.address + sum(at) for at in product(*steps)}


def test_boxes_that_are_said_to_be_apart_share_no_byte() -> None:
    random, told = Random(0), 0
    for _ in range(4000):
        strides = [12, 2, 1] if random.random() < 0.7 else [random.choice([5, 6, 8, 12]), 3, 1]
        claims = []
        for _ in range(random.randint(2, 3)):
            shape = (random.randint(1, 4), random.randint(1, 4), random.randint(1, 2))
            order = random.sample(range(3), 3)
            mine = [tuple(column[d] for d in order) for column in (shape, strides)]
            claims.append(_Claim(random.randrange(40), mine[0], mine[1], 0, mine[1], 0))
        if _are_disjoint(claims):
            told += 1
            assert len(set().union(*map(bytes_of, claims))) == sum(
                len(bytes_of(claim)) for claim in claims
            )
    assert told > 200


def test_columns_of_a_matrix_are_disjoint_and_those_that_overlap_are_not() -> None:
    state = {"a": torch.arange(6.0).view(2, 3), "b": torch.arange(8.0).view(4, 2)}
    matrix = torch.zeros(2, 7)
    trip(state, into={"a": matrix[:, :3], "b": matrix[:, 3:].t()})
    assert torch.equal(matrix, torch.cat([state["a"], state["b"].t()], 1))
    with pytest.raises(MismatchError, match="shares memory"):
        trip(state, into={"a": matrix[:, 1:4], "b": matrix[:, 3:].t()})


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_tensor_and_its_transpose_take_one_value_alone(device: str) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no GPU here")
    mine = torch.zeros(4, 4, device=device)
    with pytest.raises(MismatchError, match="shares memory"):
        trip({"a": torch.ones(4, 4), "b": torch.zeros(4, 4)}, into={"a": mine, "b": mine.t()})
    same = torch.arange(16.0).view(4, 4)
    trip({"a": same, "b": same.t()}, into={"a": mine, "b": mine.t()})
    assert torch.equal(mine.cpu(), same)
