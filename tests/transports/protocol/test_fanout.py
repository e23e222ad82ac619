"""The chain of receivers."""

from __future__ import annotations

from itertools import groupby

from hypothesis import given
from hypothesis import strategies as st

from torchrelay.transports.protocol.fanout import Link, by_machine, chain

MEMBERS = st.lists(st.tuples(st.integers(0, 99), st.sampled_from("abc")), unique_by=lambda m: m[0])


def test_a_chain_in_order() -> None:
    assert chain([4, 2, 7]) == [Link(4, None, 2, 0), Link(2, 4, 7, 1), Link(7, 2, None, 2)]
    assert chain([1]) == [Link(1, None, None, 0)]
    assert chain([]) == []


@given(st.lists(st.integers(0, 99), unique=True))
def test_each_is_fed_once_by_the_one_that_feeds_it(ranks: list[int]) -> None:
    links = {link.rank: link for link in chain(ranks)}
    assert list(links) == ranks
    for link in links.values():
        if link.upstream is not None:
            assert links[link.upstream].downstream == link.rank
            assert links[link.upstream].depth == link.depth - 1
        if link.downstream is not None:
            assert links[link.downstream].upstream == link.rank
    assert [link.rank for link in links.values() if link.upstream is None] == ranks[:1]


def test_machines_stay_together() -> None:
    where = {1: "a", 2: "b", 3: "a", 4: "", 5: "b", 6: "a"}
    assert by_machine([1, 2, 3, 4, 5, 6], where.__getitem__) == [1, 3, 6, 2, 5, 4]
    assert by_machine([], where.__getitem__) == []


@given(MEMBERS)
def test_bytes_cross_to_a_machine_once(members: list[tuple[int, str]]) -> None:
    ordered = by_machine(members, lambda member: member[1])
    assert sorted(ordered) == sorted(members)
    machines = [machine for machine, _ in groupby(ordered, key=lambda member: member[1])]
    assert machines == list(dict.fromkeys(machine for _, machine in members))
    for machine in machines:
        own = [member for member in members if member[1] == machine]
        assert [member for member in ordered if member[1] == machine] == own, "in their order"
