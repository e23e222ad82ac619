"""Snapshots: what a capture says of a state as it is now, and where its bytes are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.rounds import rounds
from tests.support.states import assert_same
from tests.support.trips import trip
from torchrelay.describing.snapshot import Snapshot, capture
from torchrelay.errors import UnsupportedLeafError
from torchrelay.landing.fitting import split
from torchrelay.landing.land import land
from torchrelay.landing.options import LandingOptions
from torchrelay.landing.pairing import paired
from torchrelay.planning.catalog import LiveCatalog
from torchrelay.planning.destination import Destination
from torchrelay.record import manifest as m
from torchrelay.record.encoding import decode, encode
from torchrelay.record.rows import LeafRows
from torchrelay.state.matching import Matched

State = dict[Any, Any]
Mutation = Callable[[State], object]


def build() -> State:
    flat = torch.arange(40.0)
    tied = torch.arange(6.0)
    many = {f"m{n}": torch.full((3,), float(n)) for n in range(70)}
    return {
        "a": torch.arange(12.0).reshape(3, 4),
        "b": torch.ones(3, 4),
        "half": torch.ones(3, 4, dtype=torch.bfloat16),
        "weight": torch.nn.Parameter(torch.ones(2, 2)),
        "column": torch.arange(12.0).reshape(3, 4)[:, 1],
        "views": [flat[:8], flat[24:], flat[8:16]],
        "tied": [tied, tied],
        "same memory": [many["m0"].view(3, 1)],
        "many": many,
        "array": np.arange(5),
        "empty": torch.empty(0, 3),
        "z": torch.ones(2, dtype=torch.complex64).conj(),
        "step": 1,
        "rate": 0.5,
        True: torch.zeros(2),
    }


def swap_key(state: State) -> None:
    value = state.pop(True, None)
    state[1] = torch.zeros(2) if value is None else value  # equal to True, and another key


def new_data(state: State) -> None:
    state["a"].data = torch.zeros(3, 4)


def other_storage(state: State) -> None:
    """The same memory in another storage, which others then do not share."""
    state["views"][0] = torch.from_numpy(state["views"][0].detach().numpy())


def one_storage(state: State) -> None:
    flat = torch.zeros(24)
    state["a"], state["b"] = flat[:12].view(3, 4), flat[12:].view(3, 4)


MUTATIONS: dict[str, Mutation] = {
    "nothing": lambda s: None,
    "value": lambda s: s.update(step=s["step"] + 1 if type(s["step"]) is int else 7),
    "bool for int": lambda s: s.update(step=True),
    "negative zero": lambda s: s.update(rate=-0.0),
    "zero": lambda s: s.update(rate=0.0),
    "bytes": lambda s: s["a"].detach().fill_(5),
    "swapped": lambda s: s.update(a=s["b"], b=s["a"]),
    "replaced": lambda s: s.update(b=torch.full((3, 4), 9.0)),
    "resized": lambda s: s["many"]["m1"].resize_(2),
    "transposed": lambda s: s["half"].t_(),
    "unsqueezed": lambda s: s["b"].unsqueeze_(0),
    "data": new_data,
    "other storage": other_storage,
    "one storage": one_storage,
    "gradient": lambda s: s["b"].requires_grad_(not s["b"].requires_grad),
    "frozen": lambda s: s["weight"].requires_grad_(not s["weight"].requires_grad),
    "parameter": lambda s: s.update(b=torch.nn.Parameter(s["b"].detach(), False)),
    "dtype": lambda s: s.update(a=s["a"].detach().view(torch.int32)),
    "negated": lambda s: s.update(a=torch._neg_view(s["a"].detach())),
    "key": lambda s: s.update(new=torch.ones(1)),
    "key of another type": swap_key,
    "reordered": lambda s: s.update(a=s.pop("a")),
    "tie": lambda s: s.update(b=s["a"]),
    "view": lambda s: s.update(b=s["a"].detach()[1:]),
    "overlap": lambda s: s["views"].append(s["views"][0].detach()[4:]),
    "view apart": lambda s: s["many"].update(m3=s["many"]["m2"].detach()[1:]),
    "array": lambda s: s["array"].__setitem__(0, 77),
    "new array": lambda s: s.update(array=np.arange(6)),
    "column written": lambda s: s["column"].fill_(3),
    "new column": lambda s: s.update(column=torch.arange(9.0).reshape(3, 3)[:, 2]),
    "tensor for value": lambda s: s.update(step=torch.ones(2)),
    "inference": lambda s: s.update(b=_inference()),
}


def _inference() -> torch.Tensor:
    with torch.inference_mode():
        return torch.ones(3, 4)


def content(snapshot: Snapshot) -> bytes:
    out = b""
    for index, size in enumerate(snapshot.chunks.sizes):
        chunk = torch.full((size,), 255, dtype=torch.uint8)
        snapshot.read(index, chunk)
        out += chunk.numpy().tobytes()
    return out


def changed_state(names: list[str]) -> State:
    state = build()
    for name in names:
        try:
            MUTATIONS[name](state)
        except (KeyError, RuntimeError, AttributeError, IndexError, ValueError):
            continue  # does not go together with one before
    return state


# What is captured


@given(st.lists(st.sampled_from(sorted(MUTATIONS)), max_size=5))
@settings(max_examples=rounds(150), deadline=None)
def test_every_state_arrives_as_it_is(names: list[str]) -> None:
    state = changed_state(names)
    assert_same(state, trip(state).state)
    snapshot = capture(state, 3)
    assert snapshot.step == 3 and snapshot.changed() is None
    assert encode(decode(snapshot.encoded())) == snapshot.encoded()


@pytest.mark.parametrize("name", sorted(MUTATIONS))
def test_each_change_alone(name: str) -> None:
    state = build()
    MUTATIONS[name](state)
    assert_same(state, trip(state).state)


def test_changes_after_a_capture_are_seen() -> None:
    state = build()
    first = capture(state)
    state["many"]["m5"].add_(1)
    second = capture(state)
    assert first.changed() == "['many']['m5']"
    assert second.changed() is None
    state["column"].add_(1)
    assert second.changed() == "['column']"


def test_what_cannot_travel_is_named() -> None:
    state: State = {"a": torch.ones(2), "x": [1, {"y": object()}]}
    with pytest.raises(UnsupportedLeafError) as caught:
        capture(state)
    assert caught.value.path == "['x'][1]['y']"


def test_large_tensors_are_seen_where_they_lie() -> None:
    big = torch.arange(1 << 19, dtype=torch.int32)
    state = {"small": torch.ones(3), "big": big.repeat(4), "odd": big.repeat(4).view(2, -1).t()}
    snapshot = capture(state)
    views = [snapshot.view(index) for index in range(len(snapshot.chunks))]
    assert sum(view is not None for view in views) >= 4
    for index, view in enumerate(views):
        read = torch.empty(snapshot.chunks.sizes[index], dtype=torch.uint8)
        snapshot.read(index, read)
        assert view is None or torch.equal(view, read)


# Where it goes


def one_by_one(
    pairs: list[Any], rows: LeafRows, prepared: Destination, chunks: Any
) -> tuple[list[tuple[int, ...]], list[Any]]:
    """What `split` does in columns, leaf by leaf."""
    plain = prepared.layout.plain
    kinds = map(plain.kinds.__getitem__, plain.kind_of.tolist())
    facts = zip(kinds, plain.addresses.tolist(), strict=True)
    known = dict(zip(plain.leaves.tolist(), facts, strict=True))
    pieces: list[tuple[int, ...]] = []
    rest = []
    for pair in pairs:
        index, _, here = pair
        leaf, there = rows[index], known.get(here)
        if there is not None and type(leaf) is m.TensorLeaf and leaf.storage >= 0:
            kind, address = there
            odd = leaf.flags & m.META
            same = (leaf.strides, leaf.shape, leaf.dtype) == (None, kind.shape, kind.dtype)
            if same and not odd:
                at = chunks.start_of(leaf.storage) + leaf.offset
                pieces.append((at, address, kind.nbytes, leaf.storage, here))
                continue
        rest.append(pair)
    return sorted(set(pieces)), rest


@given(st.lists(st.sampled_from(sorted(MUTATIONS)), max_size=3), st.booleans())
@settings(max_examples=rounds(80), deadline=None)
def test_columns_are_split_as_leaves_one_by_one(names: list[str], offer: bool) -> None:
    source, into = (changed_state(names), build())[:: 1 if offer else -1]
    snapshot, destination = capture(source), Destination(into)
    rows = LeafRows(snapshot.record)
    options = LandingOptions(strict=False)
    matched = paired(LiveCatalog(snapshot.record), destination, options).matched
    pieces, rest = one_by_one(matched.pairs, rows, destination, snapshot.chunks)
    for pairs in (matched, Matched(matched.pairs)):
        found, left = split(pairs, rows, destination, snapshot.chunks)
        columns = [
            getattr(found, name).tolist() for name in ("at", "address", "nbytes", "image", "keep")
        ]
        assert sorted(zip(*columns, strict=True)) == pieces
        assert columns[0] == sorted(columns[0])
        assert left == rest


def test_a_landing_takes_what_was_prepared() -> None:
    source, into = build(), build()
    for leaf in into["many"].values():
        leaf.zero_()
    for _ in range(2):
        snapshot = capture(source)
        landing = land(snapshot.record, Destination(into))
        for index, size in enumerate(snapshot.chunks.sizes):
            chunk = torch.empty(size, dtype=torch.uint8)
            snapshot.read(index, chunk)
            landing.target().write(index, chunk)
        landing.commit()
        assert content(capture(into)) == content(snapshot)
        source["a"].add_(1)
