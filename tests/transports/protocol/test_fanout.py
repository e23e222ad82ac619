"""The chain of receivers."""

from __future__ import annotations

from itertools import groupby

from hypothesis import given
from hypothesis import strategies as st

from tests.support.recorder import at_port
from torchrelay.transports.protocol.peers import Peer
from torchrelay.transports.protocol.sender_machine import chain
from torchrelay.transports.routes.route import Link
from torchrelay.transports.wire.messages import Join, ProcessLocation

MEMBERS = st.lists(st.tuples(st.integers(0, 99), st.sampled_from("abc")), unique_by=lambda m: m[0])


def chained(members: list[tuple[int, str]]) -> list[Link]:
    """The chain of receivers, each with its machine."""
    joins = {
        rank: Join(location=ProcessLocation(there), address=at_port(rank + 1))
        for rank, there in members
    }
    return chain([Peer(rank, join=join) for rank, join in joins.items()])


def test_a_chain_in_order() -> None:
    links = chained([(4, "a"), (2, "a"), (7, "a")])
    assert links == [
        Link(4, None, 2, 0),
        Link(2, 4, 7, 1, at_port(5)),
        Link(7, 2, None, 2, at_port(3)),
    ]
    assert chained([(1, "a")]) == [Link(1, None, None, 0)]
    assert chained([]) == []


@given(MEMBERS)
def test_each_is_fed_once_by_the_one_that_feeds_it(members: list[tuple[int, str]]) -> None:
    links = {link.rank: link for link in chained(members)}
    assert sorted(links) == sorted(rank for rank, _ in members)
    for link in links.values():
        if link.upstream is not None:
            assert links[link.upstream].downstream == link.rank
            assert links[link.upstream].depth == link.depth - 1
            assert link.address == at_port(link.upstream + 1)
        if link.downstream is not None:
            assert links[link.downstream].upstream == link.rank
    fed_by_the_sender = [link.rank for link in links.values() if link.upstream is None]
    assert fed_by_the_sender == [rank for rank, _ in members[:1]]


def test_machines_stay_together() -> None:
    where = {1: "a", 2: "b", 3: "a", 4: "", 5: "b", 6: "a"}
    assert [link.rank for link in chained(list(where.items()))] == [1, 3, 6, 2, 5, 4]


@given(MEMBERS)
def test_bytes_cross_to_a_machine_once(members: list[tuple[int, str]]) -> None:
    where = dict(members)
    ordered = [link.rank for link in chained(members)]
    machines = [machine for machine, _ in groupby(ordered, key=where.__getitem__)]
    assert machines == list(dict.fromkeys(machine for _, machine in members))
    for machine in machines:
        own = [rank for rank, there in members if there == machine]
        assert [rank for rank in ordered if where[rank] == machine] == own, "in their order"
