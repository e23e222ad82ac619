"""Pickles of torch that are one opcode over and over: each would be made at a byte a piece."""

from __future__ import annotations

import pickle
import tracemalloc

import pytest

from torchrelay.dropin import _dcp_metadata
from torchrelay.dropin._pickles import state_record
from torchrelay.dropin._pickles.unpickler import PickleRefusedError, unpickled
from torchrelay.errors import ManifestError, RemoteProtocolError

COUNT = 300_000
START, END = b"\x80\x04", b"."
FLOODS = {
    "marks": (b"(" * COUNT, "marks"),
    "lists": (b"]" * COUNT, "containers"),
    "dicts": (b"}" * COUNT, "containers"),
    "nested tuples": (b")" + b"\x85" * COUNT, "containers"),
    "pairs": (b")" * COUNT + b"\x86" * (COUNT - 1), None),
    "kept values": (b"N" + b"\x94" * COUNT, "keeps more values"),
    "marks of tuples": (b"(" + b"(t" * COUNT + b"t", None),
    "nothing": (b"N" * COUNT, None),
}


@pytest.mark.parametrize("name", FLOODS)
def test_a_flood_takes_little_memory(name: str) -> None:
    body, why = FLOODS[name]
    data = START + body + END
    tracemalloc.start()
    try:
        if why is None:
            unpickled(data, frozenset())
        else:
            with pytest.raises(PickleRefusedError, match=why):
                unpickled(data, frozenset())
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    # Honest ones take 16 to 60 bytes for each of theirs.
    assert peak < 64 * len(data) + (1 << 20)


def test_marks_are_refused_where_they_come_in() -> None:
    """Not after the rest was read: that was three seconds for two million."""
    data = START + b"(" * 2_000_000 + b"\xff"  # no opcode at all
    with pytest.raises(PickleRefusedError, match="marks"):
        unpickled(data, frozenset())
    with pytest.raises(RemoteProtocolError, match="marks"):
        state_record.loads(data)
    with pytest.raises(ManifestError, match="marks"):
        _dcp_metadata.decode(data)


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_values_of_many_parts_are_taken(protocol: int) -> None:
    deep: object = 1
    for _ in range(150):
        deep = [{"a": (1, 2, 3, deep)}]
    small = [[], {}, (), (1,), [[]], None, True]
    values = [small, [[] for _ in range(9999)], [{} for _ in range(9999)], [(1,)] * 9999, deep]
    values += [[(n,) for n in range(9999)], [(n, n) for n in range(9999)], tuple(range(9999))]
    for value in values:
        try:
            data = pickle.dumps(value, protocol)
            assert unpickled(data, frozenset()) == value
        except PickleRefusedError as fault:  # an opcode of an older protocol
            assert "opcode" in str(fault)
