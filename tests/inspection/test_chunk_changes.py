"""Digests of chunks tell which tensors have other bytes, and say where they cannot."""

from __future__ import annotations

from msgspec.structs import replace

from torchrelay.inspection.comparison import Touched, touched
from torchrelay.inspection.opened_state import Contents
from torchrelay.planning.stored import Shard, StoredTensor
from torchrelay.record.schema import VolumeRecord


def chunked(values: list[int], tensors: dict[str, tuple[int, int]]) -> Contents:
    """A volume of 4 chunks of 8 bytes with these digests; tensors of bytes by start and length."""
    stored = tuple(
        StoredTensor(name, "uint8", (length,), (Shard((0,), (length,), 0, start),))
        for name, (start, length) in tensors.items()
    )
    digests = b"".join(bytes([value]) * 16 for value in values)
    return Contents(None, 1, stored, (VolumeRecord("v", 30, 8, None, digests),))


def test_digests_of_chunks_tell_which_tensors_changed() -> None:
    places = {"a": (2, 6), "b": (8, 10), "c": (18, 6), "d": (24, 6)}
    before = chunked([1, 2, 3, 4], places)
    assert touched(before, before) == []
    # The second chunk is all b's; the third has bytes of b and c; the last, shorter one is d's.
    assert touched(before, chunked([1, 9, 3, 4], places)) == [Touched("b", 0.8, True)]
    assert touched(before, chunked([1, 2, 9, 4], places)) == [
        Touched("b", 0.2, False),
        Touched("c", 1.0, False),
    ]
    assert touched(before, chunked([1, 2, 3, 9], places)) == [Touched("d", 1.0, True)]
    assert touched(before, chunked([9, 2, 3, 4], places)) == [Touched("a", 1.0, False)]


def test_digests_of_another_layout_leave_it_open() -> None:
    before = chunked([1, 2, 3, 4], {"a": (0, 8)})
    longer = before._replace(volumes=(replace(before.volumes[0], nbytes=31),))
    bare = before._replace(volumes=(replace(before.volumes[0], digests=b""),))
    renamed = before._replace(volumes=(replace(before.volumes[0], name="w"),))
    moved = chunked([1, 2, 3, 4], {"a": (8, 8), "b": (0, 8)})
    for after in (longer, bare, renamed, moved):
        assert touched(before, after) == [Touched("a", 1.0, False)]
    more = before._replace(volumes=(*before.volumes, VolumeRecord("new", 8, 8, None, bytes(16))))
    assert touched(before, more) == []
