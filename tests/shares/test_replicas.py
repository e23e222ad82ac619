"""Ranks compare what they hold in common by one digest a team; only where it differs by tensors."""

from __future__ import annotations

import random

from torchrelay.shares.replicas import (
    LISTED,
    Replica,
    digests_of_teams,
    disagreement,
    disagreements,
    listed,
    requested,
    splits,
)

TEAM, OTHER = b"team", b"other"


def replicas(values: dict[str, bytes], team: bytes = TEAM) -> list[Replica]:
    return [Replica(team, path, "parameter", value) for path, value in values.items()]


def compared(ranks: list[list[Replica]]) -> list[tuple[str, tuple[int, ...], int]]:
    """Path, ranks in the minority, and the rank whose value stands, of what differs."""
    split = splits([digests_of_teams(one) for one in ranks])
    sent = [
        [one for one in mine if one.team in requested(split, rank)]
        for rank, mine in enumerate(ranks)
    ]
    return [(one.path, one.differing().ranks, one.right[0]) for one in disagreements(split, sent)]


def test_the_example_of_the_module() -> None:
    ranks = [replicas({"a": b"p", "b": b"q"}) for _ in range(3)]
    ranks[1] = replicas({"a": b"r", "b": b"q"})
    split = splits([digests_of_teams(one) for one in ranks])
    assert [requested(split, rank) for rank in range(3)] == [(TEAM,), (TEAM,), ()]
    assert compared(ranks) == [("a", (1,), 0)]


def test_equal_teams_send_nothing_more() -> None:
    ranks = [replicas({"a": b"p"}), replicas({"a": b"p"}), replicas({"a": b"z"}, OTHER)]
    assert splits([digests_of_teams(one) for one in ranks]) == {}


def test_the_order_of_tensors_does_not_matter() -> None:
    values = {str(n): bytes([n]) for n in range(9)}
    shuffled = dict(random.Random(1).sample(list(values.items()), 9))
    assert digests_of_teams(replicas(values)) == digests_of_teams(replicas(shuffled))


def test_of_two_ranks_both_are_named_and_the_lowest_stands() -> None:
    assert compared([replicas({"a": b"p"}), replicas({"a": b"r"})]) == [("a", (0, 1), 0)]


def test_without_a_majority_all_are_named() -> None:
    assert disagreement("a", "buffer", {0: b"x", 1: b"y", 2: b"y", 3: b"x"}).differing().ranks == (
        0,
        1,
        2,
        3,
    )
    found = disagreement("a", "buffer", {0: b"x", 1: b"y", 2: b"y", 4: b"z"})
    assert found.differing().ranks == (0, 4) and found.right == [1, 2]


def test_a_path_that_a_rank_of_the_team_lacks_is_no_replica() -> None:
    ranks = [replicas({"a": b"p", "b": b"q"}), replicas({"a": b"r"})]
    assert compared(ranks) == [("a", (0, 1), 0)]


def test_a_rank_is_only_compared_with_its_team() -> None:
    ranks = [
        replicas({"a": b"p"}),
        replicas({"a": b"x"}, OTHER),
        replicas({"a": b"p"}),
        replicas({"a": b"y"}, OTHER),
    ]
    assert compared(ranks) == [("a", (1, 3), 1)]


def test_only_the_first_are_listed_and_buffers_last() -> None:
    found = [
        disagreement(f"{n:04}", "buffer" if n < 10 else "parameter", {0: b"", 1: b"x"})
        for n in range(LISTED + 20)
    ]
    first, count = listed(found)
    assert count == LISTED + 20 and len(first) == LISTED
    assert {one.kind for one in first} == {"parameter"}
    assert first[0].path == "0010"
    short, _ = listed(found[:12])
    assert [one.kind for one in short] == ["parameter"] * 2 + ["buffer"] * 10


def test_random_teams_against_a_plain_comparison() -> None:
    for seed in range(200):
        dice = random.Random(seed)
        world, paths = dice.randint(1, 6), [f"p{n}" for n in range(dice.randint(1, 5))]
        values = [{path: dice.choice([b"x", b"x", b"y"]) for path in paths} for _ in range(world)]
        expected = []
        for path in sorted(paths):
            column = [one[path] for one in values]
            counts = {value: column.count(value) for value in column}
            most = [value for value, count in counts.items() if count == max(counts.values())]
            if len(counts) > 1:
                named = [n for n, value in enumerate(column) if [value] != most]
                expected.append((path, tuple(named), min(column.index(value) for value in most)))
        assert compared([replicas(one) for one in values]) == expected, seed
