"""Stretches of a stream in memory, against a model that knows every byte's address."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchrelay.geometry.runs import Moves, Runs, moves

STREAM = 96
Rows = list[tuple[int, int, int]]
Model = dict[int, int]


@st.composite
def rows(draw: st.DrawFn) -> Rows:
    """Start, address and size of stretches in order; some touch in the stream and in memory."""
    found: Rows = []
    at, address = 0, draw(st.sampled_from([0, 1000, (1 << 63) - 20, (1 << 64) - 400]))
    for _ in range(draw(st.integers(0, 8))):
        at += draw(st.sampled_from([0, 0, 1, 5]))
        address += draw(st.sampled_from([0, 0, 3, 40]))
        size = min(draw(st.integers(0, 12)), STREAM - at)
        found.append((at, address, size))
        at, address = at + size, address + size
    return found


def made(found: Rows) -> Runs:
    return Runs(*([row[n] for row in found] for n in range(3)))


def model(found: Rows) -> Model:
    return {at + n: address + n for at, address, size in found for n in range(size)}


def seen(runs: Runs) -> Model:
    columns = zip(runs.starts.tolist(), runs.stops.tolist(), runs.addresses.tolist(), strict=True)
    return {low + n: address + n for low, high, address in columns for n in range(high - low)}


def each(found: Moves) -> dict[int, tuple[int, int]]:
    """Source and destination of every byte; each byte once, in order."""
    moved: dict[int, tuple[int, int]] = {}
    before = -1
    for at, source, destination, size in zip(*(c.tolist() for c in found), strict=True):
        assert at > before  # a copy of nothing does no harm
        for n in range(size):
            assert at + n not in moved
            moved[at + n] = (source + n, destination + n)
        before = at + size - 1
    return moved


def both(sources: Rows, destinations: Rows) -> dict[int, tuple[int, int]]:
    here, there = model(sources), model(destinations)
    return {at: (here[at], there[at]) for at in sorted(here.keys() & there.keys())}


@given(rows())
def test_runs_hold_what_they_were_made_of(found: Rows) -> None:
    runs = made(found)
    assert seen(runs) == model(found)
    # What follows in the stream and in memory is one run.
    ends = zip(runs.stops[:-1], runs.starts[1:], runs.addresses[1:], strict=True)
    sizes = runs.stops - runs.starts
    for n, (stop, start, address) in enumerate(ends):
        assert stop != start or runs.addresses[n] + sizes[n] != address


@given(rows(), rows())
def test_moves_are_what_both_have(sources: Rows, destinations: Rows) -> None:
    assert each(moves(made(sources), made(destinations))) == both(sources, destinations)


@given(rows(), rows(), st.integers(1, 9))
def test_cut_moves_are_the_same_copies(sources: Rows, destinations: Rows, most: int) -> None:
    cut = moves(made(sources), made(destinations)).cut(most)
    assert each(cut) == both(sources, destinations)
    assert all(size <= most for size in cut.nbytes.tolist())


@given(rows(), rows())
def test_only_is_what_they_have_of_some_stretches(found: Rows, some: Rows) -> None:
    wanted = {at + n for at, _, size in some for n in range(size)}
    kept = made(found).only([row[0] for row in some], [row[2] for row in some])
    assert seen(kept) == {at: where for at, where in model(found).items() if at in wanted}


@given(rows(), st.lists(st.booleans(), min_size=8, max_size=8))
def test_merged_is_all_of_several(found: Rows, side: list[bool]) -> None:
    parts = [made([row for row, mine in zip(found, side, strict=False) if mine is this])
             for this in (True, False)]  # fmt: skip
    assert seen(Runs.merged(*parts)) == model(found)


@given(rows())
def test_a_table_comes_back(found: Rows) -> None:
    runs = made(found)
    again = Runs.unpack(runs.pack(), STREAM)
    for name in ("starts", "stops", "addresses"):
        assert getattr(again, name).tolist() == getattr(runs, name).tolist()


numbers = st.one_of(st.integers(0, 2 * STREAM), st.integers(0, (1 << 64) - 1))


@given(st.lists(st.tuples(numbers, numbers, numbers), max_size=5), st.binary(max_size=3))
def test_any_table_is_in_order_in_the_stream_or_an_error(found: Rows, rest: bytes) -> None:
    data = np.array(found, "<u8").reshape(-1, 3).T.tobytes() + rest
    try:
        runs = Runs.unpack(data, STREAM)
    except ValueError:
        return
    assert not rest
    at = 0
    for start, _, size in found:
        assert at <= start and start + size <= STREAM
        at = start + size
    assert (runs.stops <= STREAM).all() and (runs.starts <= runs.stops).all()


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"x" * 23, "torn"),
        (np.array([[97], [0], [0]], "<u8").tobytes(), "outside"),
        (np.array([[90], [0], [7]], "<u8").tobytes(), "outside"),
        (np.array([[8], [0], [(1 << 64) - 4]], "<u8").tobytes(), "outside"),
        (np.array([[0, 4], [0, 9], [5, 1]], "<u8").tobytes(), "overlaps"),
        (np.array([[9, 0], [0, 9], [1, 1]], "<u8").tobytes(), "overlaps"),
    ],
)
def test_bad_tables(data: bytes, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        Runs.unpack(data, STREAM)


@given(rows(), st.integers(0, STREAM), st.integers(0, STREAM))
def test_within_and_reaches(found: Rows, one: int, other: int) -> None:
    start, stop = sorted((one, other))
    runs = made([row for row in found if row[2]])
    part = {
        at + n: address + n for at, address, size in runs.within(start, stop) for n in range(size)
    }
    assert part == {at: where for at, where in model(found).items() if start <= at < stop}
    assert runs.reaches(start, stop) == bool(part)
