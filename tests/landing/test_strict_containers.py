"""`strict=True` compares containers and keys, at both doors; what it takes on purpose it takes."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.records import stream_record
from torchrelay import Checkpointer
from torchrelay.describing.snapshot import capture
from torchrelay.errors import ManifestError, MismatchError, RelayError
from torchrelay.landing.land import land
from torchrelay.landing.options import LandingOptions
from torchrelay.landing.packed import pack, unpack
from torchrelay.record import manifest as m
from torchrelay.record.encoding import decode, encode

Point = namedtuple("Point", "x y")
Other = namedtuple("Other", "x y")
Door = Callable[[Any, Any, bool], Any]


def by_relay(state: Any, into: Any, strict: bool) -> Any:
    """What `Relay.recv` does with an offer, without its transport."""
    snapshot = capture(state)
    landing = land(decode(snapshot.encoded()), into, LandingOptions(strict))
    for index, nbytes in enumerate(snapshot.chunks.sizes):
        chunk = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        snapshot.read(index, chunk)
        landing.target().write(index, chunk)
    return landing.commit().state


@pytest.fixture(params=["relay", "checkpointer"])
def door(request: pytest.FixtureRequest, tmp_path: Path) -> Door:
    if request.param == "relay":
        return by_relay

    def by_checkpointer(state: Any, into: Any, strict: bool) -> Any:
        with Checkpointer(tmp_path) as checkpointer:
            checkpointer.save(1, state)
            return checkpointer.load(into=into, strict=strict).state

    return by_checkpointer


@pytest.mark.parametrize(
    ("state", "into", "said"),
    [
        pytest.param(
            {"a": [1, 2]}, {"a": {0: 0, 1: 0}}, "a list offered, a dict", id="list in dict"
        ),
        pytest.param({"a": {0: 1}}, {"a": [0]}, "a dict offered, a list", id="dict in list"),
        pytest.param({"a": (1,)}, {"a": [0]}, "a tuple offered, a list", id="tuple in list"),
        pytest.param({"a": [1]}, {"a": (0,)}, "a list offered, a tuple", id="list in tuple"),
        pytest.param(
            {"a": Point(1, 2)},
            {"a": {"x": 0, "y": 0}},
            "a namedtuple offered",
            id="namedtuple in dict",
        ),
        pytest.param({"a": []}, {"a": {}}, "a list offered, a dict", id="empty list in empty dict"),
        pytest.param(
            {"a": {}, "b": 1}, {"b": 0}, "not in the destination: ['a']", id="empty dict more"
        ),
        pytest.param({"b": 1}, {"a": [], "b": 0}, "not offered: ['a']", id="empty list less"),
        pytest.param({"a": {"c": {}}, "b": 1}, {"a": {}, "b": 0}, "['a']['c']", id="nested empty"),
    ],
)
def test_containers_that_differ_are_refused_by_path(
    door: Door, state: Any, into: Any, said: str
) -> None:
    before = repr(into)
    with pytest.raises(MismatchError) as caught:
        door(state, into, True)
    assert said in str(caught.value)
    assert repr(into) == before


@pytest.mark.parametrize(
    ("state", "into", "landed"),
    [
        pytest.param({"a": 1}, OrderedDict(a=0), OrderedDict(a=1), id="dict in OrderedDict"),
        pytest.param(OrderedDict(a=1), {"a": 0}, {"a": 1}, id="OrderedDict in dict"),
        pytest.param({"a": 1}, defaultdict(int, a=0), {"a": 1}, id="dict in defaultdict"),
        pytest.param({"a": Point(1, 2)}, {"a": Other(0, 0)}, {"a": Other(1, 2)}, id="namedtuples"),
        pytest.param({"b": 1, "a": 2}, {"a": 0, "b": 0}, {"a": 2, "b": 1}, id="another order"),
        pytest.param({1: 5}, {True: 0}, {True: 5}, id="keys that a dict takes for one"),
    ],
)
def test_containers_of_one_sort_are_taken_for_each_other(
    door: Door, state: Any, into: Any, landed: Any
) -> None:
    got = door(state, into, True)
    assert got == landed
    assert type(got) is type(into)


def test_a_key_with_a_nan_in_it_is_written(door: Door) -> None:
    nan = float("nan")
    into = {(1, nan): 0, nan: 0}
    door({(1, float("nan")): 5, float("nan"): 6}, into, True)
    assert list(into.values()) == [5, 6]


def test_without_strict_a_list_lands_by_its_places(door: Door) -> None:
    into = {"a": {0: 0, 1: 0}}
    door({"a": [1, 2]}, into, False)
    assert into == {"a": {0: 1, 1: 2}}


@pytest.mark.parametrize("how", ["default", "context"])
def test_a_default_device_does_not_matter_to_host_tensors(door: Door, how: str) -> None:
    state = {"w": torch.arange(6.0).view(2, 3), "n": torch.tensor(3), "e": torch.empty(0), "v": 1}
    into = {"w": torch.zeros(2, 3), "n": torch.tensor(0), "e": torch.empty(0), "v": 0}
    if how == "default":
        torch.set_default_device("meta")
        try:
            got = door(state, into, True)
        finally:
            torch.set_default_device(None)
    else:
        with torch.device("meta"):
            got = door(state, into, True)
    assert torch.equal(got["w"], state["w"]) and got["w"] is into["w"]
    assert got["n"].item() == 3 and got["v"] == 1


def test_a_default_device_does_not_matter_to_new_tensors() -> None:
    data = pack(
        {
            "w": torch.ones(3),
            "coo": torch.eye(2).to_sparse(),
            "csr": torch.eye(2).to_sparse_csr(),
        }
    )
    with torch.device("meta"):
        got: Any = unpack(data)
        again = pack(got)
    assert torch.equal(got["w"], torch.ones(3)) and again == data


def test_numbers_of_over_4300_digits_are_keys_and_values(door: Door) -> None:
    vast = 10**6000
    into = {vast: torch.zeros(2), "v": 0, ("t", vast): 0}
    got = door({vast: torch.ones(2), "v": vast, ("t", vast): 1}, into, True)
    assert got["v"] == vast and torch.equal(got[vast], torch.ones(2))
    with pytest.raises(RelayError):
        door({vast: torch.ones(2)}, {vast + 1: torch.ones(2)}, True)


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param(("ﬁ", "fi"), id="two fields of one name"),
        pytest.param(("＿cls",), id="a field that is private"),
        pytest.param(("x", "x"), id="a field twice"),
    ],
)
def test_fields_that_python_takes_for_one_are_refused(fields: tuple[str, ...]) -> None:
    leaves = tuple(m.ValueLeaf("plain", n) for n in range(len(fields)))
    tree = m.NamedTupleNode("N", fields, tuple(range(len(fields))))
    data = encode(stream_record(tree, leaves))
    with pytest.raises(ManifestError):
        land(decode(data)).commit()
