"""Copies of many pieces of memory by few calls."""

from __future__ import annotations

import ctypes
import errno
import os
import random
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchrelay.geometry.runs import Moves
from torchrelay.memory import vectors
from torchrelay.memory.vectors import MOST_VECTORS, OtherMemoryError, batches, copy, read


def columns(rows: list[tuple[int, int, int]]) -> Moves:
    """Copies of (source, destination, size), one after the other in the stream."""
    sizes = np.array([row[2] for row in rows], np.uint64)
    sources, destinations = (np.array([row[n] for row in rows], np.uint64) for n in (0, 1))
    return Moves(np.cumsum(sizes) - sizes, sources, destinations, sizes)


@given(st.lists(st.integers(1, 50), max_size=40), st.integers(1, 60))
def test_batches_are_the_copies_in_order(sizes: list[int], piece: int) -> None:
    rows = [(n * 1000, n * 1000 + (1 << 63), size) for n, size in enumerate(sizes)]
    found = batches(columns(rows), piece)
    copied = []
    for batch in found:
        assert 0 < batch.nbytes <= piece
        assert batch.nbytes == batch.here[:, 1].sum() == batch.there[:, 1].sum()
        for here, there in zip(batch.here.tolist(), batch.there.tolist(), strict=True):
            assert here[1] == there[1]
            copied += [(there[0] + n, here[0] + n) for n in range(here[1])]
    assert copied == [(a + n, b + n) for a, b, size in rows for n in range(size)]
    # As few as a greedy packer makes: two that follow each other do not go into one.
    for one, two in pairwise(found):
        assert one.nbytes + int(two.here[0, 1]) > piece


def test_a_call_takes_no_more_pieces_than_the_kernel_does() -> None:
    found = batches(columns([(n * 100, n * 100, 1) for n in range(2 * MOST_VECTORS + 5)]))
    assert [len(batch.here) for batch in found] == [MOST_VECTORS, MOST_VECTORS, 5]
    assert batches(columns([])) == []


def scattered(seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, Moves]:
    """Memory to copy from and to, what it should be in the end, and the copies."""
    print(f"seed {seed}")
    chance = random.Random(seed)
    sizes = [chance.choice([1, 7, 4096, 64 << 10, 200_000]) for _ in range(60)]
    total = sum(sizes) + 60
    source = np.frombuffer(chance.randbytes(total), np.uint8)
    destination = np.zeros(total, np.uint8)
    expected = destination.copy()
    rows, at = [], 0
    for size in sizes:
        start = chance.randrange(total - size)
        rows.append((source.ctypes.data + start, destination.ctypes.data + at, size))
        expected[at : at + size] = source[start : start + size]
        at += size + 1
    return source, destination, expected, columns(rows)


@pytest.mark.parametrize("threads", [1, 3])
def test_copy(threads: int) -> None:
    source, destination, expected, moves = scattered(threads)
    copy(moves, threads)
    assert np.array_equal(destination, expected) and len(source)
    copy(columns([]), threads)


def test_copy_where_the_kernel_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(pid: int, batch: object) -> None:
        raise OtherMemoryError(errno.EPERM, "no")

    monkeypatch.setattr(vectors, "read", refuse)
    source, destination, expected, moves = scattered(9)
    copy(moves, 2)
    assert np.array_equal(destination, expected) and len(source)


def test_long_pieces_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    source = np.arange(100_000, dtype=np.uint32).view(np.uint8)
    destination = np.zeros_like(source)
    monkeypatch.setattr(vectors, "PIECE", 70_001)
    copy(columns([(source.ctypes.data, destination.ctypes.data, source.nbytes)]), 2)
    assert np.array_equal(source, destination)


def test_faults_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    here = ctypes.create_string_buffer(8)
    address = ctypes.addressof(here)
    [whole] = batches(columns([(address, address, 8)]))
    read(os.getpid(), whole)
    [wild] = batches(columns([(8, address, 8)]))
    with pytest.raises(OtherMemoryError) as fault:
        read(os.getpid(), wild)
    assert fault.value.errno == errno.EFAULT
    [partly] = batches(columns([(address, address, 4), (8, address, 4)]))
    with pytest.raises(OtherMemoryError) as fault:  # part of it was copied, which is not enough
        read(os.getpid(), partly)
    assert fault.value.errno == errno.EFAULT
    with pytest.raises(OtherMemoryError) as fault:
        read((1 << 22) + 1, whole)
    assert fault.value.errno == errno.ESRCH
    monkeypatch.setattr(vectors, "_readv", None)
    with pytest.raises(OtherMemoryError) as fault:
        read(os.getpid(), whole)
    assert fault.value.errno == errno.ENOSYS


@given(
    st.lists(st.tuples(st.integers(1, 3000), st.integers(0, 2500)), min_size=1, max_size=60),
    st.randoms(use_true_random=False),
)
@settings(deadline=None, max_examples=60)
def test_pieces_with_gaps_between_them_are_copied_alone(
    pieces: list[tuple[int, int]], chance: random.Random
) -> None:
    """Pieces of (bytes, gap after them), some of them out of order."""
    source = np.frombuffer(chance.randbytes(sum(map(sum, pieces))), np.uint8)
    at = np.cumsum([0, *map(sum, pieces)])[:-1].tolist()
    rows = [(source.ctypes.data + a, size) for a, (size, _) in zip(at, pieces, strict=True)]
    if chance.random() < 0.5:
        chance.shuffle(rows)
    destination = np.full(sum(size + 1 for _, size in rows), 7, np.uint8)
    expected, copies, to = destination.copy(), [], 0
    for address, size in rows:
        first = address - source.ctypes.data
        expected[to : to + size] = source[first : first + size]
        copies.append((address, destination.ctypes.data + to, size))
        to += size + 1  # a byte that stays as it was
    found = batches(columns(copies), chance.choice([500, 4000, 1 << 20]))
    for batch in found:
        read(os.getpid(), batch)
        assert len(batch.here) == len(batch.there) == len(batch.copies.nbytes) <= MOST_VECTORS
        assert batch.nbytes == batch.copies.nbytes.sum()
    assert (destination == expected).all()
