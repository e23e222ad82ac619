"""Strided runs: boxes of arrays as runs, packed, found again, cut, encoded and refused."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchrelay.errors import RemoteProtocolError
from torchrelay.parts import runs as module
from torchrelay.parts.runs import PartRuns, PartsRequest, VolumeParts, decode_request, runs_of

Columns = tuple[list[int], list[int], list[int], list[int], list[int]]


@st.composite
def boxes(draw: Any) -> tuple[int, tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """An itemsize, a shape, and the offsets and sizes of a box in it."""
    shape = tuple(draw(st.lists(st.integers(1, 5), max_size=4)))
    offsets = tuple(draw(st.integers(0, size - 1)) for size in shape)
    sizes = tuple(
        draw(st.integers(0, size - offset)) for size, offset in zip(shape, offsets, strict=True)
    )
    return draw(st.sampled_from((1, 2, 4, 8, 16))), shape, offsets, sizes


def volume_of(some: list[Any]) -> tuple[np.ndarray[Any, Any], PartRuns, np.ndarray[Any, Any]]:
    """Arrays one behind the other, the runs of the boxes, and which bytes those are."""
    boxes, start, chosen = [], 48, []
    for itemsize, shape, offsets, sizes in some:
        boxes.append((start, itemsize, shape, offsets, sizes))
        mask = np.zeros((*shape, itemsize), np.bool_)
        mask[tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))] = True
        chosen.append(mask.reshape(-1))
        start += mask.size
    wanted = np.concatenate([np.zeros(48, np.bool_), *chosen, np.zeros(16, np.bool_)])
    volume = np.random.default_rng(len(wanted)).integers(0, 256, len(wanted), np.uint8)
    return volume, runs_of(boxes, len(wanted)), wanted


@settings(deadline=None, max_examples=150)
@given(st.lists(boxes(), min_size=1, max_size=5), st.data())
def test_boxes_are_packed_and_found_again(some: list[Any], data: Any) -> None:
    volume, runs, wanted = volume_of(some)
    assert runs.total == wanted.sum()  # each needed byte once, and no other
    if not runs.total:
        return
    runs.check(len(volume))
    packed = np.empty(runs.total, np.uint8)
    cuts = sorted({0, runs.total, *data.draw(st.lists(st.integers(0, runs.total), max_size=4))})
    for begin, end in itertools.pairwise(cuts):
        runs.pack(volume, begin, end, packed[begin:end])
    again = np.zeros_like(volume)
    edges = data.draw(st.lists(st.integers(0, len(volume)), max_size=4))
    edges = sorted({0, len(volume), *edges})
    for begin, end in itertools.pairwise(edges):
        for run in runs.volume_between(begin, end):
            run.of_volume(again[begin:end], begin)[...] = run.of_packed(packed)
    assert np.array_equal(again, np.where(wanted, volume, 0))
    decoded = PartRuns.decoded(runs.encoded(), len(volume))
    assert decoded == runs


@settings(deadline=None, max_examples=60)
@given(st.lists(boxes(), min_size=1, max_size=5))
def test_a_stream_that_broke_off_continues_at_a_part_chunk(some: list[Any]) -> None:
    volume, runs, _ = volume_of(some)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "PART_BYTES", 32)
        parts = runs.parts
        assert [begin for begin, _, _ in parts] == [0, *(end for _, end, _ in parts)][:-1]
        whole = np.empty(runs.total, np.uint8)
        runs.pack(volume, 0, runs.total, whole)
        for begin, _, _ in parts[1:]:
            rest = runs.after(begin)
            found = np.empty(rest.total, np.uint8)
            rest.pack(volume, 0, rest.total, found)
            assert np.array_equal(found, whole[begin:])
            later = [(low + begin, high + begin, size) for low, high, size in rest.parts]
            assert later == [part for part in parts if part[0] >= begin]


def test_half_of_every_row_is_one_run() -> None:
    runs = runs_of([(100, 2, (64, 32), (0, 16), (64, 16))], 10_000)
    assert [column.tolist() for column in runs.columns] == [[132], [32], [64], [64], [2]]


def test_tensors_next_to_each_other_are_one_run() -> None:
    boxes = [(start, 4, (10,), (0,), (10,)) for start in (0, 40, 80)]
    boxes.append((120, 8, (2,), (0,), (2,)))
    boxes.append((0, 4, (10,), (0,), (10,)))  # a second time
    assert runs_of(boxes, 136).starts.tolist() == [0, 120]
    assert runs_of(boxes, 136).parts == [(0, 120, 4), (120, 136, 8)]


def test_boxes_that_overlap_are_sent_once() -> None:
    runs = runs_of([(0, 4, (8, 8), (first, 0), (5, 7)) for first in range(4)], 256)
    assert runs.total <= 256
    runs.check(256)


GOOD: Columns = ([0, 64], [16, 32], [32, 32], [2, 1], [4, 4])


@pytest.mark.parametrize(
    ("column", "values", "why"),
    [
        (0, [0, 101], "outside"),  # ends behind the volume
        (0, [0, 1 << 62], "outside"),
        (1, [16, 0], "empty"),
        (1, [36, 32], "overlap"),
        (1, [18, 32], "element"),
        (2, [1 << 61, 32], "outside"),
        (2, [0, 32], "overlap"),
        (2, [34, 32], "element"),
        (3, [0, 1], "empty"),
        (3, [1 << 62, 1], "outside"),
        (3, [128, 1], "outside"),
        (4, [3, 4], "1, 2, 4, 8 or 16"),
        (4, [0, 4], "1, 2, 4, 8 or 16"),
        (4, [4, 2], "order of their itemsizes"),
        (0, [0], "one length"),
    ],
)
def test_malformed_runs_are_refused(column: int, values: list[int], why: str) -> None:
    columns = [np.array(one, np.int64) for one in GOOD]
    PartRuns.decoded(PartRuns(*columns).encoded(), 128)
    columns[column] = np.array(values, np.int64)
    with pytest.raises(RemoteProtocolError, match=why):
        PartRuns.decoded(PartRuns(*columns).encoded(), 128)


def test_runs_have_no_more_bytes_than_their_volume() -> None:
    again = [np.array(one * 3, np.int64) for one in GOOD]
    with pytest.raises(RemoteProtocolError, match="more bytes than the volume"):
        PartRuns.decoded(PartRuns(*again).encoded(), 128)


def test_a_request_divides_a_volume_by_no_more_than_its_itemsizes() -> None:
    """As many runs as a request may have, of a few bytes each."""
    count = module.MAX_RUNS
    sizes = np.array(module.ITEMSIZES, np.int64)
    turns = [
        np.arange(count) * 16,
        *[np.full(count, 16)] * 2,
        np.ones(count),
        np.resize(sizes, count),
    ]
    columns = [column.astype(np.int64) for column in turns]
    with pytest.raises(RemoteProtocolError, match="order of their itemsizes"):
        PartRuns.decoded(PartRuns(*columns).encoded(), count * 16)
    columns[-1].sort()
    found = PartRuns.decoded(PartRuns(*columns).encoded(), count * 16)
    assert len(found.parts) == len(sizes)


@pytest.mark.parametrize("columns", [[], [b""] * 5, [b"\x03abc"] * 5, [bytes([1]) * (1 << 20)] * 5])
def test_malformed_columns_are_refused(columns: list[bytes]) -> None:
    with pytest.raises(RemoteProtocolError):
        PartRuns.decoded(columns, 128)


@settings(deadline=None, max_examples=100)
@given(st.binary(max_size=60))
def test_any_body_is_a_request_or_refused(body: bytes) -> None:
    try:
        assert isinstance(decode_request(body), PartsRequest)
    except RemoteProtocolError:
        pass


def test_a_volume_is_asked_for_once() -> None:
    import msgspec

    twice = PartsRequest("0" * 32, [VolumeParts("a", None, []), VolumeParts("a", None, [])])
    with pytest.raises(RemoteProtocolError, match="each once"):
        decode_request(msgspec.msgpack.encode(twice))
