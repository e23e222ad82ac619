"""The cost of dicts that a peer chose: tries are counted, one dict alone and all of a record."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from torchrelay.errors import ManifestError
from torchrelay.record import manifest as m
from torchrelay.record import probing
from torchrelay.record.checks.tree import TreeLimits, check_tree
from torchrelay.record.keys import check_keys

KEYS = 2_000
REGULAR = tuple((np.arange(KEYS, dtype=np.int64) << 36).tolist())
RANDOM = tuple(np.random.default_rng(3).integers(0, 1 << 62, KEYS).tolist())


@pytest.fixture
def tries(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The tries that were counted so far."""
    spent: list[int] = []
    spend = probing._Budget.spend

    def spy(self: probing._Budget, tries: int) -> None:
        spent.append(tries)
        spend(self, tries)

    monkeypatch.setattr(probing._Budget, "spend", spy)
    yield spent


def record_of(keys: tuple[int, ...], dicts: int) -> m.Node:
    """A list of dicts that all have these keys."""
    numbers = iter(range(len(keys) * dicts))
    return m.SequenceNode(
        "list",
        tuple(
            [m.DictNode("dict", keys, tuple([next(numbers) for _ in keys])) for _ in range(dicts)]
        ),
    )


def check(keys: tuple[int, ...], dicts: int) -> None:
    check_tree(record_of(keys, dicts), len(keys) * dicts, TreeLimits())


def test_regular_numbers_take_more_than_the_free_tries_and_random_ones_do_not(
    tries: list[int],
) -> None:
    check_keys(RANDOM)
    assert sum(tries) <= probing.FREE_TRIES * KEYS + probing._FREE_SLACK
    tries.clear()
    check_keys(REGULAR)
    free = probing.FREE_TRIES * KEYS + probing._FREE_SLACK
    assert free < sum(tries) < probing.TRIES * KEYS


def test_dicts_of_one_record_share_what_goes_beyond_the_free_tries(
    tries: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    check_keys(REGULAR)
    one = sum(tries)
    beyond = one - probing.FREE_TRIES * KEYS - probing._FREE_SLACK
    monkeypatch.setattr(probing, "MORE_TRIES", 3 * beyond)
    check(REGULAR, 3)
    check(RANDOM, 40)
    tries.clear()
    with pytest.raises(ManifestError, match="keys whose hashes collide"):
        check(REGULAR, 40)
    assert sum(tries) <= 4 * one, "the fourth dict is refused before the rest is looked at"
    check(REGULAR, 3)  # another record has its own


def test_a_long_record_is_refused_after_tries_that_are_linear_in_its_length(
    tries: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """However a peer divides its keys among dicts."""
    monkeypatch.setattr(probing, "MORE_TRIES", 1 << 16)
    for keys, dicts in ((REGULAR, 30), (REGULAR[:300], 200), (REGULAR[:1000], 60)):
        tries.clear()
        try:
            check(keys, dicts)
        except ManifestError:
            pass
        free = dicts * (probing.FREE_TRIES * len(keys) + probing._FREE_SLACK)
        assert sum(tries) <= free + (1 << 16) + max(tries)
