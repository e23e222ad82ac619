"""Bitmaps of changed elements: made from two copies, united, and read in any run."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchrelay.errors import UsageError
from torchrelay.parts.bitmaps import ChangedElements, VolumeBitmap, changed, gather, tiled, union
from torchrelay.parts.fields import Field

ITEM_SIZES = (1, 2, 4, 8, 16)


@pytest.mark.parametrize("itemsize", ITEM_SIZES)
@pytest.mark.parametrize("elements", [0, 1, 7, 8, 9, 1000, (1 << 18) + 5])
def test_changed_elements_are_found(itemsize: int, elements: int) -> None:
    rng = np.random.default_rng(itemsize)
    old = rng.integers(0, 256, elements * itemsize, np.uint8)
    new, mask = old.copy(), rng.random(elements) < 0.1
    rows = np.flatnonzero(mask)
    new.reshape(-1, itemsize)[rows, rng.integers(0, itemsize, len(rows))] ^= 1
    bits = changed(old, new, itemsize)
    assert bits.nbytes == -(-elements // 8)
    np.testing.assert_array_equal(
        np.unpackbits(bits, bitorder="little")[:elements].view(bool), mask
    )
    assert not np.unpackbits(bits, bitorder="little")[elements:].any()


def test_numbers_are_compared_by_their_bytes() -> None:
    old = np.array([np.nan, 0.0, 1.0], np.float32)
    new = np.array([np.nan, -0.0, 1.0], np.float32)
    assert changed(old.view(np.uint8), new.view(np.uint8), 4).tolist() == [0b010]


def test_copies_of_other_sizes_are_refused() -> None:
    with pytest.raises(UsageError):
        changed(np.zeros(4, np.uint8), np.zeros(6, np.uint8), 2)
    with pytest.raises(UsageError):
        changed(np.zeros(3, np.uint8), np.zeros(3, np.uint8), 2)


@pytest.mark.parametrize(
    ("placed", "nbytes", "expected"),
    [
        ([], 0, []),
        ([], 10, [(0, 10, 1)]),
        ([(8, 16, 2), (16, 24, 2)], 24, [(0, 8, 1), (8, 24, 2)]),
        ([(16, 24, 4), (8, 16, 2)], 30, [(0, 8, 1), (8, 16, 2), (16, 24, 4), (24, 30, 1)]),
        ([(0, 8, 1), (8, 8, 4), (10, 12, 2)], 12, [(0, 10, 1), (10, 12, 2)]),
        ([(0, 8, 4), (4, 12, 4)], 12, [(0, 8, 4), (8, 12, 1)]),  # overlapping
        ([(0, 8, 4), (8, 20, 4)], 18, [(0, 8, 4), (8, 18, 1)]),  # beyond the end
    ],
)
def test_fields_tile_a_volume(
    placed: list[tuple[int, int, int]], nbytes: int, expected: list[tuple[int, int, int]]
) -> None:
    assert tiled([Field(*one) for one in placed], nbytes) == expected


@settings(max_examples=200, deadline=None)
@given(
    first=st.integers(0, 40),
    each=st.integers(1, 40),
    step=st.integers(0, 500),
    count=st.integers(1, 12),
    seed=st.integers(0, 1000),
)
def test_bits_of_strided_rows_are_gathered(
    first: int, each: int, step: int, count: int, seed: int
) -> None:
    total = first + (count - 1) * step + each
    mask = np.random.default_rng(seed).random(total) < 0.3
    expected = np.concatenate([mask[first + i * step :][:each] for i in range(count)])
    found = gather(np.packbits(mask, bitorder="little"), first, each, step, count)
    np.testing.assert_array_equal(found.mask, expected)
    np.testing.assert_array_equal(found.positions(), np.flatnonzero(expected))
    assert found.count == expected.sum()  # also behind the last element no bit is set


@given(sizes=st.lists(st.integers(0, 40), min_size=1, max_size=6), seed=st.integers(0, 1000))
def test_changes_of_runs_are_joined(sizes: list[int], seed: int) -> None:
    draw = np.random.default_rng(seed)
    masks = [draw.random(size) < 0.3 for size in sizes]
    joined = ChangedElements.joined([ChangedElements.of(mask) for mask in masks])
    np.testing.assert_array_equal(joined.mask, np.concatenate(masks))
    assert joined.elements == sum(sizes) and joined.count == sum(mask.sum() for mask in masks)


def volume(seed: int) -> VolumeBitmap:
    """100 bytes of one byte each, then 200 elements of two bytes, then 50 of 16."""
    fields = [Field(0, 100, 1), Field(100, 500, 2), Field(500, 1300, 16)]
    rng = np.random.default_rng(seed)
    sizes = [100, 200, 50]
    return VolumeBitmap(
        fields, [np.packbits(rng.random(n) < 0.2, bitorder="little") for n in sizes]
    )


def test_runs_of_a_volume_are_gathered_by_bytes() -> None:
    bitmap = volume(0)
    half = np.unpackbits(bitmap.bits[1], bitorder="little")[:200].view(bool)
    whole = bitmap.gather(100, 400, 2)
    assert whole is not None
    np.testing.assert_array_equal(whole.mask, half)
    rows = bitmap.gather(110, 10, 2, stride=20, count=10)
    assert rows is not None
    expected = [flag for row in range(10) for flag in half[5 + row * 10 : 10 + row * 10]]
    np.testing.assert_array_equal(rows.mask, expected)
    assert bitmap.gather(0, 0, 1) is not None


@pytest.mark.parametrize(
    ("start", "nbytes", "itemsize", "stride", "count"),
    [
        (90, 20, 1, 0, 1),  # two fields
        (100, 10, 4, 0, 1),  # elements of another size
        (101, 10, 2, 0, 1),
        (100, 11, 2, 0, 1),
        (100, 10, 2, 11, 2),
        (100, 10, 2, 396, 2),  # the last row ends in another field
        (100, 10, 2, -20, 2),
        (-2, 1, 1, 0, 1),
        (1290, 16, 16, 0, 1),
        (5000, 16, 16, 0, 1),
    ],
)
def test_nothing_is_known_of_runs_that_are_no_whole_elements(
    start: int, nbytes: int, itemsize: int, stride: int, count: int
) -> None:
    assert volume(0).gather(start, nbytes, itemsize, stride=stride, count=count) is None


def test_bitmaps_of_several_steps_are_united() -> None:
    first, second, third = volume(0), volume(1), volume(2)
    kept = [bits.copy() for bits in first.bits]
    found = union([first, second, third])
    assert found is not None
    for bits, a, b, c in zip(found.bits, first.bits, second.bits, third.bits, strict=True):
        np.testing.assert_array_equal(bits, a | b | c)
    for bits, before in zip(first.bits, kept, strict=True):
        np.testing.assert_array_equal(bits, before)
    assert union([]) is None
    assert union([first, VolumeBitmap.none([Field(0, 1300, 1)])]) is None
    unchanged = union([first, VolumeBitmap.none(first.fields)])
    assert unchanged is not None
    assert unchanged.count == first.count
    assert first.nbytes == 13 + 25 + 7
