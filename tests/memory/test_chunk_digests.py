"""Digests of chunks, of bytes that come in pieces of any size."""

from __future__ import annotations

import random

import pytest

from torchrelay.geometry import DIGEST_BYTES
from torchrelay.memory.digest import CELL_BYTES, ChunkDigests, digest


@pytest.mark.parametrize("seed", range(40))
def test_pieces_of_any_size_give_the_digests_of_chunks(seed: int) -> None:
    rng = random.Random(seed)
    chunk = rng.choice([1, 7, 4096, CELL_BYTES, 2 * CELL_BYTES])
    count = rng.randrange(1, 6 if chunk >= CELL_BYTES else 200)
    data = rng.randbytes(chunk * count - rng.randrange(chunk))
    expected = [digest(data[at : at + chunk]) for at in range(0, len(data), chunk)]
    known = bytearray(DIGEST_BYTES * len(expected))
    for n in range(0, len(expected), rng.choice([1, 3, 1000])):
        if rng.random() < 0.5:
            expected[n] = bytes([7]) * DIGEST_BYTES  # no one else would make it
            known[n * DIGEST_BYTES : (n + 1) * DIGEST_BYTES] = expected[n]
    found = bytearray(known)
    made = ChunkDigests(len(data), chunk, found, known if rng.random() < 0.5 else bytes(known))
    at = 0
    while at < len(data):
        size = rng.choice([1, 5, chunk, 3 * chunk, len(data)])
        made.add(at, data[at : at + size])
        at += size
    assert bytes(found) == b"".join(expected)


def test_it_begins_at_any_chunk() -> None:
    data = random.Random(0).randbytes(100)
    found = bytearray(DIGEST_BYTES * 10)
    ChunkDigests(100, 10, found).add(30, data[30:70])
    hashed = [n for n in range(10) if any(found[n * DIGEST_BYTES : (n + 1) * DIGEST_BYTES])]
    assert hashed == [3, 4, 5, 6]
    assert found[3 * DIGEST_BYTES : 4 * DIGEST_BYTES] == digest(data[30:40])
