"""Part chunks: what is encoded is decoded bit for bit, and no payload writes outside its chunk."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from torchrelay.errors import RemoteProtocolError, UsageError
from torchrelay.parts.bitmaps import ChangedElements
from torchrelay.parts.stream import BITMAP, GAPS, SAME, WHOLE, decode, encode

ITEM_SIZES = (1, 2, 4, 8, 16)
Bytes = NDArray[np.uint8]


def chunk(elements: int, itemsize: int, seed: int = 0) -> Bytes:
    return np.random.default_rng(seed).integers(0, 256, elements * itemsize, np.uint8)


def altered(old: Bytes, at: object, itemsize: int) -> tuple[Bytes, NDArray[np.bool_]]:
    """A copy in which the elements at some positions differ, and the mask of those."""
    mask = np.zeros(len(old) // itemsize, np.bool_)
    mask[at] = True
    new = old.copy()
    new.reshape(-1, itemsize)[mask, -1] ^= 0x5A
    return new, mask


def sent(new: Bytes, mask: NDArray[np.bool_] | None, itemsize: int) -> tuple[int, bytes]:
    kind, pieces = encode(new, None if mask is None else ChangedElements.of(mask), itemsize)
    assert all(piece.itemsize == 1 for piece in pieces)
    return kind, b"".join(pieces)


def check_round_trip(old: Bytes, at: object, itemsize: int) -> tuple[int, int]:
    new, mask = altered(old, at, itemsize)
    kind, payload = sent(new, mask, itemsize)
    target = old.copy()
    decode(kind, memoryview(payload), target, itemsize)
    np.testing.assert_array_equal(target, new)
    assert len(payload) <= len(new)
    return kind, len(payload)


@pytest.mark.parametrize("itemsize", ITEM_SIZES)
@pytest.mark.parametrize(
    ("elements", "at", "kind"),
    [
        (0, [], SAME),
        (1, [], SAME),
        (1000, [], SAME),
        (1000, slice(None), WHOLE),
        (100_000, [0], GAPS),
        (100_000, [99_999], GAPS),
        (100_001, [253, 508, 764, 1021, 70_000, 100_000], GAPS),  # gaps of 253, 254, 255, 256 ...
        (300_000, [0, 65_535, 131_071, 196_608, 299_999], GAPS),  # of 65534, 65535, 65536 ...
        (4099, slice(0, None, 300), GAPS),
        (4099, slice(0, None, 50), GAPS),
        (4099, slice(0, None, 3), None),
    ],
)
def test_chunks_travel_as_the_smallest_kind(
    itemsize: int, elements: int, at: object, kind: int | None
) -> None:
    found, _ = check_round_trip(chunk(elements, itemsize), at, itemsize)
    if kind is None:
        kind = WHOLE if itemsize == 1 and elements // 3 + elements // 8 >= elements else BITMAP
    assert found == kind


def test_a_chunk_of_one_element_is_whole() -> None:
    assert check_round_trip(chunk(1, 2), [0], 2) == (WHOLE, 2)


def test_without_a_mask_a_chunk_is_whole() -> None:
    new = chunk(77, 4)
    assert sent(new, None, 4) == (WHOLE, new.tobytes())


def test_two_percent_of_changes_take_three_percent_of_the_bytes() -> None:
    old = chunk(1 << 20, 2)
    at = np.random.default_rng(1).random(1 << 20) < 0.02
    kind, nbytes = check_round_trip(old, at, 2)
    assert kind == GAPS
    assert nbytes / len(old) < 0.031


def test_rare_changes_have_gaps_of_two_bytes() -> None:
    old = chunk(1 << 20, 2)
    at = np.random.default_rng(1).random(1 << 20) < 0.001
    _, nbytes = check_round_trip(old, at, 2)
    assert nbytes < 4.1 * np.count_nonzero(at) + 12


@settings(max_examples=150, deadline=None)
@given(
    itemsize=st.sampled_from(ITEM_SIZES),
    elements=st.integers(0, 3000),
    share=st.sampled_from([0.0, 0.001, 0.01, 0.1, 0.13, 0.3, 0.9, 1.0]),
    seed=st.integers(0, 2**32 - 1),
    shift=st.integers(0, 7),
)
def test_every_mask_makes_the_round_trip(
    itemsize: int, elements: int, share: float, seed: int, shift: int
) -> None:
    rng = np.random.default_rng(seed)
    memory = rng.integers(0, 256, elements * itemsize + 8, np.uint8)
    old = memory[shift : shift + elements * itemsize]  # not aligned to its elements
    new, mask = altered(old, rng.random(elements) < share, itemsize)
    kind, payload = sent(new, mask, itemsize)
    before = memory.copy()
    decode(kind, memoryview(payload), old, itemsize)
    np.testing.assert_array_equal(old, new)
    np.testing.assert_array_equal(memory[:shift], before[:shift])
    np.testing.assert_array_equal(memory[shift + len(new) :], before[shift + len(new) :])


def gaps(count: int, wide: int, size: int, rest: bytes) -> bytes:
    return np.array([count, wide, size], "<u4").tobytes() + rest


@pytest.mark.parametrize(
    ("kind", "payload"),
    [
        (WHOLE, b""),
        (WHOLE, bytes(19)),
        (WHOLE, bytes(21)),
        (SAME, b"\0"),
        (4, b""),
        (255, bytes(20)),
        (-1, b""),
        (GAPS, b""),
        (GAPS, bytes(11)),
        (GAPS, gaps(1, 0, 0, b"\0ab")),
        (GAPS, gaps(1, 0, 3, b"\0\0\0ab")),
        (GAPS, gaps(1, 0, 1, b"")),
        (GAPS, gaps(1, 0, 1, b"\0a")),
        (GAPS, gaps(1, 0, 1, b"\0abc")),
        (GAPS, gaps(1, 0, 1, b"\x0aab")),  # element 10 of 10
        (GAPS, gaps(2, 0, 1, b"\x05\x05abcd")),
        (GAPS, gaps(11, 0, 1, bytes(11 + 22))),
        (GAPS, gaps(2**32 - 1, 2**32 - 1, 2, b"")),
        (GAPS, gaps(1, 0, 1, b"\xffab")),  # no wide gap follows
        (GAPS, gaps(1, 1, 1, b"\0\0\0\0\0ab")),  # and one that nothing refers to
        (GAPS, gaps(1, 1, 1, b"\xff\xff\xff\xff\xffab")),
        (GAPS, gaps(2, 2, 2, b"\xff" * 12 + b"abcd")),
        (GAPS, gaps(1, 2, 1, b"\xff" + bytes(8) + b"ab")),
        (BITMAP, b""),
        (BITMAP, b"\1"),
        (BITMAP, b"\1\0a"),
        (BITMAP, b"\1\0abc"),
        (BITMAP, b"\0\x04ab"),  # bit 10 of 10
    ],
)
def test_a_malformed_payload_is_refused_and_changes_nothing(kind: int, payload: bytes) -> None:
    memory = chunk(30, 2)
    before = memory.copy()
    with pytest.raises(RemoteProtocolError):
        decode(kind, memoryview(payload), memory[20:40], 2)
    np.testing.assert_array_equal(memory, before)


@settings(max_examples=300, deadline=None)
@given(
    kind=st.integers(0, 4),
    payload=st.binary(max_size=80),
    head=st.tuples(st.integers(0, 12), st.integers(0, 3), st.integers(0, 3)) | st.none(),
    itemsize=st.sampled_from(ITEM_SIZES),
)
def test_any_payload_is_decoded_inside_its_chunk_or_refused(
    kind: int, payload: bytes, head: tuple[int, int, int] | None, itemsize: int
) -> None:
    if head is not None:
        payload = gaps(*head, payload)
    memory = chunk(30, itemsize)
    before = memory.copy()
    target = memory[10 * itemsize : 20 * itemsize]
    try:
        decode(kind, memoryview(payload), target, itemsize)
    except RemoteProtocolError:
        np.testing.assert_array_equal(memory, before)
    np.testing.assert_array_equal(memory[: 10 * itemsize], before[: 10 * itemsize])
    np.testing.assert_array_equal(memory[20 * itemsize :], before[20 * itemsize :])


@pytest.mark.parametrize("itemsize", [0, -2, 3, 5, 32])
def test_elements_of_no_dtype_are_refused(itemsize: int) -> None:
    with pytest.raises(RemoteProtocolError):
        decode(GAPS, memoryview(gaps(0, 0, 1, b"")), np.zeros(30, np.uint8), itemsize)


def test_a_mask_of_another_chunk_is_refused() -> None:
    with pytest.raises(UsageError, match="changes of 9 elements"):
        encode(chunk(10, 2), ChangedElements.of(np.zeros(9, np.bool_)), 2)
