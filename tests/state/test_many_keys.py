"""A table by number has as many keys as it needs, through every API."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

import torchrelay as tr
from tests.support.ranks import RankPool
from tests.support.trips import trip
from torchrelay import dropin
from torchrelay.record import manifest as m
from torchrelay.record.encoding import decode, encode
from torchrelay.record.keys import check_keys
from torchrelay.state.tree import flatten, unflatten


def state(numbers: int = 200_000, tuples: int = 100_000) -> dict[str, Any]:
    """A routing table, and a cache by coordinates."""
    shared = torch.arange(3.0)
    return {
        "routes": {n * 1_000_003 - 17: None for n in range(numbers)},
        "cache": {(n // 90, n % 90 - 45, f"{n}"): shared for n in range(tuples)},
        "floats": {n / 7: True for n in range(6_000)},
        "w": shared,
    }


def check(got: Any, sent: dict[str, Any]) -> None:
    assert list(got) == list(sent)
    for name in ("routes", "floats"):
        assert [*got[name].items()] == [*sent[name].items()]
        assert {*map(type, got[name])} == {*map(type, sent[name])}
    assert list(got["cache"]) == list(sent["cache"])
    assert all(tensor is got["w"] for tensor in got["cache"].values())
    assert torch.equal(got["w"], sent["w"])


def emptied(sent: dict[str, Any]) -> dict[str, Any]:
    shared = torch.zeros(3)
    return {
        "routes": dict.fromkeys(sent["routes"], 5),
        "cache": dict.fromkeys(sent["cache"], shared),
        "floats": dict.fromkeys(sent["floats"], False),
        "w": shared,
    }


def test_saved_loaded_and_pulled(tmp_path: Path) -> None:
    sent = state()
    with tr.Checkpointer(tmp_path, timeout=120) as checkpointer:
        checkpointer.save(1, sent)
        check(checkpointer.load().state, sent)
        into = emptied(sent)
        checkpointer.load(into)
        check(into, sent)
    some = state(40_000, 6_000)
    with tr.serve(some, step=1, timeout=120) as endpoint:
        check(tr.pull(endpoint.url, timeout=120).state, some)


def sent_and_received(rank: int, group: Any) -> None:
    sent, some = state(), state(40_000, 6_000)
    with tr.Relay(group, timeout=120) as relay:
        transport = dropin.PGTransport(group, timedelta(seconds=120), torch.device("cpu"))
        if rank == 0:
            relay.send(sent, to=[1], step=1)
            relay.send(sent, to=[1], step=2)
            transport.send_checkpoint([1], some)
            return
        into = emptied(sent)
        relay.recv(0, into=into, step=1)
        check(into, sent)
        check(relay.recv(0, step=2).state, sent)
        check(transport.recv_checkpoint(0), some)


def test_sent_and_received(pool2: RankPool) -> None:
    pool2.run(sent_and_received, timeout=300)


def test_one_long_key_costs_the_others_nothing() -> None:
    """Python hashes -1 and -2 alike: of the short keys, two and two have one hash."""
    short = {(n, sign): n for n in range(5_000) for sign in (-1, -2)}
    sent = {(1,) * 100_000: 0, **short}
    state = {"keys": sent, "members": {*sent}}
    assert trip(state).state == state


@pytest.mark.slow
def test_two_million_keys(tmp_path: Path) -> None:
    sent = {n * 1_000_003 - 17: None for n in range(2_000_000)}
    tree = flatten(sent).tree
    assert isinstance(tree, m.DictNode)
    check_keys(tree.keys)
    assert unflatten(tree, [None] * len(sent)) == sent
    with tr.Checkpointer(tmp_path, timeout=1200) as checkpointer:
        checkpointer.save(1, sent)
        record = checkpointer.record(1)
        assert checkpointer.load().state == sent
    assert record.outlines[0].leaves == len(sent)


def test_two_million_keys_of_one_leaf_are_read_in_time() -> None:
    keys = tuple(n * 1_000_003 - 17 for n in range(2_000_000))
    tree = m.DictNode("dict", keys, (0,) * len(keys))
    check_keys(keys)
    from tests.support.records import stream_record

    record = decode(encode(stream_record(tree, [m.ValueLeaf("plain", None)])))
    got = unflatten(record.outlines[0].tree, [None])
    assert isinstance(got, dict) and tuple(got) == keys
